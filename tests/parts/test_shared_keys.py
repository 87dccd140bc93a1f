"""Keys and values of earlier layers that a layer reads, or adds to its own: a plain loop, states, sizes, refusals."""

import random
from typing import Any

import pytest
import torch

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.mixers.attention import Attention
from tests.cases import Data, attention, by_day, case, design, layer
from tests.laws.planting import Plant, calls, condition, reads
from tests.parts.loops import assert_none, decoder_errors, decoder_loop

WIDTH = 12


def random_design(seed: int) -> Data:
    """Layers of attention alone, of two windows; some read the keys and values of others."""
    draw = random.Random(seed)
    window = draw.choice((2, 3))
    kinds: dict[int | None, Data] = {}
    for each in (None, window):
        kinds[each] = {
            "kv_heads": draw.choice((1, 2)), "head_dim": draw.choice((2, 4, 6)), "value_dim": draw.randint(2, 5),
            "position": draw.choice((None, {"kind": "rope"})), "qk_norm": draw.choice((None, "head")),
            "k_eq_v": draw.random() < 0.3, "value_norm": draw.random() < 0.3,
        }  # fmt: skip
        if kinds[each]["k_eq_v"]:
            kinds[each]["value_dim"] = kinds[each]["head_dim"]
    layers, seen = [], set[int | None]()
    for index in range(draw.randint(2, 6)):
        each = draw.choice((None, window)) if index != 1 else next(iter(seen))
        shares = each in seen and (index == 1 or draw.random() < 0.6)
        seen.add(each)
        fields = kinds[each] | {"heads": kinds[each]["kv_heads"] * draw.choice((1, 2)), "window": each}
        own = {} if shares else fields
        fields |= {name: own.get(name, False) for name in ("k_eq_v", "value_norm")}
        layers.append(layer(attention(**fields, shared_kv=shares), None))
    return design(*layers, width=WIDTH)


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_shared_keys_are_those_of_a_plain_loop(seed: int) -> None:
    config = parse_config(ModelConfig, random_design(seed))
    assert any(source is not None for source in config.kv_sources)
    assert_none(decoder_errors(model_under_test(config), decoder_loop, seed))


READERS = design(
    layer(attention(kv_heads=2, window=3)),
    layer(attention(kv_heads=1, value_dim=5)),
    layer(attention(kv_heads=2, window=3, shared_kv=True)),
    layer(attention(kv_heads=1, value_dim=5, shared_kv=True), repeat=2),
)


def test_readers_have_no_projections_and_no_state() -> None:
    model = heddle.build(parse_config(ModelConfig, READERS))
    assert model.config.kv_sources == (None, None, 0, 1, 1)
    names = {name.split(".", 2)[2] for name, _ in model.layers.named_parameters(prefix="layers") if ".3.mixer" in name}
    assert names == {"mixer.q.weight", "mixer.out.weight"}
    assert model.init_state(2, 20).layer_bytes == [2 * 2 * 12 * 3 * 4, 2 * 1 * 11 * 20 * 4, 0, 0, 0]
    own = parse_config(
        ModelConfig, design(*(each | {"mixer": each["mixer"] | {"shared_kv": False}} for each in READERS["layers"]))
    )
    shared_size, own_size = (heddle.size(each, 20) for each in (model.config, own))
    assert own_size.parameters - shared_size.parameters == 24 * (2 * 12 + 2 * 11)
    assert shared_size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (own_size.flops_per_token - shared_size.flops_per_token) == 2 * 24 * (2 * 12 + 2 * 11)
    assert own_size.state_bytes - shared_size.state_bytes == 4 * (2 * 12 * 3 + 2 * 11 * 20)


def test_equal_readers_of_different_layers_are_different_layers() -> None:
    """Built once each, they find a source of the same shapes."""
    plain, capped = attention(kv_heads=2), attention(kv_heads=2, softcap=2.0)
    reader = layer(attention(kv_heads=2, shared_kv=True))
    config = parse_config(ModelConfig, design(layer(plain), layer(capped), layer(plain), reader, layer(capped), reader))
    assert config.kv_sources == (None, None, None, 2, None, 4)
    assert config.layer_order == (0, 1, 0, 2, 1, 3)
    assert heddle.size(config, 8).parameters == sum(each.numel() for each in heddle.build(config).parameters())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (design(layer(attention(shared_kv=True))), r"layers\[0\].mixer.shared_kv: no earlier layer has keys"),
        (
            design(layer(attention(window=3)), layer(attention(window=4, shared_kv=True))),
            r"layers\[1\].mixer.shared_kv: no earlier layer has keys",
        ),
        (
            design(layer(attention(kv_heads=2)), layer(attention(kv_heads=1, shared_kv=True))),
            r"layers\[1\].mixer.kv_heads: differs from layers\[0\]'s, whose keys and values it reads; make",
        ),
        (
            design(layer(attention()), layer(attention(shared_kv=True, value_norm=True))),
            r"layers\[1\].mixer.value_norm: has no effect with shared_kv",
        ),
        (
            design(layer(attention(k_eq_v=True, value_dim=5))),
            r"layers\[0\].mixer.value_dim: 5 is not head_dim = 6, but k_eq_v uses keys as values",
        ),
        (
            design(layer(attention(value_norm=True, value_dim=1))),
            r"layers\[0\].mixer.value_norm: leaves the norm one number per head",
        ),
        (
            design(layer(attention(k_eq_v=True, short_convolution={"of": ["v"]}))),
            r"layers\[0\].mixer.short_convolution.of: v is not projected with k_eq_v",
        ),
        (
            design(layer(attention(qk_norm="head")), layer(attention(shared_kv=True))),
            r"layers\[1\].mixer.qk_norm: differs from",
        ),
        (
            design(layer(attention()), layer(attention(position={"kind": "rope", "base": 5.0}, shared_kv=True))),
            r"layers\[1\].mixer.position: differs from",
        ),
        (
            design(
                layer(attention()), layer({"kind": "pair", "first": attention(shared_kv=True), "second": attention()})
            ),
            r"layers\[1\].mixer.first.shared_kv: is for a layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)


def test_a_call_leaves_nothing_behind() -> None:
    """Keys of one call are not those of the next, even if both have one layout; nor does the layout keep them."""
    model = model_under_test(parse_config(ModelConfig, READERS))
    layout, tokens, others = heddle.Layout.causal(2, 9), *(random_tokens(model.config, 2, 9, seed) for seed in (0, 1))
    with torch.no_grad():
        first = model(tokens, layout)[0]
        model(others, layout)
        assert torch.equal(model(tokens, layout)[0], first)
    assert layout.handed_over is None


def first_sources(config: ModelConfig) -> tuple[int | None, ...]:
    """A mistake: the first layer of a window in the place of the last."""
    first: dict[Any, int] = {}
    sources: list[int | None] = []
    for index, (_, entry) in enumerate(config.expand()):
        assert entry.mixer is not None
        source = first.setdefault(entry.mixer.kv_kind, index)
        sources.append(source if entry.mixer.reads_kv else None)
    return tuple(sources)


def test_the_loop_sees_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "kv_sources", property(first_sources))
    config = parse_config(
        ModelConfig, design(*(layer(attention(2, shared_kv=i == 2), None) for i in range(3)), width=12)
    )
    assert decoder_errors(model_under_test(config), decoder_loop, 0)[0] > 1e-3


def test_a_kept_dictionary_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(Decoder._run, "replace", lambda change, layout, **_: layout)(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_call_leaves_nothing_behind()


# Values of the first layer that later ones add to theirs


def random_value_design(seed: int) -> Data:
    """Layers of attention alone; the second one and some later ones add the first layer's values."""
    draw = random.Random(seed)
    kv_heads, value_dim = draw.choice((1, 2)), draw.randint(1, 5)

    def mixer(residual: Any) -> Data:
        return attention(
            kv_heads * draw.choice((1, 2)),
            draw.choice((None, {"kind": "rope"})),
            kv_heads=kv_heads,
            head_dim=draw.choice((2, 4, 6)),
            value_dim=value_dim,
            window=draw.choice((None, 2, 3)),
            value_residual=residual,
        )

    numbers = [round(draw.uniform(-1.5, 1.5), 3), round(draw.uniform(0.1, 1.5), 3)]
    kinds = [None, draw.choice(("learned", numbers)), *(draw.choice((None, "learned", numbers)) for _ in range(3))]
    return design(*(layer(mixer(kind), None) for kind in kinds[: draw.randint(2, 5)]), width=WIDTH)


@pytest.mark.parametrize("seed", by_day(12, 48))
def test_mixed_values_are_those_of_a_plain_loop(seed: int) -> None:
    config = parse_config(ModelConfig, random_value_design(seed))
    assert config.value_sources[:2] == (None, 0)
    assert_none(decoder_errors(model_under_test(config), decoder_loop, seed))


WRONG: dict[str, Plant] = {
    "the two numbers in each other's place": calls(Attention._mixed_values, "unbind", lambda x: x.flip(0).unbind()),
    "the first values without their factor": reads(Attention._mixed_values, "factors", lambda f: (f[0], 1.0), nth=2),
    "own values alone": condition(Attention._mixed_values, "value_source", True),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_a_wrong_mixture(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    data = design(*(layer(attention(2, value_residual=each), None) for each in (None, "learned", "learned")), width=12)
    assert decoder_errors(model_under_test(parse_config(ModelConfig, data)), decoder_loop, 0)[0] > 1e-3


VALUE_READERS = design(
    layer({"kind": "retention", "heads": 2}),
    layer(attention(kv_heads=2, value_dim=5, window=3)),
    layer(attention(kv_heads=2, value_dim=5)),
    layer(attention(kv_heads=2, value_dim=5, value_residual="learned"), repeat=2),
    layer(attention(kv_heads=2, value_dim=5, value_residual=[1.0, 0.5])),
)


def test_value_residuals_cost_two_numbers() -> None:
    config = parse_config(ModelConfig, VALUE_READERS)
    assert config.value_sources == (None, None, None, 1, 1, 1)
    first, *rest = VALUE_READERS["layers"]
    rest = [each | {"mixer": each["mixer"] | {"value_residual": None}} for each in rest]
    plain = parse_config(ModelConfig, VALUE_READERS | {"layers": [first, *rest]})
    sizes = [heddle.size(each, 20) for each in (config, plain)]
    assert sizes[0].parameters - sizes[1].parameters == 2 * 2
    assert sizes[0].parameters == sum(each.numel() for each in heddle.build(config).parameters())
    assert sizes[0].state_bytes == sizes[1].state_bytes
    assert sizes[0].flops_per_token == sizes[1].flops_per_token


def test_learned_numbers_begin_at_one_half() -> None:
    model = heddle.build(parse_config(ModelConfig, VALUE_READERS))
    assert model.get_parameter("layers.3.mixer.value_mix").tolist() == [0.5, 0.5]


def test_the_cache_holds_mixed_values() -> None:
    """So a layer that shares keys and values reads the mixed ones, and a state has no first values."""
    config = case("attention-value-residual")
    assert config.kv_sources[-1] == 3
    own: list[Any] = [each.mixer for each in config.layers]
    own = [mixer.replace(value_residual=None) if hasattr(mixer, "value_residual") else mixer for mixer in own]
    layers = tuple(each.replace(mixer=mixer) for each, mixer in zip(config.layers, own, strict=True))
    states = [heddle.build(each).init_state(2, 9) for each in (config, config.replace(layers=layers))]
    assert set(states[0].tensors()) == set(states[1].tensors())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            design(layer({"kind": "retention", "heads": 2}), layer(attention(value_residual="learned"))),
            r"layers\[1\].mixer.value_residual: no earlier layer has attention",
        ),
        (design(layer(attention(value_residual="learned"))), r"layers\[0\].mixer.value_residual: no earlier layer has"),
        (
            design(layer(attention(kv_heads=2)), layer(attention(kv_heads=1, value_residual="learned"))),
            r"layers\[1\].mixer.kv_heads: differs from layers\[0\]'s, whose values it adds; make the two equal",
        ),
        (
            design(layer(attention(value_dim=4)), layer(attention(value_dim=5, value_residual="learned"))),
            r"layers\[1\].mixer.value_dim: differs from",
        ),
        (
            design(layer(attention()), layer(attention(value_residual=[0.5]))),
            r"layers\[1\].mixer.value_residual: \[0.5\] should be two numbers",
        ),
        (
            design(layer(attention()), layer(attention(value_residual=[0.5, 0.0]))),
            r"layers\[1\].mixer.value_residual: adds nothing",
        ),
        (
            design(layer(attention()), layer(attention(shared_kv=True, value_residual="learned"))),
            r"layers\[1\].mixer.value_residual: has no effect with shared_kv",
        ),
        (
            design(
                layer(attention()),
                layer({"kind": "pair", "first": attention(), "second": attention(value_residual="learned")}),
            ),
            r"layers\[1\].mixer.second.value_residual: is for a layer",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(data: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        heddle.load_config(data)
