"""Forgetting attention against the paper's plain loop: layouts, states, sizes, and what is refused."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.numerics.attention.mask import TokenBias
from heddle.parts.build import BuildContext
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.norms.rms import RMSConfig
from tests.cases import alone
from tests.laws.planting import Plant, calls, reads
from tests.parts.loops import assert_none, mixer_errors, rotated, sigmoid, with_large_weights

WIDTH = 10


def loop(x: Tensor, mixer: Any) -> Tensor:
    """One document x [T, width] -> [T, width], a head and a token at a time (arXiv 2503.02130, equation 4).

    The weight of key s for query t is the product of the gates of the tokens s + 1 … t, times exp(q · k / √d).
    """
    size, d, d_v = mixer.heads // mixer.kv_heads, mixer.head_dim, mixer.value_dim
    gates, rows = sigmoid(x @ mixer.forget.weight.T + mixer.forget.bias), []
    for t in range(len(x)):
        heads = []
        for h in range(mixer.heads):
            key, value = (slice(h // size * n, (h // size + 1) * n) for n in (d, d_v))

            def turned(y: Tensor, position: int) -> Tensor:
                return y if mixer.position is None else rotated(y, position)

            q = turned(mixer.q.weight[h * d : (h + 1) * d] @ x[t], t)
            total, mean = x.new_zeros(()), x.new_zeros(d_v)
            if mixer.sink is not None:
                total = total + mixer.sink[h].exp()
            for s in range(0 if mixer.window is None else max(0, t + 1 - mixer.window), t + 1):
                score = q @ turned(mixer.k.weight[key] @ x[s], s) / math.sqrt(d)
                if mixer.softcap is not None:
                    score = mixer.softcap * torch.tanh(score / mixer.softcap)
                weight = gates[s + 1 : t + 1, h].prod() * score.exp()
                total, mean = total + weight, mean + weight * (mixer.v.weight[value] @ x[s])
            heads.append(mean / total)
        rows.append(mixer.out.weight @ torch.cat(heads))
    return torch.stack(rows)


def built(draw: random.Random) -> Attention:
    """A random mixer in float64 with large parameters."""
    groups = draw.choice((1, 2))
    config = parse_config(
        AttentionConfig,
        {
            "heads": groups * draw.choice((1, 2, 3)), "kv_heads": groups, "forget": True,
            "head_dim": draw.choice((2, 4)), "value_dim": draw.randint(1, 4), "window": draw.choice((None, 2, 4)),
            "sink": draw.random() < 0.3, "softcap": draw.choice((None, None, 1.5)),
            "position": draw.choice((None, {"kind": "rope"})),
        },
    )  # fmt: skip
    return with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)


def largest_errors(seed: int) -> tuple[float, float]:
    """Of the outputs, with and without a state, and of the gradients, for two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(draw), loop, WIDTH, [draw.randint(2, 5), draw.randint(2, 6)], draw)


def test_forgetting_is_the_papers_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG = {
    "the key's own gate in the place of the query's": calls(
        TokenBias.__call__, "pad", lambda functional, x, _: functional.pad(x, (1, 0))
    ),
    "gates of other documents": calls(TokenBias.__call__, "materialize", lambda mask: mask.k_positions[:, None] >= 0),
    "slots of a ring buffer as if in order": reads(TokenBias.__call__, "ordered", lambda _: True),
    "gates that are not sigmoids": calls(Attention._token_bias, "logsigmoid", lambda _, x: x),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_wrong_gates(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant: Plant = WRONG[bug]
    plant(monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(12))


def test_gates_are_counted_in_at_least_float32() -> None:
    """One number per token and query head, whatever the dtype of the model; half of the attention decays at first."""
    plain, forgetting = (parse_config(ModelConfig, alone(heads=6, kv_heads=2, **fields)) for fields in ({}, ON))
    sizes = [heddle.size(config, 20, dtype=torch.bfloat16) for config in (plain, forgetting)]
    assert sizes[1].parameters - sizes[0].parameters == 2 * 6 * (24 + 1)
    assert sizes[1].flops_per_token - sizes[0].flops_per_token == 2 * 2 * 6 * 24
    assert sizes[1].state_bytes - sizes[0].state_bytes == 2 * 20 * 6 * 4
    state = heddle.build(forgetting).bfloat16().init_state(3, 20)
    assert state.tensors()["layers.0.log_forget.keys"].dtype == torch.float32


ON = {"forget": True}
RELATIVE = {"relative_dim": 3, "relative_extent": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (ON | {"causal": False}, "forget: is about earlier tokens"),
        (ON | {"window": 1}, "forget: changes nothing in a window of one token"),
        (ON | {"shared_kv": True}, "forget: keeps a gate of each token"),
        (RELATIVE | {"causal": False}, "relative_dim: is about earlier tokens"),
        (RELATIVE | {"window": 1}, "relative_dim: changes nothing in a window of one token"),
        ({"relative_dim": 3}, "relative_extent: is missing"),
        ({"relative_extent": 3}, "relative_dim: is missing"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(ModelConfig, alone(**fields))
