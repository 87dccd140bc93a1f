"""Comparison and inspection of designs: plain data first, then pages."""
