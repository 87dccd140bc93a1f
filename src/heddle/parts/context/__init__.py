"""What every part shares in a call: layout, position table, states, KV cache."""
