"""Softmax attention: the reference and its fast kernels, masks, score modifiers and observers."""
