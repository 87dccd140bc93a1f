"""The sections of `benchmarks.gpu` on single operations, forward and backward: ops, loss, experts, muon."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_setup import Call, Comparison, Setup, with_backward
from heddle.numerics.activations import activation
from heddle.numerics.attention.latent import latent_attention
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers
from heddle.numerics.attention.softmax import attention
from heddle.numerics.cross_entropy import OutputHead, loss_sum
from heddle.numerics.experts.mixture import run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.parts.layout import Layout
from heddle.parts.positions.alibi import AlibiConfig
from heddle.training.optimizer import StackedMuon

ATTENTION_GOAL = 1 / 1.15  # of bare compiled FlexAttention's seconds
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "packed": {"packed": True},
    "window": {"window": 1024},
    "soft cap": {"softcap": 50.0},
    "sinks, window": {"sink": True, "window": 128},
    "ALiBi": {"alibi": True},
}


def ops(setup: Setup) -> Iterator[Comparison]:
    """Softmax attention of every kind, recurrences, and latent attention."""
    for name, options in KINDS.items():
        yield Comparison(f"attention, {name}", partial(_attention, setup, **options), goal=ATTENTION_GOAL)
    yield Comparison("retention", lambda: _sums(setup, decay=True), goal=1 / 1.15)
    yield Comparison("linear attention", lambda: _sums(setup, decay=False))
    yield Comparison("gated delta rule", lambda: _delta(setup), goal=1 / 1.15)
    for batch in (1, 32):
        yield Comparison(f"latent attention of a decoded token, batch {batch}", partial(_latent, setup, batch))


def _attention(
    setup: Setup, packed: bool = False, window: int | None = None, softcap: float | None = None, sink: bool = False,
    alibi: bool = False,
) -> dict[str, Call]:  # fmt: skip
    batch, heads, groups, length, width = (1, 4, 2, 64, 16) if setup.toy else (8, 16, 4, 4096, 64)
    window = min(window or 0, length // 4) or None
    q = setup.random(batch, heads, length, width)
    k, v = (setup.random(batch, groups, length, width) for _ in range(2))
    layout = Layout.causal(batch, length, device=setup.device)
    if packed:
        layout = Layout.packed(_documents(batch, length), device=setup.device)
    logits = torch.randn(heads, device=setup.device) if sink else None
    bias = AlibiConfig().build(heads, True)(layout, setup.dtype) if alibi else None
    modifiers, mask = ScoreModifiers(softcap, logits, bias), layout.attention_mask(window, True)
    calls = {"heddle": with_backward(lambda: attention(q, k, v, mask, width**-0.5, None, modifiers), [q, k, v])}
    if not (packed or window or softcap or sink or alibi):
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        calls["torch SDPA"] = with_backward(
            lambda: functional.scaled_dot_product_attention(q, k, v, **options), [q, k, v]
        )
    if setup.device == "cuda":
        calls["torch Flex"] = with_backward(_flex(setup, q, k, v, layout, (window, softcap, alibi)), [q, k, v])
    return calls


def _flex(
    setup: Setup, q: Tensor, k: Tensor, v: Tensor, layout: Layout, kind: tuple[int | None, float | None, bool]
) -> Callable[[], Tensor]:
    """Bare compiled FlexAttention with a block mask of torch's own, made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (window, softcap, alibi), heads, length = kind, q.shape[1], q.shape[2]
    documents = layout.dense_segment_ids
    slopes = torch.tensor([2.0 ** (-8.0 * head / heads) for head in range(1, heads + 1)], device=setup.device)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sees = (j <= i) & (documents[b, i] == documents[b, j])
        return sees if window is None else sees & (i - j < window)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        return score - slopes[h] * (i - j) if alibi else score

    block_mask = create_block_mask(visible, q.shape[0], None, length, length, device=setup.device)
    run = torch.compile(flex_attention)
    changed = change if softcap is not None or alibi else None
    return lambda: run(q, k, v, score_mod=changed, block_mask=block_mask, enable_gqa=True)


def _documents(rows: int, length: int) -> list[list[int]]:
    draws, out = random.Random(0), []
    for _ in range(rows):
        row: list[int] = []
        while sum(row) < length:
            row.append(min(length - sum(row), max(8, int(draws.expovariate(1 / 400)))))
        out.append(row)
    return out


def _recurrent_inputs(setup: Setup, width: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length = (1, 2, 64) if setup.toy else (8, 16, 4096)
    q, k, v = (setup.random(batch, heads, length, 16 if setup.toy else width) for _ in range(3))
    return q, k, v


def _sums(setup: Setup, decay: bool) -> dict[str, Call]:
    q, k, v = _recurrent_inputs(setup, 64)
    log_decay = -torch.rand(q.shape[1], device=setup.device) if decay else None
    forward = lambda: causal_sums(q, k, v, log_decay, CallLayout())[0]  # noqa: E731
    if not decay:
        forward = lambda: causal_means(q.exp(), k.exp(), v, CallLayout())[0]  # noqa: E731
    calls = {"heddle": with_backward(forward, [q, k, v])}
    if decay and setup.on_gpu("fla"):
        from fla.ops.simple_gla import chunk_simple_gla  # type: ignore[import-not-found, unused-ignore]

        rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        calls["fla"] = with_backward(lambda: chunk_simple_gla(*rows, g_gamma=log_decay)[0], rows)
    return calls


def _delta(setup: Setup) -> dict[str, Call]:
    q, k, v = _recurrent_inputs(setup, 128)
    batch, heads, length, _ = q.shape
    log_decay, beta = (torch.rand(batch, heads, length, device=setup.device) for _ in range(2))

    def forward() -> Tensor:
        normal_q, normal_k = (functional.normalize(x.float(), dim=-1) for x in (q, k))
        inputs = DeltaInputs(normal_q, normal_k, v.float(), -log_decay[..., None], beta, dtype=setup.dtype)
        return gated_delta_rule(inputs, None)[0]

    calls = {"heddle": with_backward(forward, [q, k, v])}
    if setup.on_gpu("fla"):
        from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found, unused-ignore]
            chunk_gated_delta_rule,
        )

        rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        rates = [x.transpose(1, 2).contiguous() for x in (-log_decay, beta)]
        calls["fla"] = with_backward(
            lambda: chunk_gated_delta_rule(*rows, *rates, use_qk_l2norm_in_kernel=True)[0], rows
        )
    return calls


def _latent(setup: Setup, batch: int) -> dict[str, Call]:
    """One token after many; the peer copies as many bytes as the latents have."""
    heads, nope, rope, rank, keys = (2, 16, 8, 32, 64) if setup.toy else (16, 128, 64, 512, 8192)
    q_nope, q_rope = (setup.random(batch, heads, 1, width, gradients=False) for width in (nope, rope))
    latents = setup.random(batch, 1, keys, rank + rope, gradients=False)
    k_up, v_up = (setup.random(heads * nope, rank, gradients=False) for _ in range(2))
    positions = torch.arange(keys, device=setup.device).expand(batch, keys)
    mask = AttentionMask(positions[:, -1:], positions, contiguous=True, all_visible=True)
    target, scale = torch.empty_like(latents), (nope + rope) ** -0.5
    return {
        "heddle": torch.no_grad()(lambda: latent_attention(q_nope, q_rope, latents, k_up, v_up, mask, scale)),
        "copy": lambda: target.copy_(latents),
    }


def loss(setup: Setup) -> Iterator[Comparison]:
    """The vocabulary loss, beside its three products, and Liger's and torch's forms."""
    for vocab_size in (128,) if setup.toy else (32000, 128256):
        yield Comparison(f"loss, {vocab_size:,} words", partial(_loss, setup, vocab_size), goal=1 / 1.3)


def _loss(setup: Setup, vocab_size: int) -> dict[str, Call]:
    tokens, width = (64, 32) if setup.toy else (32768, 2048)
    hidden, weight = setup.random(tokens, width), setup.random(vocab_size, width)
    targets = torch.randint(vocab_size, (tokens,), device=setup.device)

    def products() -> None:  # by as many chunks of logits as fit a gigabyte
        for part in hidden.detach().split(max(1, 2**29 // vocab_size)):
            logits = part @ weight.detach().T
            logits @ weight.detach()
            logits.T @ part

    calls = {
        "heddle": with_backward(lambda: loss_sum(hidden, OutputHead(weight), targets), [hidden, weight]),
        "three products": products,
    }
    if setup.on_gpu("liger_kernel"):
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            LigerFusedLinearCrossEntropyLoss,
        )

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        calls["Liger"] = with_backward(lambda: liger(weight, hidden, targets), [hidden, weight])
    return calls


def experts(setup: Setup) -> Iterator[Comparison]:
    """A mixture of experts, beside a dense layer of as many operations."""
    yield Comparison("experts, 8 of 64", lambda: _experts(setup), goal=1 / 1.35)


def _experts(setup: Setup) -> dict[str, Call]:
    tokens, count, top_k, width, hidden = (32, 4, 2, 16, 16) if setup.toy else (32768, 64, 8, 2048, 1024)
    x = setup.random(tokens, width)
    up, gate = (setup.random(count, hidden, width) for _ in range(2))
    weights = ExpertWeights(up, setup.random(count, width, hidden), gate)
    indices = torch.rand(tokens, count, device=setup.device).topk(top_k).indices
    assignment = ExpertAssignment(indices, torch.rand(tokens, top_k, device=setup.device), None, True)
    silu = activation("silu")
    dense_up, dense_gate = (setup.random(top_k * hidden, width) for _ in range(2))
    dense_down = setup.random(width, top_k * hidden)

    def dense() -> Tensor:
        return (functional.silu(x @ dense_gate.T) * (x @ dense_up.T)) @ dense_down.T

    return {
        "heddle": with_backward(lambda: run_experts(x, assignment, weights, silu), [x, up, gate, weights.down]),
        "dense": with_backward(setup.compiled(dense), [x, dense_up, dense_gate, dense_down]),
    }


def muon(setup: Setup) -> Iterator[Comparison]:
    """A step of Muon over many matrices, beside torch's own."""
    yield Comparison("Muon step", lambda: _muon(setup))


def _muon(setup: Setup) -> dict[str, Call]:
    count, shape = (4, (16, 16)) if setup.toy else (112, (2048, 2048))
    sides: dict[str, type[torch.optim.Muon]] = {"heddle": StackedMuon, "torch": torch.optim.Muon}
    calls: dict[str, Call] = {}
    for name, kind in sides.items():
        matrices = [torch.nn.Parameter(torch.randn(shape, device=setup.device)) for _ in range(count)]
        for matrix in matrices:
            matrix.grad = torch.randn_like(matrix)
        calls[name] = kind(matrices, lr=1e-3).step
    return calls
