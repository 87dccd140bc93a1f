"""RoPE in the plane (RoPE-Axial of Heo et al. 2024): half of the rotary dims are rotated by x, the other half by y.

    angle of pair i: x · base^(-2i/(rotary_dim/2)) in the first half, y · base^(-2i/(rotary_dim/2)) in the second half

Scores depend on differences in x and in y only. Coordinates come with the layout
(`layout.with_coordinates(coordinates)`). Without them a token is at (position, position), and a sequence is rotated as
by RoPE with half as many frequencies.
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, FiniteFloat, PositiveFloat, Width
from heddle.numerics.rotary import angle_dtype, apply_rotary, inverse_frequencies, rotary_table
from heddle.numerics.transfer import Constants
from heddle.parts.layout import Layout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.positions import DEFAULT_BASE, Rotation, RotationConfig, check_base


class AxialRopeConfig(RotationConfig):
    """Fields of `axial_rope`. `inv_freq`, one per pair of an axis, replaces the inverse frequencies of `base`."""

    base: PositiveFloat = DEFAULT_BASE
    layout: Literal["half", "interleaved"] = "half"  # of the pairs within the dims of one axis
    rotary_dim: Width | None = None  # of both axes together; default: head_dim
    inv_freq: tuple[FiniteFloat, ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_base(self.base, self.inv_freq)
        return self

    def resolved(self, head_dim: int) -> Self:
        """The number of rotary dims written out."""
        return self.replace(rotary_dim=self.rotary_dim or head_dim)

    def build(self, head_dim: int) -> "AxialRope":
        """Build the module. Raises DesignError for a wrong `rotary_dim` or number of frequencies."""
        dim = self.rotary_dim or head_dim
        if dim % 4 or dim > head_dim:
            reason = f"{dim} dims of {head_dim} cannot be rotated in pairs along two axes"
            raise DesignError("rotary_dim", f"{reason}; give a multiple of 4 that fits")
        if self.inv_freq is not None and len(self.inv_freq) != dim // 4:
            raise DesignError("inv_freq", f"{len(self.inv_freq)} given; rotary_dim = {dim} needs {dim // 4}")
        return AxialRope(self, dim)


class AxialRope(Rotation):
    """The module. It holds no tensor, so no change of dtype can harm its angles."""

    axes = 2

    def __init__(self, config: AxialRopeConfig, dim: int) -> None:
        super().__init__()
        self.layout, self.rotary_dim = config.layout, dim
        self.inv_freq = tuple(config.inv_freq or inverse_frequencies(dim // 2, config.base))
        self._constants = Constants()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape; the table of angles is built once for all layers."""
        cosine, sine = self._table(layout, x.dtype)
        halves = x[..., : self.rotary_dim].unflatten(-1, (2, -1))
        rotated = apply_rotary(halves, cosine, sine, self.layout).flatten(-2)
        return rotated if self.rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., self.rotary_dim :]), dim=-1)

    @layout_dependent
    def _table(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = ("axial_rope", self.inv_freq, dtype, self.float64_angles)
        return layout.cached(key, lambda: self._make_table(layout.axial_positions, dtype))

    def _make_table(self, coordinates: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = self.table_dtype(dtype, coordinates.device)
        inv_freq = self._constants.tensor(self.inv_freq, angle_dtype(wide), coordinates.device)
        cosine, sine = rotary_table(coordinates, inv_freq, wide)
        return cosine.to(dtype), sine.to(dtype)
