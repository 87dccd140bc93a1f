"""What each C++ operator is timed on, against the plain way, in float32: training of small designs, or one token."""

from collections.abc import Callable

import torch
from torch import Tensor

from heddle.numerics.activations import activation
from heddle.numerics.attention.latent import latent_attention
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.experts.mixture import run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.numerics.norms import rms_norm

ROWS, WIDTH = 1024, 256
LATENT = (12, 8192, 256, 64, 32)  # of latent attention: heads, keys, rank, and dims without and with a rotation
EXPERTS = (32, 512, 704)  # experts, width, hidden: more than a CPU's caches hold


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").requires_grad_()


def _train(outputs: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.enable_grad():
            y = outputs()
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return run


def _rms_norm() -> Callable[[], None]:
    x, weight = _random(ROWS, WIDTH), _random(WIDTH)
    return _train(lambda: rms_norm(x, weight, 1e-6), x, weight)


def _latent_decode() -> Callable[[], None]:
    heads, keys, rank, nope, rope = LATENT
    mask = AttentionMask(torch.tensor([[keys - 1]]), torch.arange(keys)[None], all_visible=True)
    latents, up = _random(1, 1, keys, rank + rope), _random(heads * nope, rank)
    q_nope, q_rope = _random(1, heads, 1, nope), _random(1, heads, 1, rope)
    return torch.no_grad()(lambda: latent_attention(q_nope, q_rope, latents, up, up, mask, 0.1))


def _experts_decode() -> Callable[[], None]:
    experts, width, hidden = EXPERTS
    up, down, x = _random(experts, hidden, width), _random(experts, width, hidden), _random(1, width)
    weights, gates, silu = (
        ExpertWeights(up, down, _random(experts, hidden, width)),
        torch.full((1, 2), 0.5),
        activation("silu"),
    )
    pairs = [ExpertAssignment(pair, gates, none_dropped=True) for pair in torch.arange(experts).view(-1, 1, 2)]

    def run() -> None:
        with torch.no_grad(), packed_weights(packed):
            for pair in pairs:
                run_experts(x, pair, weights, silu)

    packed: PackedWeightCache = {}
    return run


RACES: dict[str, Callable[[], Callable[[], None]]] = {  # operator: makes what is timed
    "experts_decode": _experts_decode,
    "latent_decode": _latent_decode,
    "rms_norm": _rms_norm,
}
