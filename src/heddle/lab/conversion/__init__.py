"""Measure a conversion: the original, the converted and the healed model on the same text, and what they cost."""
