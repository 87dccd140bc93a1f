"""Differential attention against the paper's plain loops."""

import ast
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.differential_attention import DifferentialAttention
from heddle.parts.norms.rms import RMSConfig
from tests.cases import ROPE, design, differential, layer
from tests.laws.planting import calls, operand_dropped, operator, reads, wrapped
from tests.parts.loops import rotated

WIDTH, HEADS, GROUPS, DIM, LENGTH, EPS = 48, 4, 2, 6, 13, 1e-5
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def part(layer_index: int, **fields: Any) -> Any:
    """The mixer in float64 with large random parameters."""
    slot: Any = MixerConfig
    context = BuildContext(WIDTH, RMSConfig(eps=EPS), depth=8, layer_index=layer_index)
    mixer = parse_config(slot, differential(HEADS, **{"kv_heads": GROUPS, **fields})).build(context).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    return mixer


def loops(mixer: Any, x: Tensor, layer_number: int, window: int) -> Tensor:
    """The paper's equations 1 to 3 for one head and one query at a time; layers are counted from 1."""
    weights = {name: value.detach() for name, value in mixer.named_parameters()}
    initial = 0.8 - 0.6 * math.exp(-0.3 * (layer_number - 1))
    q1, k1, q2, k2 = (weights[name] for name in LAMBDAS)
    lam = math.exp(float(q1 @ k1)) - math.exp(float(q2 @ k2)) + initial
    width = mixer.value_dim
    heads = []
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        queries = [x @ weights["q.weight"][(2 * h + i) * DIM : (2 * h + i + 1) * DIM].T for i in range(2)]
        keys = [x @ weights["k.weight"][(2 * g + i) * DIM : (2 * g + i + 1) * DIM].T for i in range(2)]
        values = x @ weights["v.weight"][g * width : (g + 1) * width].T
        y = torch.zeros(len(x), width, dtype=x.dtype)
        for t in range(len(x)):
            seen = range(max(0, t - window + 1), t + 1)
            maps = []
            for query, key in zip(queries, keys, strict=True):
                scores = [float(rotated(query[t], t) @ rotated(key[s], s)) / math.sqrt(DIM) for s in seen]
                total = math.fsum(math.exp(score) for score in scores)
                maps.append([math.exp(score) / total for score in scores])
            for s, first, second in zip(seen, *maps, strict=True):
                y[t] += (first - lam * second) * values[s]
        norm = y / torch.sqrt((y * y).mean(-1, keepdim=True) + EPS) * weights["norm.weight"]
        heads.append((1 - initial) * norm)
    return torch.cat(heads, dim=-1) @ weights["out.weight"].T


def loop_error(**fields: Any) -> float:
    """The largest difference in the fourth layer."""
    mixer = part(3, **fields)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        got, _ = mixer(x[None], Layout.causal(1, LENGTH))
        return float((got[0] - loops(mixer, x, 4, fields.get("window", LENGTH))).abs().max())


@pytest.mark.parametrize("fields", [{}, {"window": 4}, {"value_dim": 5}, {"position": ROPE, "head_dim": DIM}])
def test_the_mixer_equals_plain_loops(fields: dict[str, Any]) -> None:
    assert loop_error(**fields) < 1e-10


BUGS = {
    "λ with the wrong sign": operator(DifferentialAttention.forward, ast.Sub, ast.Add, nth=0),
    "both terms of λ exchanged": wrapped(
        DifferentialAttention._lambda, lambda value, mixer: 2 * mixer.lambda_init - value(mixer)
    ),
    "layers counted from 1": reads(DifferentialAttention.__init__, "layer_index", lambda index: index + 1),
    "the same λ_init in all layers": reads(DifferentialAttention.__init__, "layer_index", lambda index: 0),
    "an output that is not multiplied by 1 − λ_init": operand_dropped(
        DifferentialAttention.forward, "lambda_init", nth=1
    ),
    "a norm of all heads together": calls(
        DifferentialAttention.forward,
        "norm",
        lambda mixer, y: mixer.norm(y.transpose(2, 3).contiguous().view(y.shape)),
    ),
    "queries of neighboring heads paired": calls(
        DifferentialAttention._pairs,
        "cat",
        lambda torch, pair, dim: torch.cat((pair[0], pair[1].roll(1, 1)), dim=dim),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert loop_error() > 1e-2


def test_maps_of_both_softmaxes_are_observed() -> None:
    model = model_under_test(parse_config(ModelConfig, design(layer(differential(kv_heads=1), repeat=2))))
    for weights in heddle.attention_weights(model, random_tokens(model.config, 2, 7)):
        assert weights is not None
        assert weights.shape == (2, 6, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 7, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_width_that_the_queries_do_not_divide() -> None:
    sentence = r"^layers\[0\]\.mixer\.heads:.*24.*head_dim"
    with pytest.raises(ConfigError, match=sentence):
        heddle.build(parse_config(ModelConfig, design(layer(differential(5)))), device="meta")
