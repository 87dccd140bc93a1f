"""Modifiers of attention scores: softcap (Gemma 2), ALiBi slopes (Press et al. 2021), attention sink (gpt-oss).

    score = cap · tanh(q k · scale / cap) − slope_h · |i − j|,   weights = softmax([scores ; sink_h])[:-1]

Everything here is computed in at least float32.
"""

from typing import NamedTuple

from torch import Tensor

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.norms import at_least_float32


class ScoreModifiers(NamedTuple):
    """`softcap` bounds the scores. `sink` [H] is one logit per head without a value. `slopes` [H] are for ALiBi."""

    softcap: float | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None

    def per_query(self, q: Tensor, distance: Tensor | None = None) -> "PerQueryModifiers":
        """The same modifiers, expanded to every query of q [B, H, T, d]. `distance` as in `PerQueryModifiers`."""
        sink, slope = (
            None if x is None else at_least_float32(x)[:, None, None].expand(*q.shape[:3], 1)
            for x in (self.sink, self.slopes)
        )
        return PerQueryModifiers(self.softcap, sink, slope, distance)

    def bias(self, mask: AttentionMask) -> Tensor | None:
        """−slope · |i − j|, [B, H, T, S], or [1, H, T, S] if all rows are known to be equal."""
        if self.slopes is None:
            return None
        slopes = at_least_float32(self.slopes)
        return slopes[:, None, None] * -mask.distance().to(slopes.dtype)[:, None]


class PerQueryModifiers(NamedTuple):
    """Modifiers of each query: `sink` and `slope` are [B, H, T, 1], `distance` [T, S] is |i − j|."""

    softcap: float | None = None
    sink: Tensor | None = None
    slope: Tensor | None = None
    distance: Tensor | None = None


NO_MODIFIERS = ScoreModifiers()
NO_QUERY_MODIFIERS = PerQueryModifiers()
