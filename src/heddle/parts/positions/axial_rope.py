"""RoPE in the plane (RoPE-Axial of Heo et al. 2024): half of a head's dims turn by x, the other half by y.

    pair i of the first half turns by  x · base^(-2i/(dim/2)),   pair i of the second by  y · base^(-2i/(dim/2))

Scores know differences in x and in y only. Places come with the layout (`layout.with_places(places)`); without them a
token stands at (position, position), so that a text is turned as by RoPE with half as many frequencies.
"""

import math
from typing import Literal, Self

import torch
from torch import Tensor

from heddle.config import Count, DesignError, Finite, Positive
from heddle.errors import ConfigError
from heddle.numerics.rotary import frequencies, rotate, table
from heddle.parts.context.layout import Layout
from heddle.parts.modules.eager import eager
from heddle.parts.positions import Rotation, RotationConfig


class AxialRopeConfig(RotationConfig):
    """Fields of `axial_rope`; `frequencies`, one a pair of an axis, replace those of `base`."""

    base: Positive = 10000.0
    layout: Literal["half", "interleaved"] = "half"  # of the pairs within the dims of one axis
    dim: Count | None = None  # dims that are turned, both axes together; default: the head's width
    frequencies: tuple[Finite, ...] | None = None

    def resolved(self, head_dim: int) -> Self:
        """The dims that are turned written out."""
        return self.replace(dim=self.dim or head_dim)

    def build(self, head_dim: int) -> "AxialRope":
        """Make the module. Raises DesignError for a `dim` that does not fit, or a wrong number of frequencies."""
        dim = self.dim or head_dim
        if dim % 4 or dim > head_dim:
            reason = f"{dim} cannot be turned in pairs along two axes within heads of {head_dim}"
            raise DesignError("dim", f"{reason}; give a multiple of 4 that fits")
        if self.frequencies is not None and len(self.frequencies) != dim // 4:
            raise DesignError("frequencies", f"{len(self.frequencies)} given; dim = {dim} needs {dim // 4}")
        return AxialRope(self, dim)


class AxialRope(Rotation):
    """The module. It holds no tensor, so no change of dtype can harm its angles."""

    axes = 2

    def __init__(self, config: AxialRopeConfig, dim: int) -> None:
        super().__init__()
        self.layout, self.dim = config.layout, dim
        self.thetas = tuple(config.frequencies or frequencies(dim // 2, config.base))

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape; the table is made once for all layers."""
        cosine, sine = self._table(layout, x.dtype)
        halves = x[..., : self.dim].unflatten(-1, (2, -1))
        turned = rotate(halves, cosine, sine, self.layout).flatten(-2)
        return turned if self.dim == x.shape[-1] else torch.cat((turned, x[..., self.dim :]), dim=-1)

    @eager
    def _table(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        known = ("axial_rope", self.thetas, dtype, self.exact)
        return layout.once(known, lambda: self._make(layout.coordinates, dtype))

    def _make(self, coordinates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cosine, sine = table(coordinates, list(self.thetas), self.table_dtype(dtype, coordinates.device))
        return cosine.to(dtype), sine.to(dtype)


def locate(rotation: AxialRope, before: Tensor, after: Tensor) -> Tensor:
    """Read places off what a rotation did: heads [B, H, T, head_dim] before and after it -> x and y [B, T, 2].

    Each pair tells its angle, hence a coordinate up to a multiple of 2π/θ. The slowest pair tells it coarsely within
    its period; each faster one, unwrapped by what is known already, tells it more finely. So places are found within
    ± π/θ of the slowest pair, and those beyond are found one or more of its periods off. No pair may be zero in all
    heads before. Raises ConfigError for shapes that do not fit, or where no pair turns.
    """
    if before.shape != after.shape or before.dim() != 4 or before.shape[-1] < rotation.dim:
        shapes = f"{list(before.shape)} and {list(after.shape)}"
        raise ConfigError(f"locate: heads have shapes {shapes}; expected equal ones [batch, heads, length, head_dim]")
    slow_first = sorted((abs(theta), i) for i, theta in enumerate(rotation.thetas) if theta)
    if not slow_first:
        raise ConfigError("locate: every frequency is 0, so places leave no trace; give frequencies that turn")
    start, end = (_pairs(x, rotation) for x in (before, after))  # complex [B, H, T, 2, pairs]
    angles = (end * start.conj()).sum(1).angle()  # heads are turned alike: together they tell one angle
    found = torch.zeros_like(angles[..., 0])
    for _, i in slow_first:
        theta = rotation.thetas[i]
        turns = ((found * theta - angles[..., i]) / (2 * math.pi)).round()
        found = (angles[..., i] + 2 * math.pi * turns) / theta
    return found


def _pairs(x: Tensor, rotation: AxialRope) -> Tensor:
    """Heads [B, H, T, head_dim] -> their turned pairs as complex numbers [B, H, T, 2, pairs]."""
    halves = x[..., : rotation.dim].unflatten(-1, (2, -1))
    if rotation.layout == "half":
        first, second = halves.chunk(2, dim=-1)
    else:
        first, second = halves[..., 0::2], halves[..., 1::2]
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.complex(first.to(wide), second.to(wide))
