"""Equal sizes: the search finds what trying every width finds, only width and hidden change, errors are clear."""

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.lab.compare import equal_size
from heddle.lab.compare.equal_size import (
    CLOSE_TOLERANCE,
    MAX_DEVIATION,
    equalize_sizes,
    model_size,
    nearest_width,
    resize_to,
    rounding_step,
    with_width,
)
from heddle.lab.compare.plan import DesignEntry
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import size
from tests import small


def parameters(config: ModelConfig) -> float:
    return model_size(build(config, device="meta"), "parameters", 16)


MAX_WIDTH = 96


@cache
def every_size(mixer_index: int) -> dict[int, float]:
    """The size at every width up to `MAX_WIDTH` at which a small design with one of the mixers can be built."""
    sizes = {}
    for width in range(1, MAX_WIDTH + 1):
        with suppress(ConfigError):
            sizes[width] = parameters(with_width(design_with_mixer(mixer_index), width))
    return sizes


def design_with_mixer(mixer_index: int) -> ModelConfig:
    layer = {"mixer": MIXERS[mixer_index], "feedforward": {"kind": "gated", "hidden": 20}}
    return small.config({"vocab_size": 50, "width": 24, "layers": [layer]})


MIXERS: tuple[dict[str, Any], ...] = (
    {"kind": "attention", "heads": 3, "position": {"kind": "rope"}},  # multiples of 6
    {"kind": "attention", "heads": 2, "position": {"kind": "rope", "rotary_dim": 8}},  # multiples of 2, from 16 on
    {"kind": "gated_delta", "heads": 2, "head_dim": 8},  # every width
    {"kind": "latent_attention", "heads": 2, "kv_rank": 20, "nope_dim": 8},  # from 20 on
)


@given(st.integers(0, len(MIXERS) - 1), st.integers(1_000, 60_000))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_the_search_finds_what_trying_every_width_finds(mixer_index: int, target: int) -> None:
    sizes = every_size(mixer_index)
    assert rounding_step(24) == 1
    assert list(sizes.values()) == sorted(sizes.values())
    target = min(target, int(sizes[max(sizes)]))
    best = min(sizes, key=lambda width: abs(sizes[width] - target))
    assert nearest_width(design_with_mixer(mixer_index), parameters, target) == best


def test_the_search_measures_few_widths() -> None:
    measured: list[int] = []

    def measure(config: ModelConfig) -> float:
        measured.append(config.width)
        return parameters(config)

    config = small.config(small.design(width=64))
    target = parameters(with_width(config, 520))
    assert nearest_width(config, measure, target) == 520
    assert len(measured) == len(set(measured)) <= 12


def test_sizes_out_of_reach_give_the_widest_and_the_narrowest() -> None:
    config = small.config(small.design(width=32))
    assert nearest_width(config, parameters, 1e12) == 32 * equal_size.MAX_WIDTH_FACTOR
    assert nearest_width(config, parameters, 1.0) == 4  # two heads, turned in pairs
    alone = small.config(small.design(layers=[{"mixer": MIXERS[3]}], width=24))
    assert nearest_width(alone, parameters, 1.0) == 20


def test_only_width_and_hidden_change() -> None:
    layer = {"mixer": {"kind": "attention", "heads": 2, "head_dim": 16, "window": 9}}
    experts = {"kind": "gated", "hidden": 96, "dropout": 0.1}
    nested = {"repeat": 2, "layers": [layer, layer | {"feedforward": experts}]}
    config = small.config(small.design(width=32, layers=[nested, {"feedforward": {"kind": "mlp", "hidden": 5}}]))
    assert with_width(config, 32) == config
    wide = with_width(config, 48)
    assert wide.width == 48
    inner, last = wide.dump()["layers"]
    assert inner["layers"][0] == config.dump()["layers"][0]["layers"][0]
    assert inner["layers"][1]["feedforward"] == experts | {"hidden": 144, "activation": "silu", "bias": False}
    assert last["feedforward"]["hidden"] == 8  # 7.5


@pytest.mark.parametrize(
    ("value", "step"), [(1, 1), (63, 1), (100, 1), (128, 2), (352, 4), (384, 4), (768, 8), (4096, 64)]
)
def test_sizes_stay_as_round_as_they_were(value: int, step: int) -> None:
    assert rounding_step(value) == step
    assert equal_size._scale(value, 1.0) == value
    assert equal_size._scale(value, 1.37) % step == 0
    assert equal_size._scale(value, 1e-9) == step


def entries(*names: str) -> tuple[DesignEntry, ...]:
    return tuple(DesignEntry(name, name, load_config(f"preset:{name}")) for name in names)


@pytest.mark.parametrize("kind", ["parameters", "active-parameters", "flops"])
def test_presets_come_within_a_hundredth(kind: str) -> None:
    others = ["mha", "gated_delta", "mla"] if kind == "parameters" else ["mha"]
    names = [f"{name}-tiny" for name in (*others, "mqa")]
    resized = equalize_sizes(entries(*names), "mqa-tiny", kind, 300, 32)
    sizes = [size(entry.config.replace(vocab_size=300), 32) for entry in resized]
    key = {"flops": "flops_per_token"}.get(kind, kind.replace("-", "_"))
    base = getattr(sizes[names.index("mqa-tiny")], key)
    assert all(abs(getattr(size_of_entry, key) / base - 1) < CLOSE_TOLERANCE for size_of_entry in sizes)
    assert {entry.original_width for entry in resized} == {128}
    assert next(entry.config for entry in resized if entry.name == "mqa-tiny").width == 128
    assert len({entry.config.width for entry in resized}) > 1


def test_hidden_makes_up_for_what_the_width_leaves() -> None:
    """Four heads turned in pairs leave multiples of 8: too few to be near by width alone."""
    gqa, mha = (entry.config.replace(vocab_size=300) for entry in entries("gqa-tiny", "mha-tiny"))
    target = parameters(mha)
    width = nearest_width(gqa, parameters, target)
    alone = with_width(gqa, width)
    resized = resize_to(gqa, parameters, target)
    assert resized.width == width
    assert abs(parameters(alone) / target - 1) > CLOSE_TOLERANCE > abs(parameters(resized) / target - 1)
    hidden = [config.dump()["layers"][0]["feedforward"]["hidden"] for config in (resized, alone)]
    assert hidden[0] / hidden[1] == pytest.approx(1.0, abs=0.13)
    # and where the width is near enough, proportions stay
    close = resize_to(gqa, parameters, parameters(with_width(gqa, 144)) * (1 + CLOSE_TOLERANCE / 2))
    assert close == with_width(gqa, 144)


def test_what_cannot_be_made_equal_is_refused() -> None:
    gqa, mha = entries("gqa-tiny", "mha-tiny")
    with pytest.raises(ConfigError, match=r"equal size:.*parameters, active-parameters, flops"):
        equalize_sizes((gqa, mha), "gqa-tiny", "size", 300, 32)
    varied = DesignEntry("width=64", "x", gqa.config, varied_fields=(("width", "64"),))
    with pytest.raises(ConfigError, match="equal:"):
        equalize_sizes((varied,), "width=64", "parameters", 300, 32)
    heads = {"kind": "attention", "heads": 16, "position": {"kind": "rope"}}
    coarse = small.config({"width": 32, "layers": [{"mixer": heads}]})
    fine = small.config({"width": 52, "layers": [{"mixer": heads | {"heads": 2}}]})
    pair = (DesignEntry("fine", "fine", fine), DesignEntry("coarse", "coarse", coarse))
    with pytest.raises(ConfigError, match=r"equal parameters:.*width 64"):
        equalize_sizes(pair, "fine", "parameters", 300, 32)
    assert MAX_DEVIATION == 0.1
