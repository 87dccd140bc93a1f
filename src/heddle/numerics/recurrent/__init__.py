"""Recurrent sequence operations: linear attention, retention, SSD, the gated delta rule, causal convolution."""
