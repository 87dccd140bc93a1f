"""One file a row."""
