"""A pair is the sum of its mixers: its state, its window, its sizes and its errors."""

import re

import pytest
import torch

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws import run, shrink
from heddle.laws.harness import (
    assert_close,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.parts.layout import Layout
from heddle.parts.mixers.pair import _multiplied
from tests.cases import Data, attention, cross, design, layer
from tests.laws.planting import wrapped


def pair(first: Data, second: Data) -> Data:
    return {"kind": "pair", "first": first, "second": second}


WINDOWS = design(layer(pair(attention(3, window=2), attention(kv_heads=2, window=5, value_dim=4))))


def test_output_is_the_sum_of_both_mixers() -> None:
    mixer = model_under_test(parse_config(ModelConfig, WINDOWS)).mixers()[0]
    assert mixer is not None
    x, layout = torch.randn(2, 9, 24, dtype=torch.float64), Layout.causal(2, 9)
    parts = [getattr(mixer, name)(x, layout)[0] for name in ("first", "second")]
    assert torch.equal(mixer(x, layout)[0], parts[0] + parts[1])


MULTIPLIED = {"input_multipliers": [1.5, 0.5], "output_multipliers": [2.0, 3.0]}


def test_numbers_multiply_what_both_read_and_give(monkeypatch: pytest.MonkeyPatch) -> None:
    mixers = pair(attention(3, window=2), attention(kv_heads=2, window=5))
    mixer = model_under_test(parse_config(ModelConfig, design(layer(mixers | MULTIPLIED)))).mixers()[0]
    assert mixer is not None
    x, layout = torch.randn(2, 9, 24, dtype=torch.float64), Layout.causal(2, 9)
    with torch.no_grad():
        expected = 2.0 * mixer.get_submodule("first")(1.5 * x, layout)[0]
        expected = expected + 3.0 * mixer.get_submodule("second")(0.5 * x, layout)[0]
        torch.testing.assert_close(mixer(x, layout)[0], expected, rtol=0, atol=1e-12)
        one_number = wrapped(_multiplied, lambda multiply, numbers, *x: multiply(numbers and 2 * numbers[:1], *x))
        one_number(monkeypatch)
        assert float((mixer(x, layout)[0] - expected).abs().max()) > 0.01


@pytest.mark.parametrize("name", MULTIPLIED)
def test_other_than_two_numbers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"mixer.{name}: \[2.0\]"):
        load_config(design(layer(pair(attention(), attention()) | {name: [2.0]})))


def test_a_second_mixer_with_zero_output_changes_nothing() -> None:
    paired, single = (
        model_under_test(parse_config(ModelConfig, WINDOWS)),
        model_under_test(parse_config(ModelConfig, design(layer(attention(3, window=2))))),
    )
    weights = {name.replace("mixer.first.", "mixer."): value for name, value in paired.state_dict().items()}
    single.load_state_dict({name: weights[name] for name in single.state_dict()})
    with torch.no_grad():
        paired.get_parameter("layers.0.mixer.second.out.weight").zero_()
    tokens = random_tokens(single.config, 2, 9)
    assert_close(
        forward_no_grad(paired, tokens), forward_no_grad(single, tokens), "a pair whose second mixer outputs zero"
    )


def test_its_state_holds_both_states_and_rolls_back() -> None:
    model = model_under_test(parse_config(ModelConfig, WINDOWS))
    tokens = random_tokens(model.config, 2, 12)
    whole = forward_no_grad(model, tokens)
    with torch.no_grad():
        _, state = forward_with_state(model, new_state(model, 2, None, rollback=4), tokens)
        names = {"table.positions", "table.segment_ids", "table.token_counts", "table.last_token"}
        inner = {f"layers.0.{which}.{name}" for which in ("first", "second") for name in ("keys", "values")}
        assert state.tensors().keys() == names | inner
        hidden, state = forward_with_state(model, state.rollback(4), tokens[:, 8:])
        assert_close(hidden, whole[:, 8:], "after four tokens were rolled back")
        with pytest.raises(ConfigError, match="5 tokens"):
            state.rollback(5)


def test_the_larger_window_counts() -> None:
    model = model_under_test(parse_config(ModelConfig, WINDOWS))
    assert (model.lookback, [mixer.window for mixer in model.mixers() if mixer is not None]) == (5, [5])
    assert model_under_test(load_config(WINDOWS, ["layers.0.mixer.first.window=null"])).lookback is None


def test_a_pair_within_a_pair() -> None:
    inner = pair(attention(2, window=3), cross(2, encoder_width=7))
    config = load_config(design(layer(pair(inner, attention(4, position=None)))))
    names = [
        "chunked_decoding",
        "chunked_ragged_batch",
        "receptive_field",
        "nan_in_unused_slots",
        "padding_not_cached",
        "cross_attention",
        "size_matches_model",
    ]
    assert [result for result in run(config, names) if not result.passed] == []


def test_nested_mixers_are_shrunk_and_described() -> None:
    data = design(layer(pair(attention(16, kv_heads=4, window=512), cross(32, encoder_width=99)), repeat=9), width=512)
    small = shrink(load_config(data))
    mixer = small.dump()["layers"][0]["mixer"]
    assert (mixer["first"]["heads"], mixer["first"]["kv_heads"], mixer["first"]["window"]) == (4, 2, 7)
    assert (mixer["second"]["heads"], mixer["second"]["encoder_width"], small.width) == (2, 11, 16)
    (row,) = size(small, context_length=8).layers
    assert row.mixer.startswith("pair first=(attention heads=4 kv_heads=2 window=7 causal position=rope) second=(cross")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layers.0.mixer.first.heads=0",
         "layers[0].mixer.first.heads:"),
        ("layers.0.mixer.first.heads=7",
         "layers[0].mixer.first.heads: 7"),
        ("layers.0.mixer.first.kind=nothing", "layers[0].mixer.first:"),
        ("layers.0.mixer.second=null", "layers[0].mixer.second:"),
        ("layers.0.mixer.second.causal=false",
         "layers[0].mixer.second:"),
    ],
)  # fmt: skip
def test_errors_name_the_path(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(WINDOWS, [override])


def test_two_encoder_widths_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^layers\[0\].mixer.second:",
    ):
        load_config(design(layer(pair(cross(encoder_width=7), cross(encoder_width=8)))))


@pytest.mark.parametrize("other", [attention(), {"kind": "differential_attention", "heads": 2}])
def test_it_depends_on_the_number_of_its_layer_if_one_of_its_mixers_does(other: Data) -> None:
    mixers = [
        model_under_test(parse_config(ModelConfig, design(layer(pair(*mixers))))).mixers()[0]
        for mixers in ((attention(), other), (other, attention()))
    ]
    assert [mixer is not None and mixer.uses_layer_index for mixer in mixers] == [other != attention()] * 2
