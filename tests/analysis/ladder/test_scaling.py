"""Designs at other sizes: what grows and what stays, the nearest size, and designs that are not scaled."""

import itertools

import pytest

from heddle.errors import ConfigError
from heddle.lab.ladder.plan import DesignScale, design_at_width
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.model.presets import KINDS
from heddle.training.width_transfer import scale_to_width
from tests import small
from tests.cases import in_turn

VOCABULARY = 1024
SCALED = [kind for kind in KINDS if kind != "retention"]


def preset(kind: str) -> ModelConfig:
    return load_config(f"preset:{kind}-tiny").replace(vocab_size=VOCABULARY)


@pytest.mark.parametrize("kind", in_turn(SCALED, turn=1, turns=3))
def test_every_design_has_sizes_over_a_factor_of_sixteen(kind: str) -> None:
    scale = DesignScale(kind, preset(kind), 64)
    own = scale.rung(scale.config.width)
    assert own is not None
    assert own.config == scale.config
    rungs = [scale.nearest_rung(own.parameters / 2**step) for step in range(5)]
    assert rungs[0] == own
    for rung, smaller in itertools.pairwise(rungs):
        assert smaller.width < rung.width
        assert smaller.parameters < rung.parameters
        assert smaller.flops_per_token < rung.flops_per_token
        assert smaller.config.depth == own.config.depth


def test_whole_numbers_of_heads_are_scaled_as_everywhere() -> None:
    config = preset("gqa")
    assert design_at_width(config, 64) == scale_to_width(config, 64)
    mixer = design_at_width(config, 256).layers[0].mixer
    assert mixer is not None
    assert {name: mixer.dump()[name] for name in ("heads", "kv_heads", "head_dim")} == {
        "heads": 8, "kv_heads": 4, "head_dim": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "width", "fields"),
    [
        ("mha", 32, {"heads": 2, "kv_heads": 2}),  # one head would be another design
        ("gqa", 48, {"heads": 2, "kv_heads": 1}),  # groups of two
        ("gqa", 96, {"heads": 4, "kv_heads": 2}),
        ("mqa", 96, {"heads": 3, "kv_heads": 1}),  # all heads are one group
        ("mla", 48, {"heads": 2, "nope_dim": 24, "rope_dim": 12, "kv_rank": 21}),
        ("gated_delta", 80, {"heads": 2, "key_heads": 1, "head_dim": 40}),
    ],
)
def test_the_nearest_heads_elsewhere(kind: str, width: int, fields: dict[str, int]) -> None:
    scaled = design_at_width(preset(kind), width)
    mixer = scaled.layers[0].mixer
    assert mixer is not None
    assert {name: mixer.dump()[name] for name in fields} == fields
    assert scaled.width == width


def test_parts_of_a_pair_and_groups_of_any_name_follow() -> None:
    mamba2 = {"kind": "mamba2", "heads": 4, "groups": 2, "head_dim": 16}
    pair = {"kind": "pair", "first": mamba2, "second": {"kind": "attention", "heads": 4, "kv_heads": 1}}
    config = load_config({"vocab_size": VOCABULARY, "width": 32, "layers": [{"mixer": pair}]})
    mixer = design_at_width(config, 24).layers[0].mixer
    assert mixer is not None
    first, second = (mixer.dump()[name] for name in ("first", "second"))
    assert {name: first[name] for name in ("heads", "groups", "head_dim")} == {"heads": 4, "groups": 2, "head_dim": 12}
    assert {name: second[name] for name in ("heads", "kv_heads")} == {"heads": 3, "kv_heads": 1}


@pytest.mark.parametrize("kind", ["gqa", "hybrid_mla"])
def test_the_nearest_size_is_that_of_every_width(kind: str) -> None:
    scale = DesignScale(kind, preset(kind), 64)
    rungs = [rung for width in range(16, 129, scale.width_step) if (rung := scale.rung(width)) is not None]
    for goal in (6e4, 1.5e5, 4e5, 9e5):
        best = min(rungs, key=lambda rung: max(rung.parameters / goal, goal / rung.parameters))
        assert scale.nearest_rung(goal) == best


def test_active_parameters_count() -> None:
    scale = DesignScale("moe", preset("moe"), 64)
    dense = DesignScale("gqa", preset("gqa"), 64)
    active, all_dense = scale.rung(128), dense.rung(128)
    assert active is not None
    assert all_dense is not None
    assert active.parameters == pytest.approx(all_dense.parameters, rel=0.05)


def test_what_has_no_other_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^retention:"):
        DesignScale("retention", preset("retention"), 64)
    scale = DesignScale("one", small.config(small.design(32)), 16)
    with pytest.raises(ConfigError, match=r"^sizes 500:"):
        scale.nearest_rung(500)
