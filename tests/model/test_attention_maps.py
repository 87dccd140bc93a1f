"""Attention weights: equal to those of plain loops for every layout, and the model's output keeps its bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.attention_maps import forward_with_weights
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.attention import softmax as numerics
from heddle.numerics.attention.observer import Observation, notify_observer
from heddle.parts.layout import Layout
from heddle.parts.mixers import attention as attention_module
from heddle.parts.mixers import linear_attention, mamba, mamba2, retention, rg_lru, rwkv7
from heddle.parts.modules import recurrent
from tests.cases import CASES, alone, attention, case, design, layer
from tests.numerics.oracle import is_visible, loop_weights

LAYOUTS = {
    "even": lambda: Layout.causal(2, 9),
    "padded on the left": lambda: Layout.padded([9, 5], side="left"),
    "padded on the right": lambda: Layout.padded([4, 9], side="right"),
    "packed": lambda: Layout.packed([[4, 5], [1, 8]]),
}
# The loops here attend to all visible keys; tests/parts/test_indexer.py has those of selected ones.
NAMES = [name for name in CASES if name.startswith("attention-") and "'indexer'" not in str(CASES[name])]


def model_of(data: dict[str, Any]) -> Decoder:
    return model_under_test(parse_config(ModelConfig, data))


def weights_by_loops(monkeypatch: pytest.MonkeyPatch, model: Decoder, tokens: Tensor, layout: Layout) -> list[Tensor]:
    """The weights that plain loops compute from the queries and keys of each layer."""
    layer_weights: list[Tensor] = []
    run = numerics.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, *args: Any) -> Tensor:
        layer_weights.append(loop_weights(q.detach(), k.detach(), mask, scale, args[1]))
        return run(q, k, v, mask, scale, *args)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(attention_module, "attention", spy)
        model(tokens, layout)
    return layer_weights


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if number % len(LAYOUTS) == turn else pytest.mark.nightly)
        for number, name in enumerate(NAMES)
        for turn, layout in enumerate(LAYOUTS)
    ],
)
def test_weights_are_those_of_plain_loops(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch_layout = model_under_test(case(name)), LAYOUTS[layout]()
    tokens = random_tokens(model.config, 2, 9)
    with torch.no_grad():
        before = model(tokens, batch_layout)[0]
    weights = heddle.attention_weights(model, tokens, batch_layout)
    expected = weights_by_loops(monkeypatch, model, tokens, batch_layout)
    assert len(weights) == len(expected) == len(model.layers)
    for actual, reference in zip(weights, expected, strict=True):
        assert actual is not None
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(model(tokens, batch_layout)[0], before)
    assert torch.equal(forward_with_weights(model, tokens, batch_layout, lambda index, weights: None), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"causal": False, "window": 2}, {"sink": True, "softcap": 1.0}])
def test_rows_sum_to_one_over_visible_keys(fields: dict[str, Any], layout: str) -> None:
    model, batch_layout = model_of(alone(kv_heads=2, **fields)), LAYOUTS[layout]()
    mask = batch_layout.attention_mask(fields.get("window"), fields.get("causal", True))
    visible = torch.tensor([[[is_visible(mask, b, t, s) for s in range(9)] for t in range(9)] for b in range(2)])[
        :, None
    ]
    for weights in heddle.attention_weights(model, random_tokens(model.config, 2, 9), batch_layout):
        assert weights is not None
        assert weights.shape == (2, 4, 9, 9)
        assert torch.equal(weights > 0, visible.expand_as(weights))
        sums, has_keys = weights.sum(-1), visible.any(-1).expand(2, 4, 9)
        if "sink" in fields:
            assert bool((sums[has_keys] < 1 - 1e-6).all())
        else:
            torch.testing.assert_close(sums, has_keys.double(), rtol=0, atol=1e-12)


def test_layers_without_weights_are_none() -> None:
    model = model_of(design(layer(attention(kv_heads=2)), layer(None), layer(attention(heads=3))))
    weights = heddle.attention_weights(model, random_tokens(model.config, 1, 5))
    assert [None if layer_weights is None else layer_weights.shape[1] for layer_weights in weights] == [4, None, 3]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_fast_kernels_run_while_weights_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the reference ran")

    model = model_of(alone())
    kernels = [kernel if kernel.name != "reference" else kernel.__class__("reference", refuse, kernel.unsupported)
              for kernel in numerics.ATTENTION.kernels]  # fmt: skip
    monkeypatch.setattr(numerics, "ATTENTION", numerics.ATTENTION.__class__("attention", tuple(kernels)))
    assert all(weights is not None for weights in heddle.attention_weights(model, random_tokens(model.config, 1, 5)))


def test_weights_of_several_calls_in_a_layer_are_concatenated_along_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(design(layer(attention())))
    run = numerics.attention
    keys = 5

    def twice(q: Tensor, *args: Any) -> Tensor:
        notify_observer(lambda: Observation(torch.full((1, 2, 5, keys), 0.5), 1))
        return run(q, *args)

    monkeypatch.setattr(attention_module, "attention", twice)
    [weights] = heddle.attention_weights(model, random_tokens(model.config, 1, 5))
    assert weights is not None
    assert weights.shape == (1, 6, 5, 5)
    keys = 7
    with pytest.raises(ConfigError, match=r"layer 0.*\[5, 7\]"):
        heddle.attention_weights(model, random_tokens(model.config, 1, 5))


LINEAR = {
    "linear-attention-elu": (linear_attention, "causal_means"),
    "linear-attention-learned": (linear_attention, "causal_means"),
    "linear-attention-double-softmax": (linear_attention, "document_sums"),
    "retention-learned-decays": (retention, "causal_sums"),
    "delta-key-heads": (recurrent, "gated_delta_rule"),
    "kda-own-widths": (recurrent, "gated_delta_rule"),
    "kda-preconditioned": (recurrent, "gated_delta_rule"),
    "mamba-norms": (mamba, "selective_scan"),
    "rg-lru": (rg_lru, "diagonal_recurrence"),
    "mamba2-groups": (mamba2, "state_space_duality"),
    "rwkv7-own-widths": (rwkv7, "general_delta_rule"),
}


def test_several_values_a_token_have_no_implied_weights() -> None:
    model = model_under_test(case("delta-steps"))
    assert heddle.attention_weights(model, random_tokens(model.config, 2, 9), implied=True) == [None] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LINEAR)
def test_implied_weights_times_values_equal_the_output(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch_layout = model_under_test(case(name)), LAYOUTS[layout]()
    tokens = random_tokens(model.config, 2, 9)
    assert heddle.attention_weights(model, tokens, batch_layout) == [None] * len(model.layers)
    layer_weights = heddle.attention_weights(model, tokens, batch_layout, implied=True)
    module, operation = LINEAR[name]
    run, calls = getattr(module, operation), []

    def spy(*args: Any) -> Any:
        output = run(*args)
        values = args[2] if isinstance(args[0], Tensor) else args[0].v
        calls.append((values, output[0] if isinstance(output, tuple) else output))
        return output

    monkeypatch.setattr(module, operation, spy)
    with torch.no_grad():
        model(tokens, batch_layout)
    is_token = batch_layout.positions >= 0
    documents = (
        torch.zeros_like(batch_layout.positions) if batch_layout.segment_ids is None else batch_layout.segment_ids
    )
    masked = (documents[:, :, None] != documents[:, None]) | ~(is_token[:, :, None] & is_token[:, None])
    if model.causal:
        masked = masked | torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert len(calls) == len(layer_weights) == len(model.layers)
    for weights, (values, output) in zip(layer_weights, calls, strict=True):
        assert weights is not None
        assert not weights.masked_select(masked[:, None].expand_as(weights)).any()
        expected = torch.where(is_token[:, None, :, None], output, 0.0)
        torch.testing.assert_close(weights @ values, expected, rtol=0, atol=1e-10)
