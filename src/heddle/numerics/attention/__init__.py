"""Softmax attention: the reference, its fast forms, and what they share."""
