"""Mixtures of experts: routing, and the forms that compute the chosen experts."""
