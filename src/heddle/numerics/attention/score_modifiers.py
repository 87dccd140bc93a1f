"""Modifiers of attention scores: softcap (Gemma 2), a score bias (ALiBi, T5), attention sink (gpt-oss).

    score = cap · tanh(q k · scale / cap) + bias_h(i − j),   weights = softmax([scores ; sink_h])[:-1]

Everything here is computed in at least float32.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.norms import at_least_float32


class ScoreBiasFunction(Protocol):
    """What is added to the scores: a function of the offset i − j of query i and key j, for each head.

    It may depend on tensors that have gradients. Kernels call it for the offsets that they need.
    """

    def __call__(self, offsets: Tensor, /) -> Tensor:
        """offsets int64 [...] -> the bias of each head at each offset, [H, ...], in at least float32."""


class LinearBias(NamedTuple):
    """−slope_h · |i − j| (ALiBi), with the slope of each head [H]. A kernel may compute it from the slopes."""

    slopes: Tensor

    def __call__(self, offsets: Tensor, /) -> Tensor:
        """offsets int64 [...] -> [H, ...]."""
        slopes = self.slopes.view(-1, *(1 for _ in offsets.shape))
        return slopes * -offsets.abs().to(slopes.dtype)


class ScoreModifiers(NamedTuple):
    """`softcap` bounds the scores. `score_bias` is added to them. `sink` [H] is one logit per head without a value."""

    softcap: float | None = None
    sink: Tensor | None = None
    score_bias: ScoreBiasFunction | None = None

    def sink_per_query(self, q: Tensor) -> Tensor | None:
        """The sink of every query of q [B, H, T, d]: [B, H, T, 1]."""
        return None if self.sink is None else at_least_float32(self.sink)[:, None, None].expand(*q.shape[:3], 1)

    def bias(self, mask: AttentionMask) -> Tensor | None:
        """The score bias of every query and key, [B, H, T, S], or [1, H, T, S] if all rows are known to be equal."""
        return None if self.score_bias is None else self.score_bias(mask.offsets()).transpose(0, 1)

    def distance_table(self, keys: int, device: torch.device) -> Tensor | None:
        """The score bias at the offsets 0 … keys − 1, [H, keys]: all that causal attention can need."""
        return None if self.score_bias is None else self.score_bias(torch.arange(keys, device=device))


class BlockModifiers(NamedTuple):
    """The modifiers of a call whose queries may stand in blocks: `sink` [B, H, T, 1], `bias` [H, T, S] or folded.

    With `blocks` > 1 each group of keys stands `blocks` times in a row, and all of them have the same bias.
    """

    softcap: float | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    blocks: int = 1


NO_MODIFIERS = ScoreModifiers()
NO_BLOCK_MODIFIERS = BlockModifiers()
