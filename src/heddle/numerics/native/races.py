"""What each C++ operator is timed on, against the plain way, in float32: training of small designs, or one token."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from heddle.numerics import native
from heddle.numerics.activations import activation
from heddle.numerics.attention import softmax
from heddle.numerics.attention.latent import latent_attention
from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.cross_entropy import OutputHead, loss_sum
from heddle.numerics.experts.mixture import run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.linear import linear
from heddle.numerics.norms import euclidean_norms, rms_norm
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.numerics.rotary import apply_rotary, inverse_frequencies, rotary_table
from heddle.torch_private import foreach_mul_

ROWS, LENGTH, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 4, 128, 128, 352, 4, 2, 2048
RECURRENT_LENGTH, RECURRENT_WIDTH = 512, 64  # of one row of the recurrences
LATENT = (12, 8192, 256, 64, 32)  # of latent attention: heads, keys, rank, and dims without and with a rotation
Step = Callable[[], None]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").requires_grad_()


def _train(outputs: Callable[[], Tensor], *inputs: Tensor) -> Step:
    def run() -> None:
        with torch.enable_grad():
            y = outputs()
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return run


def _rms_norm() -> Step:
    x, weight = _random(ROWS, LENGTH, WIDTH), _random(WIDTH)
    return _train(lambda: rms_norm(x, weight, 1e-6), x, weight)


def _norms() -> Step:
    tensors = [_random(WIDTH, WIDTH).detach() for _ in range(64)]

    def run() -> None:
        euclidean_norms(tensors)

    return run


def _adamw() -> Step:
    """With the clipping and the checks that the operator contains."""
    weights, *others = ([_random(WIDTH, WIDTH).detach().abs() for _ in range(64)] for _ in range(4))
    steps = [torch.zeros((), device="cpu") for _ in weights]
    rates = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def run() -> None:
        with torch.no_grad():
            if native.serves("adamw", *weights):
                torch.ops.heddle.adamw_(weights, *others, steps, 1.0, *rates.values())
                return
            euclidean_norms([*weights, *others[1], *others[2]])
            foreach_mul_(others[0], 1.0)
            inspect.unwrap(adamw)(weights, *others, [], steps, fused=True, amsgrad=False, maximize=False, **rates)

    return run


def _swiglu() -> Step:
    gate, up, swiglu = _random(ROWS, LENGTH, HIDDEN), _random(ROWS, LENGTH, HIDDEN), activation("silu")
    return _train(lambda: swiglu(up, gate), up, gate)


def _rotary() -> Step:
    x, dim = _random(ROWS, LENGTH, HEADS, WIDTH // HEADS), WIDTH // HEADS
    table = rotary_table(torch.arange(LENGTH)[None], inverse_frequencies(dim, 10000.0), torch.float32)
    return _train(lambda: apply_rotary(x.transpose(1, 2), *table, "half"), x)


def _causal_attention() -> Step:
    dim = WIDTH // HEADS
    q, k, v = (
        _random(ROWS, HEADS, LENGTH, dim),
        _random(ROWS, KV_HEADS, LENGTH, dim),
        _random(ROWS, KV_HEADS, LENGTH, dim),
    )
    positions = torch.arange(LENGTH, dtype=torch.int32)[None].expand(ROWS, -1)
    mask = AttentionMask(positions, positions, contiguous=True)
    return _train(lambda: softmax.attention(q, k, v, mask, dim**-0.5), q, k, v)


def _cross_entropy() -> Step:
    hidden, weight = _random(ROWS * LENGTH, WIDTH), _random(VOCABULARY, WIDTH)
    targets = torch.arange(ROWS * LENGTH)
    return _train(lambda: loss_sum(hidden, OutputHead(weight), targets), hidden, weight)


def _linear() -> Step:
    x, weight = _random(ROWS, LENGTH, WIDTH), _random(HIDDEN, WIDTH)
    return _train(lambda: linear(x, weight), x, weight)


def _recurrent() -> tuple[Tensor, Tensor, Tensor]:
    """Rows [1, heads, T, d] of unit length, logarithms of decays and β in (0, 1), both [1, heads, T]."""
    rows = functional.normalize(_random(1, HEADS, RECURRENT_LENGTH, RECURRENT_WIDTH).detach(), dim=-1).requires_grad_()
    gates = [_random(1, HEADS, RECURRENT_LENGTH).detach().sigmoid() for _ in range(2)]
    return rows, gates[0].neg().requires_grad_(), gates[1].requires_grad_()


def _delta() -> Step:
    x, log_decay, beta = _recurrent()
    inputs = DeltaInputs(x, x, x, log_decay[..., None], beta)
    return _train(lambda: gated_delta_rule(inputs, None)[0], x, log_decay, beta)


def _ssd() -> Step:
    x, log_decay, step = _recurrent()
    inputs = SSDInputs(x, x, x, log_decay[..., None], step[..., None], torch.ones(HEADS, device="cpu"))
    return _train(lambda: state_space_duality(inputs, None)[0], x, log_decay, step)


def _latent_decode() -> Step:
    heads, keys, rank, nope, rope = LATENT
    mask = AttentionMask(torch.tensor([[keys - 1]]), torch.arange(keys)[None], all_visible=True)
    latents, up = _random(1, 1, keys, rank + rope), _random(heads * nope, rank)
    q_nope, q_rope = _random(1, heads, 1, nope), _random(1, heads, 1, rope)

    def run() -> None:
        with torch.no_grad():
            latent_attention(q_nope, q_rope, latents, up, up, mask, 0.1)

    return run


def _weighted_swiglu_backward() -> Step:
    x, up, down = _random(512, WIDTH), _random(4, HIDDEN, WIDTH), _random(4, WIDTH, HIDDEN)
    chosen, gates = torch.arange(1024, device="cpu").view(512, 2) % 4, _random(512, 2)
    assignment, weights = ExpertAssignment(chosen, gates, none_dropped=True), ExpertWeights(up, down, up)
    return _train(lambda: run_experts(x, assignment, weights, activation("silu")), x, up, down, gates)


RACES: dict[str, Callable[[], Step]] = {  # operator: makes what is timed
    "adamw": _adamw,
    "causal_attention": _causal_attention,
    "cross_entropy": _cross_entropy,
    "delta": _delta,
    "latent_decode": _latent_decode,
    "linear": _linear,
    "norms": _norms,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "ssd": _ssd,
    "swiglu": _swiglu,
    "weighted_swiglu_backward": _weighted_swiglu_backward,
}
