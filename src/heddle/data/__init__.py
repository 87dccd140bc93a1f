"""Datasets: text sources, conversations, labeled rows and synthetic tasks, as batches of tokens in a fixed order."""
