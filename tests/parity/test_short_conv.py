"""The gated short convolution against a loop of the formula in float64; its state and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import DesignError, parse_config
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.mixers.short_conv import ShortConv, ShortConvConfig
from heddle.parts.modules.short_convolution import ShortConvolution
from heddle.parts.norms.rms import RMSConfig
from tests.cases import Data, design, layer
from tests.laws.planting import calls, condition
from tests.parity.recurrence import WIDTH, compare_with_loop, projected, randomize

SIZES: list[Data] = [{}, {"conv_kernel": 4, "conv_bias": True, "bias": True}, {"conv_kernel": 1}]


def ours(sizes: Data) -> ShortConv:
    mixer = parse_config(ShortConvConfig, sizes).build(BuildContext(WIDTH, RMSConfig())).double().eval()
    randomize(mixer)
    return mixer


def loop(mixer: Any, x: Tensor) -> Tensor:
    """One document x [T, WIDTH], one token at a time."""
    q, k, v = (projected(mixer, name, x) for name in "qkv")
    weight, rows = mixer.convolution.weight, []
    for t in range(len(x)):
        total = torch.zeros(WIDTH, dtype=x.dtype) if mixer.convolution.bias is None else mixer.convolution.bias
        for back in range(min(t + 1, weight.shape[1])):
            total = total + weight[:, -1 - back] * k[t - back] * v[t - back]
        rows.append(q[t] * total)
    return projected(mixer, "out", torch.stack(rows))


@pytest.mark.parametrize("sizes", SIZES)
@torch.no_grad()
def test_values_equal_a_loop_of_the_formula(sizes: Data) -> None:
    compare_with_loop(ours(sizes), loop)


BUGS = {
    "no gate after the convolution": calls(ShortConv.forward, "at_least_float32", lambda _, q: torch.ones_like(q)),
    "no gate before it": calls(ShortConv.forward, "_convolve", lambda mixer, kv, *rest, v: mixer._convolve(v, *rest)),
    "silu": condition(ShortConvolution.forward, "silu", True),
}


@pytest.mark.parametrize("bug", BUGS)
@torch.no_grad()
def test_a_planted_bug_is_caught_by_the_loop(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_loop(ours(SIZES[0]), loop)


def test_the_state_is_the_last_tokens_alone() -> None:
    model = heddle.build(parse_config(ModelConfig, design(layer({"kind": "short_conv", "conv_kernel": 4}))))
    for cache_length in (None, 5000):
        assert model.init_state(2, cache_length).layer_bytes == [2 * 3 * model.config.width * 4]


def test_a_kernel_of_nothing_is_refused() -> None:
    with pytest.raises(DesignError, match=r"conv_kernel:.*0"):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "short_conv", "conv_kernel": 0}))))
