"""Moments of small tensors lie one behind another, so that one pass over memory checks many of them."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from heddle.distributed.ranks import as_sharded, local_part

SMALL = 2**18  # elements; a pass over more takes longer than its call
ALIGNMENT = 16  # elements: each moment begins where a cache line does


def share_buffers(states: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Move the small moments in states of an optimizer on a CPU into one buffer for each dtype, in their own shapes.

    Returns tensors that hold the numbers of all moments, on this rank: the buffers, and every other moment.
    """
    small: dict[torch.dtype, list[tuple[dict[str, Tensor], str]]] = defaultdict(list)
    tensors = []
    for state in states:
        for name, moment in state.items():
            if not moment.dim():  # a count of steps
                continue
            if moment.device.type == "cpu" and moment.numel() <= SMALL and as_sharded(moment) is None:
                small[moment.dtype].append((state, name))
            else:
                tensors.append(local_part(moment))
    for dtype, moments in small.items():
        sizes = [-(-state[name].numel() // ALIGNMENT) * ALIGNMENT for state, name in moments]
        buffer = torch.zeros(sum(sizes), dtype=dtype)
        for (state, name), part in zip(moments, buffer.split(sizes), strict=True):
            state[name] = part[: state[name].numel()].view(state[name].shape).copy_(state[name])
        tensors.append(buffer)
    return tensors
