"""Tokenizers and the bytes of their tokens."""

# The vocabulary size of tokenizers that heddle trains, if no vocab_size is given.
DEFAULT_VOCAB_SIZE = 4096
