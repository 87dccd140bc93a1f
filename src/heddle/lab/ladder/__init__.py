"""Ladders: designs trained at several sizes, their loss as a function of size, and what it predicts for larger ones."""
