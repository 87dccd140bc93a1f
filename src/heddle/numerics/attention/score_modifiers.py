"""What makes attention's weights beside queries and keys: a cap on the scores, a bias of distance, a sink.

    score = cap · tanh(q k · scale / cap) − slope_h · |i − j|,   weights = softmax([scores ; sink_h]) without its last

(Gemma 2; ALiBi, Press et al. 2021; gpt-oss). Whatever is made here is at least float32.
"""

from typing import NamedTuple

from torch import Tensor

from heddle.numerics.attention.visibility import Visibility
from heddle.numerics.norms import at_least_float32


class Extras(NamedTuple):
    """`softcap` bounds the scores; `sink` [H] is a logit a head without a value; `slopes` [H] count distance off."""

    softcap: float | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None

    def columns(self, q: Tensor, gap: Tensor | None = None) -> "Columns":
        """The same for each query of q [B, H, T, d]; `gap` as in `Columns`."""
        sink, slope = (
            None if x is None else at_least_float32(x)[:, None, None].expand(*q.shape[:3], 1)
            for x in (self.sink, self.slopes)
        )
        return Columns(self.softcap, sink, slope, gap)

    def bias(self, seen: Visibility) -> Tensor | None:
        """−slope · |i − j|, [B, H, T, S], or [1, H, T, S] where all rows stand alike."""
        if self.slopes is None:
            return None
        slopes = at_least_float32(self.slopes)
        return slopes[:, None, None] * -seen.distance().to(slopes.dtype)[:, None]


class Columns(NamedTuple):
    """Extras query by query: `sink` and `slope` are [B, H, T, 1], `gap` [T, S] tells how far each key is."""

    cap: float | None = None
    sink: Tensor | None = None
    slope: Tensor | None = None
    gap: Tensor | None = None


PLAIN = Extras()
NONE = Columns()
