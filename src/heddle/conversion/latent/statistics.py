"""What decides which part of keys and values a smaller state should keep, measured on a calibration text.

An error δs of the score of query i and key j changes a head's output by p_ij δs W_o (v_j − o_i), to first order. So the
squared change of the layer's output is w_ij δs² with w_ij = p_ij² |W_o (v_j − o_i)|², where p are the attention
weights and o_i their mean of v. An error of a value changes it by p_ij W_o δv_j. Both are in units of the output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.conversion.latent.factors import AttentionFactors, complex_pairs, real_dims
from heddle.parts.context.layout import Layout


class TextRow(NamedTuple):
    """T tokens: [x ; 1] [T, D+1], positions [T], their angles [T, P], and which keys each query sees [T, T]."""

    x: Tensor
    positions: Tensor
    angles: Tensor
    visible: Tensor


class HeadEffects(NamedTuple):
    """Of one head: scores [T, T], w_ij; values [T, T], p_ij²; output [T, D]: what it adds to the layer's output."""

    scores: Tensor
    values: Tensor
    output: Tensor


@dataclass
class LatentStatistics:
    """Sums over a text. H query heads, D = width, N tokens, Δ = i − j up to the longest text.

    inputs [D+1, D+1]: Σ [x ; 1][x ; 1]ᵀ. queries [H, d, d]: Σ w_ij q_i q_iᵀ, before rotation.
    offsets [H, Δ]: Σ of w_ij by offset. values [H]: Σ p_ij². output: Σ |y|², y the layer's output.
    """

    inputs: Tensor
    queries: Tensor
    offsets: Tensor
    values: Tensor
    output: float = 0.0

    @property
    def tokens(self) -> float:
        """N."""
        return float(self.inputs[-1, -1])

    @property
    def mean(self) -> Tensor:
        """The mean of [x ; 1], [D+1]."""
        return self.inputs[-1] / self.tokens

    @property
    def covariance(self) -> Tensor:
        """Of x, [D, D]."""
        mean = self.mean
        return (self.inputs / self.tokens - mean[:, None] * mean)[:-1, :-1]

    def mean_rotation(self, frequencies: Tensor) -> Tensor:
        """The mean of exp(−i θ Δ) under the weights of each head, complex [H, len(frequencies)]."""
        offsets = torch.arange(self.offsets.shape[1], dtype=torch.float64, device=self.offsets.device)
        rotations = torch.exp(-1j * offsets[:, None] * frequencies)
        total = self.offsets.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        return (self.offsets / total).to(rotations.dtype) @ rotations


def latent_statistics(
    factors: AttentionFactors, inputs: Sequence[Tensor], layouts: Sequence[Layout]
) -> LatentStatistics:
    """Measure the statistics of a layer on its mixer's inputs [B, T, D] of each batch."""
    heads, dim, width = factors.q.shape
    device = factors.q.device
    longest = max(int(layout.positions.max()) for layout in layouts) + 1
    result = LatentStatistics(
        inputs=torch.zeros(width, width, dtype=torch.float64, device=device),
        queries=torch.zeros(heads, dim, dim, dtype=torch.float64, device=device),
        offsets=torch.zeros(heads, longest, dtype=torch.float64, device=device),
        values=torch.zeros(heads, dtype=torch.float64, device=device),
    )
    for row in text_rows(factors, inputs, layouts):
        _add_row(result, factors, row)
    return result


def text_rows(factors: AttentionFactors, inputs: Sequence[Tensor], layouts: Sequence[Layout]) -> Iterator[TextRow]:
    """The rows of a text, without padding."""
    for batch, layout in zip(inputs, layouts, strict=True):
        mask = layout.attention_mask(None, True).materialize()
        for x, positions, visible in zip(batch, layout.positions, mask, strict=True):
            is_token = positions >= 0
            x, positions = x[is_token].double(), positions[is_token]
            x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
            yield TextRow(
                x, positions, positions.double()[:, None] * factors.frequencies, visible[is_token][:, is_token]
            )


def head_effects(factors: AttentionFactors, row: TextRow, head: int, q: Tensor, k: Tensor) -> HeadEffects:
    """What errors of one head's scores and values change, for its queries and keys [T, d] before rotation."""
    v = row.x @ factors.v[head // factors.group_size].T
    scores = rotate_pairs(q, row.angles) @ rotate_pairs(k, row.angles).T * factors.scale
    p = scores.masked_fill(~row.visible, float("-inf")).softmax(dim=-1)
    v, o = v @ factors.out[head].T, p @ v @ factors.out[head].T
    distance = v.square().sum(1) + o.square().sum(1)[:, None] - 2 * o @ v.T
    squared = p.square()
    return HeadEffects(squared * distance.clamp_min(0.0), squared, o)


def _add_row(result: LatentStatistics, factors: AttentionFactors, row: TextRow) -> None:
    """Add one row of tokens. One head at a time: its weights [T, T] are the largest tensor."""
    x = row.x
    result.inputs += x.T @ x
    offsets = (row.positions[:, None] - row.positions).clamp_min(0).flatten()
    y = factors.out_bias.expand(len(x), -1)
    for head in range(len(factors.q)):
        q, k = x @ factors.q[head].T, x @ factors.k[head // factors.group_size].T
        scores, values, output = head_effects(factors, row, head, q, k)
        result.queries[head] += (q * scores.sum(1, keepdim=True)).T @ q
        result.offsets[head].index_add_(0, offsets, scores.flatten())
        result.values[head] += values.sum()
        y = y + output
    result.output += float(y.square().sum())


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads [T, d], whose dims are ordered as in `heddle.conversion.latent.factors`, by angles [T, P]."""
    pairs = angles.shape[1]
    z = complex_pairs(x.T, pairs) * torch.exp(1j * angles.T)
    return torch.cat((real_dims(z), x.T[2 * pairs :])).T
