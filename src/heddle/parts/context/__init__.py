"""What all parts share: the context they are built in, the layout of a call, the position table, states, KV cache."""
