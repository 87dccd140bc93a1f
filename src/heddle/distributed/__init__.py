"""Training on several ranks: process group, sharding and launcher.

Only this package and storage may import `torch.distributed`.
"""
