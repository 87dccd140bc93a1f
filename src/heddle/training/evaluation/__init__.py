"""Evaluate a model: bits per byte of text (comparable across tokenizers), task accuracy, length extrapolation."""
