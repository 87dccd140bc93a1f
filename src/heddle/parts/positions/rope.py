"""RoPE (Su et al. 2021): rotate pair i of a head at position m by the angle `m · base^(-2i/rotary_dim)`.

Layouts of the pairs: `half` = dims (i, i + rotary_dim/2) (NeoX, Hugging Face's Llama), `interleaved` = dims
(2i, 2i + 1) (RoFormer, GPT-J, DeepSeek). With `rotary_dim` below head_dim only the first dims are rotated (partial
rotary).
"""

from functools import lru_cache, partial
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from heddle.config import DesignError, FiniteFloat, PositiveFloat, Width, build_under, refuse
from heddle.numerics.rotary import apply_rotary, pos_freqs, rotary_table
from heddle.parts.context.layout import Layout
from heddle.parts.modules.eager import eager
from heddle.parts.positions import Rotation, RotationConfig
from heddle.parts.scalings import ScaledFrequencies, ScalingConfig


class RopeConfig(RotationConfig):
    """Fields of `rope`. `inv_freq`, one per pair, replaces the inverse frequencies of `base`."""

    base: PositiveFloat = 10000.0
    layout: Literal["half", "interleaved"] = "half"
    rotary_dim: Width | None = None  # default: head_dim
    inv_freq: tuple[FiniteFloat, ...] | None = None
    scaling: ScalingConfig | None = None  # changes the frequencies of `base` for longer texts
    cast: Literal["after"] | None = None  # half-precision heads are rotated in float32, then cast (OLMo-2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scaling is not None and self.inv_freq is not None:
            refuse(
                "inv_freq", "is given together with scaling, which needs the frequencies of base; keep one of the two"
            )
        if self.scaling is not None and self.base <= 1.0:
            refuse("base", f"{self.base} makes no pair slower than the first, so there is nothing to scale; raise it")
        return self

    def resolved(self, head_dim: int) -> Self:
        """The number of rotary dims written out."""
        return self.replace(rotary_dim=self.rotary_dim or head_dim)

    def build(self, head_dim: int) -> "Rope":
        """Build the module. Raises DesignError for a wrong `rotary_dim` or number of frequencies."""
        dim = self.rotary_dim or head_dim
        if dim % 2 or dim > head_dim:
            raise DesignError(
                "rotary_dim", f"{dim} dims of {head_dim} cannot be rotated in pairs; give an even number that fits"
            )
        if self.inv_freq is not None and len(self.inv_freq) != dim // 2:
            raise DesignError("inv_freq", f"{len(self.inv_freq)} given; rotary_dim = {dim} needs {dim // 2}")
        return Rope(self, dim)


class Rope(Rotation):
    """The module. It holds no tensor, so no change of dtype can harm its angles.

    A length-dependent scaling gets the cache length of the state, so that every token of a text is rotated with the
    same frequencies. In a call without a state it gets the length of the longest text.
    """

    def __init__(self, config: RopeConfig, dim: int) -> None:
        super().__init__()
        self.layout, self.cast = config.layout, config.cast
        self.length_dependent = config.scaling is not None and config.scaling.length_dependent
        self.scaled_frequencies = lru_cache(maxsize=16)(partial(_scaled_frequencies, config, dim))
        _, self.attention_factor, self.score_scale = self.scaled_frequencies(1)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape; the table of angles is built once for all layers."""
        wide = torch.promote_types(x.dtype, torch.float32) if self.cast == "after" else x.dtype
        cosine, sine = self._table(layout, wide)
        return apply_rotary(x, cosine, sine, self.layout).to(x.dtype)

    @eager
    def _table(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        in_float64 = self.table_dtype(dtype, layout.positions.device) == torch.float64
        length = layout.max_text_length if self.length_dependent else 1
        inv_freq = self.scaled_frequencies(length, torch.float64 if in_float64 else torch.float32).inv_freq
        key = ("rope", inv_freq, self.attention_factor, dtype, self.float64_angles)
        return layout.cached(key, lambda: self._make_table(layout.positions, inv_freq, dtype))

    def _make_table(self, positions: Tensor, inv_freq: tuple[float, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = self.table_dtype(dtype, positions.device)
        cosine, sine = rotary_table(positions, list(inv_freq), wide, self.attention_factor)
        return cosine.to(dtype), sine.to(dtype)


def _scaled_frequencies(
    config: RopeConfig, dim: int, length: int, dtype: torch.dtype = torch.float64
) -> ScaledFrequencies:
    """The inverse frequencies of `dim` rotary dims for a text of `length` tokens, computed in `dtype`."""
    if config.inv_freq is not None:
        return ScaledFrequencies(config.inv_freq)
    if config.scaling is None:
        return ScaledFrequencies(tuple((1.0 / pos_freqs(dim, config.base, dtype)).tolist()))
    return build_under("scaling", config.scaling.scale_frequencies, dim, config.base, length, dtype)
