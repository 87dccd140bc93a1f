"""Modules that several parts use: projections, dropout, router statistics."""
