"""A pair is the sum of its mixers; what they declare, hold and refuse together."""

import re

import pytest
import torch

from heddle.config import decode
from heddle.errors import ConfigError
from heddle.laws import run, shrink
from heddle.laws.subject import advance, answer, equal, fresh, subject, text
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.size import size
from heddle.parts.context.layout import Layout
from tests.cases import Data, attention, cross, design, layer


def pair(first: Data, second: Data) -> Data:
    return {"kind": "pair", "first": first, "second": second}


WINDOWS = design(layer(pair(attention(3, window=2), attention(kv_heads=2, window=5, value_dim=4))))


def test_it_is_the_sum_of_both() -> None:
    mixer = subject(decode(ModelConfig, WINDOWS)).mixers()[0]
    assert mixer is not None
    x, layout = torch.randn(2, 9, 24, dtype=torch.float64), Layout.causal(2, 9)
    parts = [getattr(mixer, name)(x, layout)[0] for name in ("first", "second")]
    assert torch.equal(mixer(x, layout)[0], parts[0] + parts[1])


def test_a_second_mixer_that_says_nothing_changes_nothing() -> None:
    both, one = (
        subject(decode(ModelConfig, WINDOWS)),
        subject(decode(ModelConfig, design(layer(attention(3, window=2))))),
    )
    weights = {name.replace("mixer.first.", "mixer."): value for name, value in both.state_dict().items()}
    one.load_state_dict({name: weights[name] for name in one.state_dict()})
    with torch.no_grad():
        both.get_parameter("layers.0.mixer.second.out.weight").zero_()
    tokens = text(one.config, 2, 9)
    equal(answer(both, tokens), answer(one, tokens), "a pair whose second mixer is silent")


def test_its_state_is_both_and_can_be_taken_back() -> None:
    model = subject(decode(ModelConfig, WINDOWS))
    tokens = text(model.config, 2, 12)
    whole = answer(model, tokens)
    with torch.no_grad():
        _, state = advance(model, fresh(model, 2, None, rewind=4), tokens)
        names = {"table.positions", "table.documents", "table.counts", "table.last"}
        inner = {f"layers.0.{which}.{name}" for which in ("first", "second") for name in ("keys", "values")}
        assert state.tensors().keys() == names | inner
        rest, state = advance(model, state.rewind(4), tokens[:, 8:])
        equal(rest, whole[:, 8:], "after four tokens were taken back")
        with pytest.raises(ConfigError, match="cannot take back 5 tokens; fork the state before"):
            state.rewind(5)


def test_the_farther_of_two_reaches_is_told() -> None:
    model = subject(decode(ModelConfig, WINDOWS))
    assert (model.reach, [mixer.reach for mixer in model.mixers() if mixer is not None]) == (5, [5])
    assert subject(load_config(WINDOWS, ["layers.0.mixer.first.window=null"])).reach is None


def test_a_pair_within_a_pair() -> None:
    inner = pair(attention(2, window=3), cross(2, memory_width=7))
    config = load_config(design(layer(pair(inner, attention(4, position=None)))))
    names = ["cut", "cut_ragged", "receptive_field", "poison_in_slots", "padding_is_not_kept", "memory", "true_size"]
    assert [result for result in run(config, names) if not result.passed] == []


def test_mixers_within_are_made_small_and_described() -> None:
    data = design(layer(pair(attention(16, kv_heads=4, window=512), cross(32, memory_width=99)), repeat=9), width=512)
    small = shrink(load_config(data))
    mixer = small.dump()["layers"][0]["mixer"]
    assert (mixer["first"]["heads"], mixer["first"]["kv_heads"], mixer["first"]["window"]) == (4, 2, 7)
    assert (mixer["second"]["heads"], mixer["second"]["memory_width"], small.width) == (2, 11, 16)
    (row,) = size(small, context=8).layers
    assert row.mixer.startswith("pair first=(attention heads=4 kv_heads=2 window=7 causal position=rope) second=(cross")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layers.0.mixer.first.heads=0",
         "layers[0].mixer.first.heads: should be greater than 0, got 0 (a whole number)"),
        ("layers.0.mixer.first.heads=7",
         "layers[0].mixer.first.heads: 7 does not divide width = 24; give head_dim, or other heads"),
        ("layers.0.mixer.first.kind=nothing", "layers[0].mixer.first: unknown kind 'nothing'"),
        ("layers.0.mixer.second=null", "layers[0].mixer.second: "),
        ("layers.0.mixer.second.causal=false",
         "layers[0].mixer.second: one mixer of a pair hides later tokens, the other does not; make both alike"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_config(WINDOWS, [override])


def test_memories_of_two_widths_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^layers\[0\].mixer.second: reads a memory 8 wide, first one 7 wide; give both"
    ):
        load_config(design(layer(pair(cross(memory_width=7), cross(memory_width=8)))))
