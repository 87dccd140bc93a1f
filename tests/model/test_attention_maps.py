"""Attention weights on request: equal to plain loops for every layout, and the answer keeps its bits."""

import importlib
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
from heddle.parts.context.layout import Layout
from tests.cases import CASES, alone, attention, case, design, layer
from tests.numerics.oracle import is_visible, loop_weights

LAYOUTS = {
    "even": lambda: Layout.causal(2, 9),
    "padded on the left": lambda: Layout.padded([9, 5], side="left"),
    "padded on the right": lambda: Layout.padded([4, 9], side="right"),
    "packed": lambda: Layout.packed([[4, 5], [1, 8]]),
}
NAMES = [name for name in CASES if name.startswith("attention-")]


def model_of(data: dict[str, Any]) -> Decoder:
    return model_under_test(parse_config(ModelConfig, data))


def by_loops(monkeypatch: pytest.MonkeyPatch, model: Decoder, tokens: Tensor, layout: Layout) -> list[Tensor]:
    """What plain loops make of the queries and keys of each layer."""
    found: list[Tensor] = []
    run = numerics.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, seen: Any, scale: float, *rest: Any) -> Tensor:
        found.append(loop_weights(q.detach(), k.detach(), seen, scale, rest[1]))
        return run(q, k, v, seen, scale, *rest)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr("heddle.parts.mixers.attention.attention", spy)
        model(tokens, layout)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_plain_loops(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = model_under_test(case(name)), LAYOUTS[layout]()
    tokens = random_tokens(model.config, 2, 9)
    with torch.no_grad():
        before = model(tokens, place)[0]
    found = heddle.attention_weights(model, tokens, place)
    wanted = by_loops(monkeypatch, model, tokens, place)
    assert len(found) == len(wanted) == len(model.layers)
    for got, want in zip(found, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(model(tokens, place)[0], before)
    assert torch.equal(forward_with_weights(model, tokens, place, lambda index, seen: None), before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"causal": False, "window": 2}, {"sink": True, "softcap": 1.0}])
def test_rows_sum_to_one_and_stay_within_what_is_seen(fields: dict[str, Any], layout: str) -> None:
    model, place = model_of(alone(kv_heads=2, **fields)), LAYOUTS[layout]()
    seen = place.attention_mask(fields.get("window"), fields.get("causal", True))
    shown = torch.tensor([[[is_visible(seen, b, t, s) for s in range(9)] for t in range(9)] for b in range(2)])[:, None]
    for weights in heddle.attention_weights(model, random_tokens(model.config, 2, 9), place):
        assert weights is not None
        assert weights.shape == (2, 4, 9, 9)
        assert torch.equal(weights > 0, shown.expand_as(weights))
        sums, real = weights.sum(-1), shown.any(-1).expand(2, 4, 9)
        if "sink" in fields:
            assert bool((sums[real] < 1 - 1e-6).all())
        else:
            torch.testing.assert_close(sums, real.double(), rtol=0, atol=1e-12)


def test_layers_without_weights_are_none() -> None:
    model = model_of(design(layer(attention(kv_heads=2)), layer(None), layer(attention(heads=3))))
    found = heddle.attention_weights(model, random_tokens(model.config, 1, 5))
    assert [None if one is None else one.shape[1] for one in found] == [4, None, 3]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_the_fast_forms_run_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("the reference ran")

    model = model_of(alone())
    broken = [form if form.name != "reference" else form.__class__("reference", refuse, form.unsupported)
              for form in numerics.ATTENTION.kernels]  # fmt: skip
    monkeypatch.setattr(numerics, "ATTENTION", numerics.ATTENTION.__class__("attention", tuple(broken)))
    assert all(one is not None for one in heddle.attention_weights(model, random_tokens(model.config, 1, 5)))


def test_mixers_side_by_side_are_joined_along_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(design(layer(attention())))
    run = numerics.attention
    keys = 5

    def twice(q: Tensor, *rest: Any) -> Tensor:
        notify_observer(lambda: Observation(torch.full((1, 2, 5, keys), 0.5), 1))
        return run(q, *rest)

    monkeypatch.setattr("heddle.parts.mixers.attention.attention", twice)
    [found] = heddle.attention_weights(model, random_tokens(model.config, 1, 5))
    assert found is not None
    assert found.shape == (1, 6, 5, 5)
    keys = 7
    with pytest.raises(ConfigError, match=r"layer 0 reads texts of \[5, 7\] tokens"):
        heddle.attention_weights(model, random_tokens(model.config, 1, 5))


LINEAR = {
    "linear-attention-elu": ("linear_attention", "causal_means"),
    "linear-attention-learned": ("linear_attention", "causal_means"),
    "linear-attention-double-softmax": ("linear_attention", "document_sums"),
    "retention-learned-decays": ("retention", "causal_sums"),
    "delta-key-heads": ("gated_delta", "gated_delta_rule"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LINEAR)
def test_implied_weights_make_the_answer_of_the_values(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = model_under_test(case(name)), LAYOUTS[layout]()
    tokens = random_tokens(model.config, 2, 9)
    assert heddle.attention_weights(model, tokens, place) == [None] * len(model.layers)
    found = heddle.attention_weights(model, tokens, place, implied=True)
    kind, operation = LINEAR[name]
    module = importlib.import_module(f"heddle.parts.mixers.{kind}")
    run, calls = getattr(module, operation), []

    def spy(*given: Any) -> Any:
        answer = run(*given)
        values = given[0].v if operation == "gated_delta_rule" else given[2]
        calls.append((values, answer[0] if isinstance(answer, tuple) else answer))
        return answer

    monkeypatch.setattr(module, operation, spy)
    with torch.no_grad():
        model(tokens, place)
    real = place.positions >= 0
    documents = torch.zeros_like(place.positions) if place.segment_ids is None else place.segment_ids
    apart = (documents[:, :, None] != documents[:, None]) | ~(real[:, :, None] & real[:, None])
    if model.causal:
        apart = apart | torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert len(calls) == len(found) == len(model.layers)
    for weights, (values, answer) in zip(found, calls, strict=True):
        assert weights is not None
        assert not weights.masked_select(apart[:, None].expand_as(weights)).any()
        wanted = torch.where(real[:, None, :, None], answer, 0.0)
        torch.testing.assert_close(weights @ values, wanted, rtol=0, atol=1e-10)
