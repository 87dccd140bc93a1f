"""Scalings against transformers' frequencies, YaRN against the paper's ramp, NTK against its formula, and errors."""

import ast
import math
from typing import Any

import pytest
import torch

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.parts.layout import Layout
from heddle.parts.positions.rope import Rope, RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.longrope import LongropeConfig
from heddle.parts.scalings.ntk import NtkConfig
from heddle.parts.scalings.proportional import ProportionalConfig
from tests.laws.planting import Plant, calls, operator
from tests.parity import reference

YARNS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "DeepSeek-V3": (64, 10000.0, {"factor": 40.0, "original_length": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "DeepSeek-V2-Lite": (
        64, 10000.0, {"factor": 40.0, "original_length": 4096, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "Qwen": (128, 1000000.0, {"factor": 4.0, "original_length": 32768}),
    "gpt-oss": (64, 150000.0, {"factor": 32.0, "original_length": 4096, "truncate": False}),
    "a factor of its own": (32, 10000.0, {"factor": 8.0, "original_length": 512, "attention_factor": 1.4}),
    "unlike factors": (
        16, 500.0, {"factor": 3.0, "original_length": 128, "beta_fast": 6.0, "mscale": 1.3, "mscale_all_dim": 0.6},
    ),
    "unscaled": (16, 10000.0, {"factor": 1.0, "original_length": 128}),
}  # fmt: skip


def rope(dim: int, base: float, fields: dict[str, Any]) -> Rope:
    return parse_config(RopeConfig, {"base": base, "scaling": {"kind": "yarn", **fields}}).build(dim)


@pytest.mark.parametrize("name", YARNS)
def test_yarn_equals_that_of_transformers(name: str) -> None:
    dim, base, fields = YARNS[name]
    theirs, factor = reference.scaled("yarn", (dim, base), fields)
    mine = rope(dim, base, fields)
    assert list(mine.scaled_frequencies(1).inv_freq) == pytest.approx(theirs.tolist(), rel=1e-6)
    assert list(mine.scaled_frequencies(1, torch.float32).inv_freq) == theirs.tolist()
    assert mine.attention_factor == pytest.approx(factor, rel=1e-12)
    x, layout = torch.randn(1, 2, 3, dim), Layout(torch.tensor([[0, 7, 4000]]))
    angle = layout.positions[0, :, None].float() * theirs
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angle.cos() * factor, angle.sin() * factor
    want = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    torch.testing.assert_close(mine(x, layout), want, rtol=0, atol=4000 * 1e-6)


@pytest.mark.parametrize("name", YARNS)
def test_yarn_equals_the_formula_of_the_paper(name: str) -> None:
    """A pair with beta_fast rotations keeps its frequency; one with beta_slow rotations is slowed by the factor."""
    dim, base, fields = YARNS[name]
    factor, length = fields["factor"], fields["original_length"]
    for index, theta in enumerate(rope(dim, base, fields).scaled_frequencies(1).inv_freq):
        plain = base ** (-2 * index / dim)
        assert plain / factor * (1 - 1e-12) <= theta <= plain * (1 + 1e-12)
        near = dim / math.log(base)  # rounding may move the bounds by one pair
        slack = math.exp(2 / near)
        turns = length * plain / (2 * math.pi)
        if turns > fields.get("beta_fast", 32.0) * slack:
            assert theta == pytest.approx(plain, rel=1e-12)
        if turns * slack < fields.get("beta_slow", 1.0):
            assert theta == pytest.approx(plain / factor, rel=1e-12)


@pytest.mark.parametrize(("share", "factor"), [(0.25, 1.0), (0.5, 4.0), (0.3, 1.0), (1.0, 2.0)])
def test_proportional_equals_that_of_transformers(share: float, factor: float) -> None:
    theirs, _ = reference.scaled("proportional", (20, 1000.0), {"factor": factor}, part=share)
    mine = RopeConfig(base=1000.0, scaling=ProportionalConfig(rotated_share=share, factor=factor)).build(20)
    assert list(mine.scaled_frequencies(1, torch.float32).inv_freq) == theirs.tolist()
    x, layout = torch.randn(1, 2, 1, 20), Layout(torch.tensor([[7]]))
    still = torch.arange(10) >= int(share * 10)
    unchanged = (mine(x, layout) == x)[0, :, 0].view(2, 2, 10).all(1)
    assert torch.equal(unchanged, still.expand(2, 10))


# By kind: the fields, and a bug.
SLOWED: dict[str, tuple[dict[str, Any], Plant]] = {
    "linear": ({"factor": 3.0}, operator(LinearConfig.scale_frequencies, ast.Div, ast.Mult, nth=-1)),
    "llama3": (
        {"factor": 8.0, "original_length": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        calls(Llama3Config.scale_frequencies, "clamp", lambda ramp, *ends: 1 - ramp.clamp(*ends)),
    ),
    "proportional": (
        {"rotated_share": 0.5, "factor": 4.0},
        operator(ProportionalConfig.scale_frequencies, ast.Div, ast.Mult, nth=-1),
    ),
}


@pytest.mark.parametrize("kind", SLOWED)
def test_frequencies_equal_those_of_transformers_and_a_bug_differs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, plant = SLOWED[kind]
    share = {"part": share} if (share := fields.get("rotated_share")) else {}
    theirs, _ = reference.scaled(kind, (20, 1000.0), {k: v for k, v in fields.items() if k != "rotated_share"}, **share)
    expected = pytest.approx(theirs.tolist(), rel=1e-6)

    def frequencies() -> list[float]:
        config = parse_config(RopeConfig, {"base": 1000.0, "scaling": {"kind": kind, **fields}})
        return list(config.build(20).scaled_frequencies(1, torch.float32).inv_freq)

    assert frequencies() == expected
    plant(monkeypatch)
    assert frequencies() != expected


def test_a_share_without_a_pair_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotated_share: leaves no pair to rotate"):
        RopeConfig(scaling=ProportionalConfig(rotated_share=0.1)).build(8)


def test_only_a_latent_mixer_scales_its_scores() -> None:
    dim, base, fields = YARNS["unlike factors"]
    growth = [0.1 * strength * math.log(3.0) + 1.0 for strength in (1.3, 0.6)]
    table = rope(dim, base, fields)
    assert table.attention_factor == pytest.approx(growth[0] / growth[1], rel=1e-12)
    assert table.score_scale == pytest.approx(growth[1] ** 2, rel=1e-12)
    assert rope(*YARNS["Qwen"]).score_scale == 1.0


GOOD = {"kind": "yarn", "factor": 4.0, "original_length": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": GOOD | {"factor": 0.5}}, "scaling.factor:"),
        ({"scaling": GOOD | {"beta_fast": 0.5}}, "scaling.beta_fast: 0.5"),
        ({"scaling": GOOD | {"mscale": 1.0}}, "scaling.mscale_all_dim:"),
        ({"scaling": GOOD | {"mscale_all_dim": 1.0}}, "scaling.mscale:"),
        (
            {"scaling": GOOD | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}},
            "scaling.attention_factor:",
        ),
        ({"scaling": GOOD, "inv_freq": [1.0]}, "inv_freq:"),
        ({"scaling": GOOD, "base": 1.0}, "base: 1.0"),
    ],
)
def test_what_cannot_be_scaled_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_config(RopeConfig, fields)


@pytest.mark.parametrize("value", [1e-320, 1e308])
@pytest.mark.parametrize("field", ["beta_fast", "beta_slow", "mscale"])
def test_extreme_values_give_finite_frequencies(field: str, value: float) -> None:
    fields = {field: value} if field != "beta_slow" else {field: value, "beta_fast": 1e308}
    both = {"mscale_all_dim": 1.0} if field == "mscale" else {}
    if field == "beta_fast":
        fields["beta_slow"] = 1e-320
    fields |= both | {"factor": 4.0, "original_length": 64}
    assert all(math.isfinite(frequency) for frequency in rope(8, 1e4, fields).scaled_frequencies(1).inv_freq)


def test_only_scalings_that_read_the_length_depend_on_it() -> None:
    """Exactly True or False: a state then does or does not need a cache length."""
    assert parse_config(NtkConfig, {"factor": 2.0}).length_dependent is False
    assert parse_config(NtkConfig, {"factor": 2.0, "original_length": 8}).length_dependent is True
    fields = {"short_factor": [1.0], "long_factor": [2.0], "original_length": 8, "factor": 1.0}
    longrope = parse_config(LongropeConfig, fields)
    assert longrope.length_dependent is True
    assert longrope.scale_frequencies(2, 10000.0, 4, torch.float64).attention_factor == 1.0
    linear = parse_config(LinearConfig, {"factor": 2.0})
    assert linear.length_dependent is False
