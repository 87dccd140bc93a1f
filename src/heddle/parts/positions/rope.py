"""RoPE (Su et al. 2021): turn pair i of a head at position m by `m · base^(-2i/dim)`.

Layouts of the pairs: `half` = dims (i, i + dim/2) (NeoX, Hugging Face's Llama), `interleaved` = dims (2i, 2i + 1)
(RoFormer, GPT-J, DeepSeek). `dim` below the head's width turns its first dims only (partial rotary).
"""

from functools import lru_cache, partial
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import Count, DesignError, Finite, Positive, build_under, refuse
from heddle.numerics.rotary import periods, rotate, table
from heddle.parts.context.layout import Layout
from heddle.parts.modules.eager import eager
from heddle.parts.positions import Rotation, RotationConfig
from heddle.parts.scalings import ScalingConfig, Stretched


class RopeConfig(RotationConfig):
    """Fields of `rope`; `frequencies`, one a pair, replace those of `base`."""

    base: Positive = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    dim: Count | None = None  # default: the head's width
    frequencies: tuple[Finite, ...] | None = None
    scaling: ScalingConfig | None = None  # stretches the frequencies of `base` to longer texts
    cast: Literal["after"] | None = None  # narrow heads are turned in float32 and cast then (OLMo-2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling is not None and self.frequencies is not None:
            refuse("frequencies", "are given beside scaling, which stretches those of base; keep one of the two")
        if self.scaling is not None and self.base <= 1.0:
            refuse("base", f"{self.base} makes no pair slower than the first, so scaling has none to stretch; raise it")
        return self

    def resolved(self, head_dim: int) -> Self:
        """The dims that are turned written out."""
        return self.replace(dim=self.dim or head_dim)

    def build(self, head_dim: int) -> "Rope":
        """Make the module. Raises DesignError for an odd or too large `dim`, or a wrong number of frequencies."""
        dim = self.dim or head_dim
        if dim % 2 or dim > head_dim:
            raise DesignError("dim", f"{dim} cannot be turned in pairs within heads of {head_dim}; give an even dim")
        if self.frequencies is not None and len(self.frequencies) != dim // 2:
            raise DesignError("frequencies", f"{len(self.frequencies)} given; dim = {dim} needs {dim // 2}")
        return Rope(self, dim)


class Rope(Rotation):
    """The module. It holds no tensor, so no change of dtype can harm its angles.

    A scaling that looks at the length is given the state's capacity, so that all of a text is turned alike, or that of
    the longest text in a call without a state.
    """

    def __init__(self, config: RopeConfig, dim: int) -> None:
        super().__init__()
        self.layout, self.cast = config.layout, config.cast
        self.by_length = config.scaling is not None and config.scaling.by_length
        self.turns = lru_cache(maxsize=16)(partial(_turns, config, dim))
        _, self.amplitude, self.score = self.turns(1)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape; the table is made once for all layers."""
        wide = torch.promote_types(x.dtype, torch.float32) if self.cast == "after" else x.dtype
        cosine, sine = self._table(layout, wide)
        return rotate(x, cosine, sine, self.layout).to(x.dtype)

    @eager
    def _table(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        exact = self.table_dtype(dtype, layout.positions.device) == torch.float64
        length = layout.text_length if self.by_length else 1
        thetas = self.turns(length, torch.float64 if exact else torch.float32).thetas
        known = ("rope", thetas, self.amplitude, dtype, self.exact)
        return layout.once(known, lambda: self._make(layout.positions, thetas, dtype))

    def _make(self, positions: Tensor, thetas: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = self.table_dtype(dtype, positions.device)
        cosine, sine = table(positions, list(thetas), wide, self.amplitude)
        return cosine.to(dtype), sine.to(dtype)


def _turns(config: RopeConfig, dim: int, length: int, dtype: torch.dtype = torch.float64) -> Stretched:
    """What turns `dim` dims in a text of `length` tokens, computed in `dtype`."""
    if config.frequencies is not None:
        return Stretched(config.frequencies)
    if config.scaling is None:
        return Stretched(tuple((1.0 / periods(dim, config.base, dtype)).tolist()))
    return build_under("scaling", config.scaling.stretch, dim, config.base, length, dtype)
