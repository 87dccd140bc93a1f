"""Import and export of other libraries' model folders: Hugging Face's families, without its library."""
