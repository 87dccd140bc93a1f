"""Ranks: one run on several processes. Nothing is here yet; `torch.distributed` may be imported here and in storage only."""
