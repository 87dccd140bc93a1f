"""Compare, inspect and plan designs: plain data first, then pages."""
