"""What a mixture of experts enters into a ledger: its loads, and the losses that balance them.

Over the real tokens of each sequence (a document of a row), with f_i the share of its choices that fell on expert i
and P_i the mean of its routers' probabilities, Switch's loss `E · Σ_i f_i P_i` (Fedus et al. 2021) is 1 where all is
even. Weighted by real tokens it is a sum over tokens, hence the same however rows are split between calls; so is the
z-loss, `(log Σ_i exp(l_i))²` (Zoph et al. 2022).
"""

import torch
from torch import Tensor

from heddle.numerics.experts.routing import Route
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import Entry


def entry(
    mixture: Feedforward,
    numbers: Tensor,
    found: Route,
    kept: Tensor | None,
    layout: Layout,
    losses: tuple[float, float],
) -> Entry:
    """One call: numbers [B, T, experts] of the router, its route, and kept bool [B, T, k], None: all choices.

    losses: the coefficients of the auxiliary loss and of the z-loss; none are computed where both are 0.
    """
    padding = layout.padding
    real = torch.ones_like(layout.positions, dtype=torch.bool) if padding is None else ~padding
    tokens = real.sum()
    met = torch.zeros_like(numbers, dtype=torch.int64).scatter_(-1, found.choices, 1) * real[..., None]
    dropped = torch.zeros_like(tokens) if kept is None else tokens * found.choices.shape[-1] - kept.sum()
    with torch.no_grad():
        entropy = torch.special.entr(found.probabilities.double()).sum(-1).masked_fill(~real, 0.0).sum()
    penalty = None
    aux, z = losses
    if aux:
        penalty = aux * uneven(found.probabilities, met, layout.segments)
    if z:
        squares = numbers.logsumexp(-1).square().masked_fill(~real, 0.0).sum()
        penalty = z * squares if penalty is None else penalty + z * squares
    return Entry(mixture, penalty, met.sum((0, 1)), dropped, entropy, tokens)


def uneven(probabilities: Tensor, met: Tensor, segments: Tensor | None) -> Tensor:
    """Σ over sequences of `tokens · E · Σ_i f_i P_i`.

    probabilities [B, T, experts]; met int64, the same, 1 where a real token chose an expert; segments int64 [B, T].
    """
    batch, length, experts = met.shape
    chances = probabilities.masked_fill(~met.any(-1, keepdim=True), 0.0)  # padding chose none
    if segments is None:
        chosen, likely = met.sum(1), chances.sum(1)
    else:
        slots = length + 1  # documents of a row are counted up from 0 or 1
        rows = torch.arange(batch, device=met.device)[:, None] * slots + segments

        def sums(x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            return flat.new_zeros(batch * slots, *flat.shape[1:]).index_add(0, rows.flatten(), flat)

        chosen, likely = sums(met), sums(chances)
    shares = chosen.to(likely.dtype) / chosen.sum(-1, keepdim=True).clamp(min=1)
    return experts * (shares * likely).sum()
