"""Runs on several processes: none so far. Only this package and storage may import `torch.distributed`."""
