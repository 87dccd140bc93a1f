"""What the budgets count: one layer's operation at a real size, a decoded token, the loss, and 1 B designs."""

import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import materialize
from heddle.model.load_config import load_config
from heddle.model.size import build_distinct_layers, parameter_counts
from heddle.numerics.activations import activation
from heddle.numerics.attention.flex import block_mask_of
from heddle.numerics.attention.latent import latent_attention
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers
from heddle.numerics.attention.sdpa import cu_seqlens
from heddle.numerics.attention.softmax import attention
from heddle.numerics.cross_entropy import OutputHead, loss_sum
from heddle.numerics.experts.mixture import run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.numerics.recurrent.convolution import causal_conv1d
from heddle.numerics.recurrent.gated_delta import DeltaInputs, gated_delta_rule
from heddle.numerics.recurrent.ssd import SSDInputs, state_space_duality
from heddle.parts.layout import Layout
from heddle.parts.positions.alibi import AlibiConfig
from tests.accelerator.launches import compile_layers
from tests.accelerator.pretend import DEVICE

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 8, 16, 4, 4096, 64
NARROW, WIDE = torch.bfloat16, torch.float32

Call = Callable[[], Tensor]


def fake(*shape: int, dtype: torch.dtype = NARROW, gradients: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=gradients)


def document_lengths(rows: int, length: int, mean: int = 400) -> list[list[int]]:
    """Random documents, `mean` tokens on average: 8 x 4096 tokens have 81 documents of 78 lengths."""
    draws = random.Random(0)
    out: list[list[int]] = []
    for _ in range(rows):
        row: list[int] = []
        while sum(row) < length:
            row.append(min(length - sum(row), max(8, int(draws.expovariate(1 / mean)))))
        out.append(row)
    return out


def _on_device(make_layout: Callable[[], Layout]) -> Layout:
    """A layout made on the CPU, with fake tensors on the device."""
    with unset_fake_temporarily():
        layout = make_layout()
    tensors: dict[str, Any] = {
        part.name: fake(*value.shape, dtype=value.dtype, gradients=False)
        for part in fields(layout)
        if isinstance(value := getattr(layout, part.name), Tensor)
    }
    return replace(layout, **tensors, cache={})


def packed() -> Layout:
    return _on_device(lambda: Layout.packed(document_lengths(BATCH, LENGTH)))


def padded() -> Layout:
    return _on_device(lambda: Layout.padded([LENGTH - 200 * row for row in range(BATCH)]))


def attention_call(
    make_layout: Callable[[], Layout] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: bool = False,
    alibi: bool = False,
    dtype: torch.dtype = NARROW,
) -> Call:
    groups = HEADS if alibi else KV_HEADS
    q = fake(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=dtype)
    k, v = (fake(BATCH, groups, LENGTH, HEAD_DIM, dtype=dtype) for _ in range(2))
    layout = Layout.causal(BATCH, LENGTH, device=DEVICE) if make_layout is None else make_layout()
    bias = AlibiConfig().build(HEADS, True)(layout, dtype) if alibi else None
    modifiers = ScoreModifiers(softcap, fake(HEADS, dtype=WIDE) if sink else None, bias)
    mask = layout.attention_mask(window, True)
    share(mask)
    return lambda: attention(q, k, v, mask, HEAD_DIM**-0.5, None, modifiers)


def share(mask: AttentionMask) -> None:
    """Make what all layers of a batch share, which is not counted with a layer."""
    mask.cached("block mask", lambda: block_mask_of(mask))
    if mask.doc_lengths is not None:
        mask.cached("cu_seqlens", lambda: cu_seqlens(mask))


def shared_call() -> Call:
    mask = packed().attention_mask(1024, True)

    def call() -> Tensor:
        share(mask)
        return mask.q_positions

    return call


def sums_call(decay: bool, dtype: torch.dtype = NARROW) -> Call:
    q, k, v = (fake(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=dtype) for _ in range(3))
    log_decay = fake(HEADS, dtype=WIDE)
    if decay:
        return lambda: causal_sums(q, k, v, log_decay, CallLayout())[0]
    return lambda: causal_means(q, k, v, CallLayout())[0]


def delta_call(channels: bool = False, width: int = 128) -> Call:
    q, k, v = (fake(BATCH, HEADS, LENGTH, width) for _ in range(3))
    log_decay = fake(BATCH, HEADS, LENGTH, width if channels else 1, dtype=WIDE)
    beta = fake(BATCH, HEADS, LENGTH, dtype=WIDE)
    return lambda: gated_delta_rule(DeltaInputs(q, k, v, log_decay, beta, dtype=NARROW), None)[0]


def ssd_call() -> Call:
    q, k = (fake(BATCH, 1, LENGTH, 128) for _ in range(2))
    v = fake(BATCH, 2 * HEADS, LENGTH, 64)
    log_decay, step = (fake(BATCH, 2 * HEADS, LENGTH, 1, dtype=WIDE) for _ in range(2))
    skip = fake(2 * HEADS, dtype=WIDE)
    return lambda: state_space_duality(SSDInputs(q, k, v, log_decay, step, skip, dtype=NARROW), None)[0]


def convolution_call(channels: int = 6144) -> Call:
    x, weight = fake(BATCH, LENGTH, channels), fake(channels, 4)
    return lambda: causal_conv1d(x.float(), weight.float(), None, None)


def latent_call(batch: int, queries: int, keys: int) -> Call:
    heads, nope, rope, rank, training = 16, 128, 64, 512, queries == keys
    q_nope, q_rope = (fake(batch, heads, queries, width, gradients=training) for width in (nope, rope))
    latents = fake(batch, 1, keys, rank + rope, gradients=training)
    k_up, v_up = (fake(heads * nope, rank, gradients=training) for _ in range(2))
    if training:
        mask = Layout.causal(batch, queries, device=DEVICE).attention_mask(None, True)
    else:
        q_positions, k_positions = (
            torch.empty(batch, count, dtype=torch.int64, device=DEVICE) for count in (queries, keys)
        )
        mask = AttentionMask(q_positions, k_positions, contiguous=True, all_visible=queries == 1)
    return lambda: latent_attention(q_nope, q_rope, latents, k_up, v_up, mask, (nope + rope) ** -0.5)


def loss_call(vocab_size: int, tokens: int = 32768, width: int = 2048) -> Call:
    hidden, head = fake(tokens, width), OutputHead(fake(vocab_size, width))
    targets = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
    return lambda: loss_sum(hidden, head, targets)


def experts_call(tokens: int = 32768, experts: int = 64, top_k: int = 8) -> Call:
    width, hidden = 2048, 1024
    x = fake(tokens, width)
    weights = ExpertWeights(fake(experts, hidden, width), fake(experts, width, hidden), fake(experts, hidden, width))
    indices = torch.empty(tokens, top_k, dtype=torch.int64, device=DEVICE)
    assignment = ExpertAssignment(indices, fake(tokens, top_k, dtype=WIDE), None, True)
    return lambda: run_experts(x, assignment, weights, activation("silu"))


def design(mixer: dict[str, Any], layers: int, feedforward: dict[str, Any] | None = None) -> ModelConfig:
    """About 1 B parameters with 16 layers."""
    dense = {"kind": "gated", "hidden": 5632}
    return load_config(
        {
            "vocab_size": 32000,
            "width": 2048,
            "norm": {"kind": "rms"},
            "residual": {"kind": "pre_norm"},
            "layers": [{"repeat": layers, "mixer": mixer, "feedforward": feedforward or dense}],
            "head": {"tied": True},
        }
    )


ROPE = {"kind": "rope"}
GQA = {"kind": "attention", "heads": 32, "kv_heads": 8, "position": ROPE}
MLA = {
    "kind": "latent_attention", "heads": 16, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128,
    "position": ROPE,
}  # fmt: skip
MIXERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "gqa": (GQA, None),
    "mla": (MLA, None),
    "moe": (GQA, {"kind": "moe", "experts": 64, "top_k": 8, "hidden": 704}),
    "retention": ({"kind": "retention", "heads": 32, "gate": "silu", "position": ROPE}, None),
    "gated_delta": ({"kind": "gated_delta", "heads": 16, "key_heads": 16}, None),
}


def _design_of(name: str, layers: int) -> tuple[dict[str, Any], int, dict[str, Any] | None]:
    mixer, feedforward = MIXERS[name]
    return mixer, layers, feedforward


def model(name: str, layers: int) -> Decoder:
    """A model of fake parameters in bfloat16 on the pretended device."""
    with unset_fake_temporarily(), torch.device("meta"):  # tables of frequencies are computed here, for real
        built = Decoder(design(*_design_of(name, layers)))
    materialize(built, NARROW, DEVICE)
    return built


def training_call(name: str, layers: int, by_layers: bool = False, batch: int = BATCH, length: int = LENGTH) -> Call:
    """Forward pass and loss of a batch of plain rows. by_layers: each layer is compiled, as `--compile` does."""
    built = model(name, layers).train()
    if by_layers:
        compile_layers(built)
    tokens = torch.zeros(batch, length, dtype=torch.int64, device=DEVICE)
    layout = Layout.causal(batch, length, device=DEVICE)

    def call() -> Tensor:
        hidden, _ = built(tokens, layout)
        return loss_sum(hidden.flatten(0, 1), built.head.output_head, tokens.flatten())

    return call


def active_parameters(name: str, layers: int) -> int:
    """Parameters that act on one token."""
    built = build_distinct_layers(design(*_design_of(name, layers)), NARROW)
    return parameter_counts(built)[1]


def decode_call(name: str, layers: int, batch: int, pinned: bool = False, context: int = 4096) -> Call:
    """One token of each row after `context` tokens. pinned: with a state whose facts hold for every next token."""
    built = model(name, layers).eval()
    with torch.no_grad():
        state = built.init_state(batch, context + 8)
    state.table = replace(state.table, max_tokens=context, peak_tokens=context)
    if pinned and "pinned" in dir(state):  # not before it was there
        state = state.pinned(context + 8)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)

    def call() -> Tensor:
        hidden, _ = built(token, None, state)
        return built.head(hidden[:, -1])

    return call
