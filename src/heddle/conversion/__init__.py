"""Rewrites: a design and its weights to another design, or other weights."""
