"""Mixture of experts: routing, and the kernels that compute the selected experts."""
