"""Floor 1: pure functions of tensors. Each file: the reference first, then the fast forms, then the choice."""
