"""Tokenizers and the bytes of their tokens."""

# The most tokens that a tokenizer trained by heddle learns, where no vocab_size is given.
DEFAULT_VOCAB_SIZE = 4096
