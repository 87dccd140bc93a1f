"""Conversions: a design and its weights to another design, or to other weights."""
