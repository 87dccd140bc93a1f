"""One file a family: `FAMILY`, of two pure functions between configs and rules between tensors."""
