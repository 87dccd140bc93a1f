"""Mamba-2 against a loop of the paper's formulas in float64; initialization and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import heddle
from heddle.config import DesignError, parse_config
from heddle.model.config import ModelConfig
from heddle.numerics.recurrent.ssd import _chunked, state_space_duality
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.mamba2 import Mamba2, Mamba2Config
from heddle.parts.modules.recurrent import GatedDecay
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, design, layer
from tests.laws.planting import Plant, calls, condition, operand_dropped, result, wrapped
from tests.parity.recurrence import WIDTH, compare_with_loop, inputs, loop_convolution, projected, randomize

EPS = 1e-4
PLAIN: Data = {"heads": 6, "state_size": 5}
SHARED: Data = {"heads": 4, "state_size": 7, "groups": 2, "conv_kernel": 2, "conv_bias": False, "bias": True}
LIMITED: Data = {"heads": 6, "state_size": 3, "groups": 3, "time_step_limit": [0.3, 0.6]}
BEFORE: Data = SHARED | {"gated_norm": "before", "multipliers": [0.7, 1.2, 0.6, 1.4, 0.9]}
UNNORMED: Data = PLAIN | {"gated_norm": "none", "multipliers": [1.2, 0.8, 1.3, 0.7, 1.1]}
SIZES = [PLAIN, SHARED, LIMITED, BEFORE, UNNORMED]


def ours(sizes: Data) -> Mamba2:
    norm = {} if sizes.get("gated_norm") == "none" else {"norm": {"kind": "rms", "eps": EPS}}
    config = parse_config(Mamba2Config, sizes | norm)
    mixer = config.build(BuildContext(WIDTH, RMSConfig(offset=1.0))).double().eval()
    randomize(mixer)
    return mixer


def loop(mixer: Any, x: Tensor) -> Tensor:
    """One document x [T, WIDTH], one head and one token at a time. Named as in the paper: C, B and x are q, k and v."""
    factors = dict(zip(("gate", "v", "k", "q", "a"), mixer.multipliers or [1.0] * 5, strict=True))
    z, a = (projected(mixer, name, x) * factors[name] for name in ("gate", "a"))
    widths = [len(mixer.get_parameter(f"{name}.weight")) for name in "vkq"]
    xs, bs, cs = loop_convolution(
        mixer, torch.cat([projected(mixer, name, x) * factors[name] for name in "vkq"], 1)
    ).split(widths, 1)
    p, n = widths[0] // mixer.heads, widths[1] // mixer.groups
    gated = torch.zeros_like(z)
    for head in range(mixer.heads):
        group = head // (mixer.heads // mixer.groups)
        h = torch.zeros(p, n, dtype=x.dtype)
        for t in range(len(x)):
            delta = torch.log1p(torch.exp(a[t, head] + mixer.decay.bias[head]))
            if mixer.decay.limits is not None:
                delta = min(max(delta, mixer.decay.limits[0]), mixer.decay.limits[1])
            x_t = xs[t, head * p : (head + 1) * p]
            h = torch.exp(-torch.exp(mixer.decay.rate[head]) * delta) * h
            h = h + delta * torch.outer(x_t, bs[t, group * n : (group + 1) * n])
            y = h @ cs[t, group * n : (group + 1) * n] + mixer.skip[head] * x_t
            gated[t, head * p : (head + 1) * p] = y
    silu = z / (1 + torch.exp(-z))
    if mixer.gated_norm == "none":
        return projected(mixer, "out", gated * silu)
    if mixer.gated_norm == "after":
        gated = gated * silu
    normed = []
    for part, weight in zip(gated.chunk(mixer.groups, 1), mixer.norm.weight.view(mixer.groups, -1), strict=True):
        normed.append(weight * part / (part.pow(2).mean(1, keepdim=True) + EPS).sqrt())
    return projected(mixer, "out", torch.cat(normed, 1) * (silu if mixer.gated_norm == "before" else 1.0))


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_values_equal_a_loop_of_the_paper(sizes: Data) -> None:
    compare_with_loop(ours(sizes), loop)


def inputs_with(kernel: Any, change: Callable[[Any], dict[str, Any]]) -> Plant:
    return wrapped(kernel, lambda run, inputs, state: run(inputs._replace(**change(inputs)), state))


BUGS = {
    "the decay's sign": result(GatedDecay.forward, lambda pair: (-pair[0], pair[1])),
    "a rate that is no logarithm": calls(GatedDecay.forward, "exp", lambda rate: rate.abs()),
    "k and v without Δ": inputs_with(_chunked, lambda inputs: {"time_step": torch.ones_like(inputs.time_step)}),
    "no skip": inputs_with(state_space_duality, lambda inputs: {"skip": 0 * inputs.skip}),
    "B and C exchanged": calls(Mamba2._scan, "SSDInputs", lambda make, q, k, *rest: make(k, q, *rest)),
    "no gate before the norm": operand_dropped(Mamba2.forward, "silu"),
}


@pytest.mark.parametrize("bug", BUGS)
@torch.no_grad()
def test_a_planted_bug_is_caught_by_the_loop(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_loop(ours(SHARED), loop)


@pytest.mark.parametrize(
    "plant",
    [
        calls(
            Mamba2.forward,
            "zip",
            lambda _, x, multipliers, strict: zip((x[0], x[1], x[3], x[2], x[4]), multipliers, strict=strict),
        ),
        condition(Mamba2.forward, "gated_norm", False, nth=0),
    ],
    ids=["multipliers exchanged", "no norm before the gate"],
)
@torch.no_grad()
def test_a_planted_bug_of_options_is_caught_by_the_loop(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_loop(ours(BEFORE), loop)


@pytest.mark.parametrize("sizes", [PLAIN, SHARED])
@torch.no_grad()
def test_huge_inputs_stay_exact_in_float32(sizes: Data) -> None:
    """Before the norm an output grows with the fifth power of the input: its square would overflow."""
    mixer, x = ours(sizes), 1e5 * inputs(1)
    want = mixer(x, Layout.causal(*x.shape[:2]))[0]
    got = mixer.float()(x.float(), Layout.causal(*x.shape[:2]))[0]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


def test_initial_decays_time_steps_and_skips_are_those_of_the_paper() -> None:
    mixer = heddle.build(parse_config(ModelConfig, design(layer({"kind": "mamba2", "heads": 512}), width=512))).layers[
        0
    ]
    parameters = {name.removeprefix("mixer."): value.detach() for name, value in mixer.named_parameters()}
    rate, step = parameters["decay.rate"].exp(), functional.softplus(parameters["decay.bias"])
    assert 1.0 <= float(rate.min()) < 1.1 < 15.9 < float(rate.max()) <= 16.01
    assert 0.00099 < float(step.min()) < 0.00103 < 0.097 < float(step.max()) < 0.101
    assert parameters["skip"].eq(1).all()
    assert parameters["convolution.bias"].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_has_a_fixed_size_and_at_least_float32(dtype: torch.dtype) -> None:
    model = heddle.build(parse_config(ModelConfig, design(layer({"kind": "mamba2", **SHARED}))), dtype=dtype)
    item_size = torch.finfo(dtype).bits // 8
    for cache_length in (None, 5000):
        assert model.init_state(2, cache_length).layer_bytes == [2 * (4 * 7 * 12 * 4 + 1 * (48 + 28) * item_size)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 6, "groups": 4}, "groups: 4"),
        ({"heads": 5}, r"heads: 5.*48.*head_dim"),
        ({"heads": 6, "time_step_limit": [0.2, 0.1]}, r"time_step_limit: \[0.2, 0.1\]"),
        ({"heads": 6, "time_step_limit": [0.2]}, r"time_step_limit: \[0.2\]"),
        ({"heads": 6, "time_step_limit": [-0.1, 0.2]}, r"time_step_limit\[0\]:"),
        ({"heads": 6, "multipliers": [1.0, 2.0]}, r"multipliers: \[1.0, 2.0\]"),
        ({"heads": 6, "gated_norm": "none", "norm": {"kind": "rms"}}, r"norm:.*gated_norm"),
        ({"heads": 6, "conv_kernel": 0}, r"conv_kernel:.*0"),
    ],
)
def test_invalid_fields_raise(fields: Data, message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "mamba2", **fields}))))
