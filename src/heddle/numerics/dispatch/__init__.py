"""Selects the kernel of an operation and counts its FLOPs."""
