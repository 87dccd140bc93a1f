"""The rewrites: one file each. A file holds one config, whose `apply` makes the new design and its weights."""
