"""Measuring a model on text, in bits per byte: comparable across tokenizers."""
