"""Seconds of training steps, prompts and tokens of several designs, and of transformers' models, side by side."""
