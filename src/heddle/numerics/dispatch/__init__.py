"""How an operation chooses its form, and how its FLOPs are counted."""
