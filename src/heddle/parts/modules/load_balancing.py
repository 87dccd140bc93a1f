"""The statistics that a mixture of experts records: expert counts, and the losses that balance them.

The balance loss of Switch (Fedus et al. 2021) is `E · Σ_i f_i P_i` for each sequence (a document of a row), without
padding: f_i is the share of the sequence's choices that went to expert i, P_i the mean router probability of expert i.
It is 1 for perfect balance. Each sequence is weighted by its number of tokens, so the loss is a sum over tokens and
does not depend on how rows are split between calls. The same holds for the z-loss `(log Σ_i exp(l_i))²` (Zoph et al.
2022).
"""

import torch
from torch import Tensor

from heddle.numerics.experts.routing import Route
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import RouterStatistics


def compute_router_statistics(
    mixture: Feedforward,
    logits: Tensor,
    route: Route,
    accepted: Tensor | None,
    layout: Layout,
    losses: tuple[float, float],
) -> RouterStatistics:
    """The statistics of one call with router logits [B, T, experts].

    accepted: bool [B, T, k], False for choices of padding and beyond the capacity; None: all are True. losses: the
    coefficients of the balance loss and of the z-loss; a loss with coefficient 0 is not computed.
    """
    padding = layout.padding
    is_token = torch.ones_like(layout.positions, dtype=torch.bool) if padding is None else ~padding
    tokens = is_token.sum()
    chosen = torch.zeros_like(logits, dtype=torch.int64).scatter_(-1, route.expert_indices, 1) * is_token[..., None]
    dropped = torch.zeros_like(tokens) if accepted is None else tokens * route.expert_indices.shape[-1] - accepted.sum()
    with torch.no_grad():
        entropy = torch.special.entr(route.probabilities.double()).sum(-1).masked_fill(~is_token, 0.0).sum()
    loss = None
    aux, z = losses
    if aux:
        loss = aux * balance_loss(route.probabilities, chosen, layout.call_segment_ids)
    if z:
        squares = logits.logsumexp(-1).square().masked_fill(~is_token, 0.0).sum()
        loss = z * squares if loss is None else loss + z * squares
    return RouterStatistics(mixture, loss, chosen.sum((0, 1)), dropped, entropy, tokens)


def balance_loss(probabilities: Tensor, chosen: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Σ over sequences of `tokens · E · Σ_i f_i P_i`.

    probabilities [B, T, experts]; chosen int64 [B, T, experts], 1 where a token that is not padding chose an expert;
    segment_ids int64 [B, T].
    """
    batch, length, experts = chosen.shape
    probabilities = probabilities.masked_fill(~chosen.any(-1, keepdim=True), 0.0)  # 0 at padding, which chose none
    if segment_ids is None:
        counts, mass = chosen.sum(1), probabilities.sum(1)
    else:
        slots = length + 1  # the segment ids of a row are counted up from 0 or 1
        rows = torch.arange(batch, device=chosen.device)[:, None] * slots + segment_ids

        def sums(x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            return flat.new_zeros(batch * slots, *flat.shape[1:]).index_add(0, rows.flatten(), flat)

        counts, mass = sums(chosen), sums(probabilities)
    shares = counts.to(mass.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    return experts * (shares * mass).sum()
