"""Sizes counted by hand: parameters, state bytes and FLOPs of small designs."""

import pytest
import torch

from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import decode_flops, flops_per_token, kernel_choices, size, state_bytes
from tests.cases import attention, design, latent, layer

PLAIN = design(layer(attention(kv_heads=2), {"kind": "gated", "hidden": 10}, repeat=3))


def test_parameters() -> None:
    block = 24 * 24 * 2 + 24 * 12 * 2 + 3 * 24 * 10 + 2 * 24
    sizes = size(load_config(PLAIN), context_length=16)
    assert sizes.parameters == sizes.active_parameters == 61 * 24 + 3 * block + 24
    assert sizes.embedding_parameters == 61 * 24
    (row,) = sizes.layers
    assert (row.count, row.parameters, row.mixer) == (3, block, "attention heads=4 kv_heads=2 causal position=rope")
    assert size(load_config(PLAIN, ["head.tied=false"])).parameters == sizes.parameters + 61 * 24


def test_state() -> None:
    sizes = size(load_config(PLAIN), context_length=16, batch=2)
    assert sizes.state_bytes - sizes.position_table_bytes == 3 * 2 * 16 * 2 * (6 + 6) * 4
    assert sizes.state_bytes_per_token == 3 * 2 * (6 + 6) * 4
    half = state_bytes(load_config(PLAIN), 16, 2, torch.bfloat16)
    assert 2 * (half - sizes.position_table_bytes) == sizes.state_bytes - sizes.position_table_bytes
    assert size(load_config(PLAIN, ["layers.0.mixer.window=5"]), context_length=16).state_bytes_per_token == 0
    assert size(load_config(PLAIN, ["layers.0.mixer.causal=false"])).state_bytes == 0


@pytest.mark.parametrize("window", [None, 5])
def test_flops(window: int | None) -> None:
    context = 16
    overrides = [] if window is None else [f"layers.0.mixer.window={window}"]
    weights = 3 * (24 * 24 * 2 + 24 * 12 * 2 + 3 * 24 * 10) + 61 * 24
    pairs = sum(min(i + 1, window or context) for i in range(context))
    expected = 2 * weights + 3 * 2 * pairs * 4 * (6 + 6) / context
    assert size(load_config(PLAIN, overrides), context_length=context).flops_per_token == expected
    model = build(load_config(PLAIN, overrides), device="meta")
    assert flops_per_token(model, context) == expected


@pytest.mark.parametrize("window", [None, 5])
def test_flops_of_a_decoded_token(window: int | None) -> None:
    """Attention computes the same for a token alone as in a row."""
    overrides = [] if window is None else [f"layers.0.mixer.window={window}"]
    model = build(load_config(PLAIN, overrides), device="meta")
    for context in (1, 2, 16):
        shorter = 0 if context == 1 else (context - 1) * flops_per_token(model, context - 1)
        assert decode_flops(model, context) == context * flops_per_token(model, context) - shorter


def test_flops_of_latent_attention() -> None:
    """A row is read with expanded keys and values, a token decoded in the latent space: each counted by hand."""
    depth, width, heads, rank, nope, rope, value, hidden, context = 2, 24, 3, 10, 7, 4, 5, 10, 40
    mixer = latent()
    model = build(load_config(design(layer(mixer, {"kind": "gated", "hidden": hidden}, repeat=depth))), device="meta")
    maps = width * heads * (nope + rope) + width * (rank + rope) + heads * value * width + 3 * width * hidden
    up = heads * rank * (nope + value)
    each = 2 * (depth * maps + 61 * width)
    pairs = context * (context + 1) // 2
    expanded = context * 2 * up + 2 * pairs * heads * (nope + rope + value)
    assert context * flops_per_token(model, context) == context * each + depth * expanded
    absorbed = 2 * up + 2 * context * heads * (rank + rope + rank)
    assert decode_flops(model, context) == each + depth * absorbed
    assert absorbed < context * 2 * up + 2 * context * heads * (nope + rope + value)  # than expanding the state again


def test_kernel_choices_are_counted() -> None:
    config = load_config(PLAIN)
    prefill = {choice.kernel: count for choice, count in kernel_choices(config, 16, 0, torch.float32, "cpu").items()
               if choice.operation == "attention"}  # fmt: skip
    step = {choice.kernel: count for choice, count in kernel_choices(config, 1, 9, torch.float32, "cpu").items()
            if choice.operation == "attention"}  # fmt: skip
    assert (prefill, step) == ({"causal": 3}, {"unmasked": 3})
