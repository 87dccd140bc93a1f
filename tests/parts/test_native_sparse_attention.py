"""Native sparse attention against a loop of its formulas in float64: a query, a head and a block at a time."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import DesignError, parse_config
from heddle.model.config import ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.mixers.native_sparse_attention import NativeSparseAttention, NativeSparseAttentionConfig
from heddle.parts.modules.blocks import block_tokens, extend_blocks
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions.rope import RopeConfig
from tests.cases import Data, case, design, layer
from tests.laws.bugs import Bug, assert_caught, check_without_bugs, each
from tests.laws.planting import Plant, calls, operand_dropped, reads
from tests.parts.loops import Errors, assert_none, mixer_errors, rotated, sigmoid, with_large_weights

WIDTH = 12


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query, and its weights."""
    weights = torch.stack([q @ k * scale for k in keys]).exp()
    weights = weights / weights.sum()
    return torch.stack([w * v for w, v in zip(weights, values, strict=True)]).sum(0), weights


def loop(x: Tensor, mixer: Any) -> Tensor:
    """One document x [T, WIDTH]."""
    get, size, rows = mixer.get_parameter, mixer.heads // mixer.kv_heads, []
    choice, block = mixer.selector.choice, mixer.block

    def heads(name: str, number: int, turned: bool = True) -> list[list[Tensor]]:
        projected = [list((get(f"{name}.weight") @ token).chunk(number)) for token in x]
        turned = turned and mixer.position is not None
        return [[rotated(h, t) for h in row] if turned else row for t, row in enumerate(projected)]

    q, k, v = heads("q", mixer.heads), heads("k", mixer.kv_heads), heads("v", mixer.kv_heads, turned=False)
    gates = [sigmoid(get("gate.weight") @ token).view(mixer.heads, 3) for token in x]
    for t in range(len(x)):
        outputs: list[Tensor] = []
        for g in range(mixer.kv_heads):
            whole = [range(b * block, (b + 1) * block) for b in range((t + 1) // block)]
            mean_k, mean_v = ([torch.stack([each[s][g] for s in b]).mean(0) for b in whole] for each in (k, v))
            score, members = [0.0] * (t // block + 1), range(g * size, (g + 1) * size)
            compressed = [torch.zeros_like(v[0][0]) for _ in members]
            for number, h in enumerate(members) if whole else ():
                compressed[number], weights = attended(q[t][h], mean_k, mean_v, mixer.scale)
                for b, weight in enumerate(weights.tolist()):
                    score[b] += weight / size

            def rank(b: int, score: list[float] = score, own: int = t // block) -> tuple[bool, float, int]:
                return own - b >= choice.local and b >= choice.first, -score[b], b

            chosen = sorted(range(len(score)), key=rank)[: choice.top_k]
            selected = [s for s in range(t + 1) if s // block in chosen]
            near = range(max(0, t + 1 - mixer.local), t + 1)
            for number, h in enumerate(members):
                branches = [compressed[number]]
                for seen in (selected, near):
                    keys, values = ([each[s][g] for s in seen] for each in (k, v))
                    branches.append(attended(q[t][h], keys, values, mixer.scale)[0])
                outputs.append(sum((w * y for w, y in zip(gates[t][h], branches, strict=True)), start=0 * branches[0]))
        rows.append(get("out.weight") @ torch.cat(outputs))
    return torch.stack(rows)


def built(draw: random.Random) -> NativeSparseAttention:
    """A random mixer in float64 with large parameters."""
    kv_heads, top_k = draw.choice((1, 2, 3)), draw.randint(2, 4)
    local = draw.randint(0, top_k - 1)
    config = NativeSparseAttentionConfig(
        heads=kv_heads * draw.choice((1, 2)),
        kv_heads=kv_heads,
        head_dim=draw.choice((2, 4)),
        value_dim=draw.choice((None, 3)),
        block=draw.randint(2, 4),
        top_k=top_k,
        local=local,
        first=draw.randint(0, top_k - 1 - local),
        window=draw.randint(1, 6),
        scale=draw.choice((None, 0.4)),
        position=draw.choice((None, RopeConfig())),
    )
    return with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)


def largest_errors(seed: int) -> Errors:
    """For two packed documents."""
    draw = random.Random(seed)
    return mixer_errors(built(draw), loop, WIDTH, [draw.randint(1, 5), draw.randint(7, 11)], draw)


def test_values_and_gradients_are_those_of_the_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "sums in the place of means": calls(NativeSparseAttention._means, "mean", lambda keys, dim: keys.sum(dim)),
    "the tokens before a block": reads(block_tokens, "places", lambda places: places - 1),
    "gates that are not bounded": calls(NativeSparseAttention.forward, "sigmoid", lambda gates: gates),
    "the order of the gates": reads(NativeSparseAttention.forward, "branches", lambda branches: branches[::-1], 0),
    "a selection by logits that are not scaled": operand_dropped(NativeSparseAttention._attend, "scale"),
    "a window of all keys": reads(NativeSparseAttention._attend, "windowed", lambda mask, *, selected: selected),
    "all keys in the place of the selected": reads(NativeSparseAttention._attend, "selected", lambda _, *, mask: mask),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_another_attention(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(40))


def test_one_block_for_all_and_a_wide_window_are_dense_attention_three_times() -> None:
    """Where all blocks are selected and none has ended, the two other branches are plain attention."""
    fields = {"heads": 2, "block": 20, "window": 20, "top_k": 2, "local": 1, "first": 0}
    mixer: Any = parse_config(NativeSparseAttentionConfig, fields).build(BuildContext(WIDTH, RMSConfig()))
    with_large_weights(mixer, random.Random(0))
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = (each.unflatten(-1, (2, 6)).transpose(1, 2) for each in (mixer.q(x), mixer.k(x), mixer.v(x)))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gates = mixer.gate(x).sigmoid().unflatten(-1, (2, 3))[..., 1:].sum(-1)
    expected = mixer.out((dense.transpose(1, 2) * gates[..., None]).flatten(2))
    torch.testing.assert_close(mixer(x, heddle.Layout.causal(1, 9))[0], expected, rtol=0, atol=1e-12)


def test_the_state_has_every_token_every_finished_block_and_a_tail() -> None:
    model = heddle.build(case("nsa-own-widths"), dtype=torch.float32)
    per_token = 3 * (5 + 4) * 4
    of_mixer = per_token * (30 + 10 + 2)
    convolution = 3 * 24 * 4  # of the layer's input
    assert model.init_state(1, 30).layer_bytes[0] == of_mixer + convolution


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 5, "head_dim": 4, "kv_heads": 2}, r"kv_heads: 2 does not divide heads = 5"),
        ({"heads": 4, "top_k": 3}, "top_k: 3 leaves none to select beside local = 2 and first = 1; give at least 4"),
        (
            {"heads": 4, "top_k": 1, "local": 0},
            "top_k: 1 leaves none to select beside local = 0 and first = 1; give at least 2",
        ),
        ({"heads": 4, "block": 1}, r"block:.*1"),
    ],
)
def test_invalid_fields_raise(fields: Data, message: str) -> None:
    with pytest.raises(DesignError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "nsa", **fields}))))


BUGS = [
    Bug(
        "a window that a single step does not have",
        "chunked_decoding",
        "nsa",
        calls(NativeSparseAttention._attend, "replace", lambda _, mask, **changed: mask),
    ),
    Bug(
        "means of blocks that are not finished",
        "causality",
        "nsa-own-widths",
        reads(NativeSparseAttention._attend, "entries", lambda mask: replace(mask, causal=False), 0),
    ),
    Bug(
        "tails of blocks forgotten between calls",
        "chunked_decoding",
        "nsa-own-widths",
        calls(extend_blocks, "cat", lambda torch, pair, dim: torch.cat((0 * pair[0], pair[1]), dim)),
    ),
    Bug(
        "means of blocks that padding cuts",
        "padding_invariance",
        "nsa",
        reads(extend_blocks, "order", lambda _: None, 0),
    ),
]


@each(BUGS)
def test_laws_catch_it(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(bug, monkeypatch)


@pytest.mark.nightly
def test_laws_hold_without_them() -> None:
    check_without_bugs(BUGS)
