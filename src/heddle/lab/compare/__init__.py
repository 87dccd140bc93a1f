"""Designs side by side: trained on the same data in the same order, measured, and reported with their intervals."""
