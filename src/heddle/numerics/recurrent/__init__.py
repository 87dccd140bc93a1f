"""Recurrent sequence operations: linear attention, retention, SSD, scans, the gated delta rule, causal convolution."""
