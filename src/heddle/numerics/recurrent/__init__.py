"""Recurrent sequence operations: linear attention, retention, the gated delta rule, causal convolution."""
