"""Tokenizers and the bytes of their tokens."""
