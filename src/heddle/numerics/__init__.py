"""Pure functions of tensors. A module has a reference, fast kernels, and an operation that chooses among them."""
