"""Conversions of a trained model to another design, layer by layer. One file of `rewrites/` is one conversion."""
