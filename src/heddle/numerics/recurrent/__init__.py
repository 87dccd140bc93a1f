"""Sums and states over earlier tokens: linear attention, retention, the gated delta rule."""
