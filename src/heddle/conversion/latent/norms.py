"""Query-key norms as linear maps: W_q and W_k fitted to the normalized heads on a text.

A norm divides each head by a number that depends on the token, which no map of x does. The least squares fit keeps the
mean of that number; what varies between tokens is lost. Keys are weighted by what their errors change in the layer's
output (see `heddle.conversion.latent.statistics`), since a head attends to few tokens.
"""

import copy
import dataclasses

import torch
from torch import Tensor

from heddle.conversion.activations import LayerActivations
from heddle.conversion.latent.factors import AttentionFactors, head_dims
from heddle.conversion.latent.statistics import head_effects, text_rows
from heddle.parts.mixers.attention import Attention, AttentionConfig

RIDGE = 1e-9  # of the mean square of [x ; 1]
EVEN_WEIGHT = 0.01  # of all keys, beside their effect: a head may attend to fewer tokens than x has dims


class NormalizedHeads:
    """Queries and keys of a layer as its norms make them, with dims ordered as in `latent.factors`."""

    def __init__(self, config: AttentionConfig, activations: LayerActivations) -> None:
        mixer = copy.deepcopy(activations.layer.mixer)
        assert isinstance(mixer, Attention)
        dtype = mixer.q.weight.dtype
        self.mixer, self.has_bias = mixer.double(), mixer.q.bias is not None
        self.order, frequencies, self.factor = head_dims(config, dtype)
        self.rotary_dim = 2 * len(frequencies)

    @torch.no_grad()
    def heads(self, x: Tensor, name: str) -> Tensor:
        """Queries (`q`) or keys (`k`) [T, heads, d] of tokens [x ; 1] [T, D+1], before rotation."""
        mixer = self.mixer
        projection, norm = (mixer.q, mixer.q_norm) if name == "q" else (mixer.k, mixer.k_norm)
        heads: Tensor = projection(x[:, :-1])
        if mixer.qk_norm != "projection":
            heads = heads.unflatten(-1, (-1, mixer.head_dim))
        if norm is not None:
            heads = norm(heads)
        heads = heads.reshape(len(x), -1, mixer.head_dim)[..., self.order]
        heads[..., : self.rotary_dim] *= self.factor
        return heads


def fit_norms(factors: AttentionFactors, config: AttentionConfig, activations: LayerActivations) -> AttentionFactors:
    """The factors of a layer with the maps of queries and keys that are nearest to its normalized heads.

    Queries of a layer without biases get none, since families with latent attention have none.
    """
    normalized = NormalizedHeads(config, activations)
    inputs = factors.q.shape[2] - (not normalized.has_bias)
    moments, product = factors.q.new_zeros(inputs, inputs), factors.q.new_zeros(factors.q[..., 0].numel(), inputs)
    for row in text_rows(factors, activations.mixer_inputs, activations.layouts):
        x = row.x[:, :inputs]
        moments += x.T @ x
        product += normalized.heads(row.x, "q").flatten(1).T @ x
    q = torch.zeros_like(factors.q)
    q[..., :inputs] = _solve(moments, product).unflatten(0, factors.q.shape[:2])
    keys = [_fit_keys(factors, normalized, activations, group) for group in range(len(factors.k))]
    return dataclasses.replace(factors, q=q, k=torch.stack(keys))


def _fit_keys(
    factors: AttentionFactors, normalized: NormalizedHeads, activations: LayerActivations, group: int
) -> Tensor:
    """The map of one key head, [d, D+1]. One head at a time, since each has weights of its own."""
    _, dim, width = factors.k.shape
    moments = factors.k.new_zeros(width, width)
    product = factors.k.new_zeros(dim, width)
    for row in text_rows(factors, activations.mixer_inputs, activations.layouts):
        queries, k = normalized.heads(row.x, "q"), normalized.heads(row.x, "k")[:, group]
        weights = k.new_zeros(len(k))
        for head in range(group * factors.group_size, (group + 1) * factors.group_size):
            q = queries[:, head]
            weights += q.square().sum(1) @ head_effects(factors, row, head, q, k).scores
        weights += EVEN_WEIGHT * weights.mean()
        weighted = row.x * weights[:, None]
        moments += weighted.T @ row.x
        product += k.T @ weighted
    return _solve(moments, product)


def _solve(moments: Tensor, product: Tensor) -> Tensor:
    """The least squares map of inputs with these second moments, from products of outputs and inputs."""
    ridge = RIDGE * moments.diagonal().mean() + torch.finfo(torch.float64).tiny
    moments = moments + ridge * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    solution: Tensor = torch.linalg.solve(moments, product.T)
    return solution.T
