"""The coordinates that rotated heads hold: the inverse of `axial_rope`."""

import math

import torch
from torch import Tensor

from heddle.parts.positions.axial_rope import AxialRope


def recover_coordinates(rotation: AxialRope, before: Tensor, after: Tensor) -> Tensor:
    """Recover coordinates from rotated heads: heads [B, H, T, head_dim] before and after -> x and y [B, T, 2].

    The angle of each pair determines the coordinate up to a multiple of 2π/θ, with θ the pair's inverse frequency. The
    slowest pair gives a coarse estimate; each faster pair, unwrapped by the estimate so far, refines it. Coordinates
    within ± π/θ of the slowest pair are recovered; larger ones are off by whole periods of that pair. No pair may be
    zero in all heads of `before`.
    """
    slow_first = sorted((abs(theta), i) for i, theta in enumerate(rotation.inv_freq) if theta)
    start, end = (_pairs(x, rotation) for x in (before, after))  # complex [B, H, T, 2, pairs]
    angles = (end * start.conj()).sum(1).angle()  # all heads are rotated by the same angle
    estimate = torch.zeros_like(angles[..., 0])
    for _, i in slow_first:
        theta = rotation.inv_freq[i]
        turns = ((estimate * theta - angles[..., i]) / (2 * math.pi)).round()
        estimate = (angles[..., i] + 2 * math.pi * turns) / theta
    return estimate


def _pairs(x: Tensor, rotation: AxialRope) -> Tensor:
    """Heads [B, H, T, head_dim] -> the rotary pairs as complex numbers [B, H, T, 2, pairs]."""
    halves = x[..., : rotation.rotary_dim].unflatten(-1, (2, -1))
    if rotation.layout == "half":
        first, second = halves.chunk(2, dim=-1)
    else:
        first, second = halves[..., 0::2], halves[..., 1::2]
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.complex(first.to(wide), second.to(wide))
