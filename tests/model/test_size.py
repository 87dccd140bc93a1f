"""Sizes by hand: parameters, state and operations of designs small enough to count."""

import pytest
import torch

from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token, kernel_choices, size, state_bytes
from tests.cases import attention, design, layer

PLAIN = design(layer(attention(kv_heads=2), {"kind": "gated", "hidden": 10}, repeat=3))


def test_parameters() -> None:
    block = 24 * 24 * 2 + 24 * 12 * 2 + 3 * 24 * 10 + 2 * 24
    told = size(load_config(PLAIN), context_length=16)
    assert told.parameters == told.active_parameters == 61 * 24 + 3 * block + 24
    assert told.embedding_parameters == 61 * 24
    (row,) = told.layers
    assert (row.count, row.parameters, row.mixer) == (3, block, "attention heads=4 kv_heads=2 causal position=rope")
    assert size(load_config(PLAIN, ["head.tied=false"])).parameters == told.parameters + 61 * 24


def test_state() -> None:
    told = size(load_config(PLAIN), context_length=16, batch=2)
    assert told.state_bytes - told.position_table_bytes == 3 * 2 * 16 * 2 * (6 + 6) * 4
    assert told.state_bytes_per_token == 3 * 2 * (6 + 6) * 4
    half = state_bytes(load_config(PLAIN), 16, 2, torch.bfloat16)
    assert 2 * (half - told.position_table_bytes) == told.state_bytes - told.position_table_bytes
    assert size(load_config(PLAIN, ["layers.0.mixer.window=5"]), context_length=16).state_bytes_per_token == 0
    assert size(load_config(PLAIN, ["layers.0.mixer.causal=false"])).state_bytes == 0


@pytest.mark.parametrize("window", [None, 5])
def test_operations(window: int | None) -> None:
    context = 16
    overrides = [] if window is None else [f"layers.0.mixer.window={window}"]
    weights = 3 * (24 * 24 * 2 + 24 * 12 * 2 + 3 * 24 * 10) + 61 * 24
    pairs = sum(min(i + 1, window or context) for i in range(context))
    want = 2 * weights + 3 * 2 * pairs * 4 * (6 + 6) / context
    assert size(load_config(PLAIN, overrides), context_length=context).flops_per_token == want
    model = build(load_config(PLAIN, overrides), device="meta")
    assert flops_per_token(model, context) == want


def test_choices_are_counted_and_reasoned() -> None:
    config = load_config(PLAIN)
    prefill = {choice.kernel: count for choice, count in kernel_choices(config, 16, 0, torch.float32, "cpu").items()
               if choice.operation == "attention"}  # fmt: skip
    step = {choice.kernel: count for choice, count in kernel_choices(config, 1, 9, torch.float32, "cpu").items()
            if choice.operation == "attention"}  # fmt: skip
    assert (prefill, step) == ({"causal": 3}, {"unmasked": 3})
