"""Other people's model folders in, and out to them: Hugging Face's families, without its library."""
