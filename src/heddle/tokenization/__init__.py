"""Tokenizers and the bytes of their tokens."""

# The vocabulary size of tokenizers that heddle trains, if no vocab_size is given.
DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 257  # the 256 bytes and the end token
MAX_VOCAB_SIZE = 2**20  # the trainer allocates memory for this many tokens before it reads the text


def size_problem(vocab_size: int) -> str:
    """Why no tokenizer of this size can be trained, with the remedy; empty if one can."""
    if vocab_size > MAX_VOCAB_SIZE:
        return f"is too large to train a tokenizer; give at most {MAX_VOCAB_SIZE}"
    small = f"is too small to hold every byte and the end token; give at least {MIN_VOCAB_SIZE}"
    return small if vocab_size < MIN_VOCAB_SIZE else ""
