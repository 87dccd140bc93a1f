"""Training steps on several ranks, and what a training takes on many GPUs.

Only this package and storage may import `torch.distributed`.
"""
