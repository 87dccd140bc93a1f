"""Model families, one file per lineage: each `Family` converts configs in both directions and maps weights."""
