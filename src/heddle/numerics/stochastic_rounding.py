"""Stochastic rounding to bfloat16 (Gupta et al. 2015): to one of the two neighbours, the nearer the likelier.

The mean of many roundings is the number itself, so that updates far below the spacing of bfloat16 are not lost.
"""

import torch
from torch import Tensor

from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.numerics.philox import WORD, RandomStream, philox

BLOCKS = DeviceSize(cpu=2**13, accelerator=2**22)  # blocks of random words drawn at once
_DRAWS = 8  # 16-bit draws of a block
_LOW = 0xFFFF  # what float32 has more than bfloat16


def stochastic_round(values: Tensor, stream: RandomStream, start: int = 0) -> Tensor:
    """Round float32 values to bfloat16 of the same shape.

    Element i takes draw `start + i` of 16 bits of the stream, so the result does not depend on the device, nor on how a
    tensor is cut. Numbers that bfloat16 has, infinities and NaN stay as they are.
    """
    flat, result = values.reshape(-1), torch.empty(values.numel(), dtype=torch.bfloat16, device=values.device)
    elements = _DRAWS * BLOCKS.on(values)
    for first in range(0, len(flat), elements):
        part = flat[first : first + elements]
        first_block, skipped = divmod(start + first, _DRAWS)
        blocks = torch.arange(first_block, -(-(start + first + len(part)) // _DRAWS), device=values.device)
        bits = part.view(torch.int32) + _draws(blocks, stream.key)[skipped : skipped + len(part)]
        rounded = bits.bitwise_and_(~_LOW).view(torch.float32)
        result[first : first + len(part)] = torch.where(part.isfinite(), rounded, part)
    return result.view(values.shape)


def _draws(blocks: Tensor, key: int) -> Tensor:
    """int32 [8 N] from 0 to 2^16 − 1, of the blocks int64 [N]."""
    zero = torch.zeros_like(blocks)
    words = torch.stack(philox((blocks & WORD, blocks >> 32, zero, zero), key), dim=-1)
    return torch.stack((words & _LOW, words >> 16), dim=-1).flatten().to(torch.int32)
