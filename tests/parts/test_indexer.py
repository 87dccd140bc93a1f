"""Sparse attention by an indexer: a plain loop, its loss, ties, states, sizes, and what is refused."""

import ast
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.data.samples import Batch
from heddle.exchange.transformers import HeddleForCausalLM
from heddle.laws.harness import forward_in_chunks, model_under_test, normal_tensor, random_tokens
from heddle.laws.shrink import shrink
from heddle.model.config import ModelConfig, describe
from heddle.numerics.attention.indexer import (
    Choice,
    _block_scores,
    _selected,
    blocks_of,
    index_loss,
    index_scores,
    select_keys,
    show_blocks,
)
from heddle.numerics.attention.mask import AttentionMask, visible_pairs
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.modules.blocks import finished_blocks
from heddle.parts.modules.indexer import Indexer
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec
from heddle.training.step import accumulate_gradients
from tests.cases import MOBA, Data, alone, attention, by_day, design, indexer, latent, layer
from tests.laws.planting import calls, operator, reads
from tests.parts.loops import rotated, with_large_weights

WIDTH = 12
INDEXED = alone(kv_heads=2, indexer=indexer())


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm of one vector."""
    centered = x - x.mean()
    return centered / (centered.square().mean() + 1e-6).sqrt() * gain + bias


def normed(inner: Any, get: Any, name: str, x: Tensor) -> Tensor:
    """The indexer's norm of one vector: LayerNorm, or RMSNorm with an offset of 1."""
    gain = get(f"indexer.{name}")
    if inner.norm is None:
        return layer_norm(x, gain, get(f"indexer.{name}", "bias"))
    return (1.0 + gain) * x / (x.square().mean() + inner.norm.eps).sqrt()


def pooled_by_loop(
    inner: Any, get: Any, x: Tensor, keys: list[Tensor], number: list[int], seen: list[list[int]]
) -> list[Tensor]:
    """The key of each token's block, if the document has all of it; else zeros. number: of each token's block."""
    found = [0.0 * key for key in keys]
    for s in range(len(x)):
        for last in range(s, len(x)):
            block = [each for each in seen[last] if number[each] == number[s]]
            if len(block) < inner.block or s not in block:
                continue
            if inner.pool == "mean":
                found[s] = normed(inner, get, "k_norm", sum((keys[j] for j in block), 0.0 * keys[0]) / inner.block)
                continue
            gates = torch.stack([get("indexer.pool_gates") @ x[j] for j in block]) + get("indexer.pool_bias", None)
            normed_keys = torch.stack([normed(inner, get, "k_norm", keys[j]) for j in block])
            found[s] = (gates.exp() / gates.exp().sum(0) * normed_keys).sum(0)
    return found


def attention_scores_by_loop(
    config: Any, position: list[int], seen: list[list[int]], attended: tuple[list[list[Tensor]], list[list[Tensor]]]
) -> list[list[list[Tensor]]]:
    """For each key head: the weight of each key's block in a softmax over whole blocks, the mean over its heads."""
    (q, k), block, size = attended, config.indexer.block, config.heads // config.kv_heads
    found = [[[q[0][0].new_zeros(()) for _ in seen] for _ in seen] for _ in range(config.kv_heads)]
    for t, keys in enumerate(seen):
        blocks: dict[int, list[int]] = {}
        for s in keys:
            blocks.setdefault(position[s] // block, []).append(s)
        whole = [members for members in blocks.values() if len(members) == block]
        for h in range(config.heads if whole else 0):
            means = [torch.stack([k[s][h // size] for s in members]).mean(0) for members in whole]
            weights = torch.stack([q[t][h] @ mean * config.scale for mean in means]).exp()
            for members, weight in zip(whole, weights / weights.sum(), strict=True):
                for s in members:
                    found[h // size][t][s] = found[h // size][t][s] + weight / size
    return found


def scores_by_loop(
    config: Any,
    get: Any,
    x: Tensor,
    position: list[int],
    seen: list[list[int]],
    attended: tuple[list[list[Tensor]], list[list[Tensor]]],
) -> list[list[list[Tensor]]]:
    """The score of each selection, query and key, a head and a key at a time. attended: q and k of the attention."""
    inner, tokens = config.indexer, range(len(x))
    heads, d = inner.heads, inner.head_dim
    if heads is None and inner.block_score == "attention":
        return attention_scores_by_loop(config, position, seen, attended)
    if heads is None:
        q, k = attended
        return [
            [[q[t][h] @ k[s][h * config.kv_heads // config.heads] for s in tokens] for t in tokens]
            for h in range(config.heads)
        ]
    dims = 0 if config.position is None else config.position.rotary_dim or config.head_dim
    interleaved = inner.rope_layout == "interleaved"
    keys = [get("indexer.k") @ token for token in x]
    if inner.pool is None:
        keys = [rotated(normed(inner, get, "k_norm", k), position[s], dims, interleaved) for s, k in enumerate(keys)]
    else:
        pooled = pooled_by_loop(inner, get, x, keys, [position[s] // inner.block for s in tokens], seen)
        keys = [rotated(k, position[s] // inner.block * inner.block, dims, interleaved) for s, k in enumerate(pooled)]
    selections = [[[x.new_zeros(()) for _ in tokens] for _ in tokens] for _ in range(heads if inner.per_head else 1)]
    for h in range(heads):
        for t in tokens:
            query = get("indexer.q")[h * d : (h + 1) * d] @ x[t]
            query = normed(inner, get, "q_norm", query) if inner.query_norm else query
            query = rotated(query, position[t], dims, interleaved)
            for s in tokens:
                if inner.per_head:
                    selections[h][t][s] = query @ keys[s] / math.sqrt(d)
                    continue
                weight = get("indexer.weights")[h] @ x[t] / math.sqrt(heads) if inner.head_weights else 1.0
                score = weight * (query @ keys[s]).clamp(min=0) / math.sqrt(d)
                selections[0][t][s] = selections[0][t][s] + score
    return selections


def chosen_by_loop(inner: Any, scores: list[Tensor], own: int, position: list[int], seen: list[int]) -> list[int]:
    """The keys of `seen` that are in the selected blocks. own: the position of the query."""
    blocks: dict[int, list[int]] = {}
    for s in seen:  # in order of positions
        blocks.setdefault(position[s] // inner.block, []).append(s)

    def rank(number: int) -> tuple[bool, float, int]:
        inside = [float(scores[s].detach()) for s in blocks[number]]
        score = max(inside) if inner.block_score == "highest" else sum(inside) / len(inside)
        return abs(own // inner.block - number) >= inner.local and number >= inner.first, -score, number

    scored = [number for number, keys in blocks.items() if inner.pool is None or len(keys) == inner.block]
    others = [number for number in blocks if number not in scored]
    return sorted(s for number in [*sorted(scored, key=rank)[: inner.top_k], *others] for s in blocks[number])


def taught_by_loop(inner: Any, position: list[int], keys: list[int]) -> list[list[int]]:
    """The groups of these keys that the loss is over: each key, or with pooled keys those of finished blocks."""
    blocks: dict[int, list[int]] = {}
    for s in keys:
        blocks.setdefault(position[s] // inner.block if inner.pool else s, []).append(s)
    return [block for block in blocks.values() if inner.pool is None or len(block) == inner.block]


def loop(mixer: Any, config: Any, x: Tensor, position: list[int], seen: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Outputs [T, width] of one row, and the loss of the indexer. seen: the visible keys of each query, in order."""
    parameters = dict(mixer.named_parameters())
    get = lambda name, kind="weight": parameters[name if kind is None else f"{name}.{kind}"]  # noqa: E731
    d, d_v, size = config.head_dim, config.value_dim, config.heads // config.kv_heads
    dims = 0 if config.position is None else config.position.rotary_dim or d

    def heads(name: str, count: int, width: int, rotates: bool) -> list[list[Tensor]]:
        return [
            [
                rotated(y, position[t], dims, False) if rotates and dims else y
                for y in (get(name) @ token).split([width] * count)
            ]
            for t, token in enumerate(x)
        ]

    q, k = heads("q", config.heads, d, True), heads("k", config.kv_heads, d, True)
    v, outputs, loss = heads("v", config.kv_heads, d_v, False), [], x.new_zeros(())
    selections = scores_by_loop(config, get, x.detach(), position, seen, (q, k))
    share = config.heads // len(selections)
    for t in range(len(x)):
        parts = []
        for number, scores in enumerate(selections):
            chosen = chosen_by_loop(config.indexer, scores[t], position[t], position, seen[t])
            shown = seen[t] if config.indexer.loss_keys == "all" else chosen
            taught = taught_by_loop(config.indexer, position, shown)
            dense = x.new_zeros(len(taught))
            for h in range(number * share, (number + 1) * share):
                logits = {s: q[t][h] @ k[s][h // size] / math.sqrt(d) for s in seen[t]}
                of_key = dict(zip(shown, torch.stack([logits[s] for s in shown]).detach().softmax(0), strict=True))
                dense = dense + dense.new_tensor([float(sum(of_key[s] for s in each)) for each in taught])
                weights = torch.stack([logits[s] for s in chosen]).softmax(0)
                parts.append(sum((w * v[s][h // size] for w, s in zip(weights, chosen, strict=True)), x.new_zeros(d_v)))
            if taught:
                dense = dense / dense.sum()
                index = torch.stack([scores[t][each[0]] for each in taught]).log_softmax(0)
                loss = loss + (dense * (dense.log() - index)).sum() / len(selections)
        outputs.append(get("out") @ torch.cat(parts))
    return torch.stack(outputs), config.indexer.loss * loss


def random_mixer(seed: int, blocks: str = "") -> tuple[Any, Any, Layout, list[int], list[list[int]]]:
    """A mixer, its config, a layout, and positions and visible keys of its tokens. blocks: what is selected."""
    draw = random.Random(seed)
    kv_heads, dim = draw.choice((1, 2)), draw.choice((2, 4, 6))
    position: Any = draw.choice((None, {"kind": "rope"}, {"kind": "rope", "rotary_dim": 2}))
    causal, window = draw.random() < 0.7, draw.choice((None, 4, 5))
    inner: Data = {"top_k": draw.randint(1, 3), "heads": draw.randint(1, 4), "head_dim": dim + draw.randint(0, 4)}
    inner["loss"] = draw.choice((1.0, 0.25))
    if position is not None:
        inner["rope_layout"] = draw.choice((None, "half", "interleaved"))
    heads = kv_heads * draw.choice((1, 2, 3))
    data: Data = {
        "kind": "attention", "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
        "value_dim": draw.randint(2, 5), "position": position, "causal": causal, "window": window, "indexer": inner,
    }  # fmt: skip
    if blocks:
        data["window"] = window = draw.choice((None, None, 7))
        inner |= {"block": draw.randint(2, 4), "block_score": draw.choice(("highest", "mean")), "top_k": 2}
        inner |= {"local": draw.choice((0, 1)), "loss_keys": draw.choice(("all", "selected"))}
        if blocks == "pooled":
            data |= {"window": None, "causal": True}
            causal, window = True, None
            inner |= {"block_score": "highest", "local": 0, "pool": draw.choice(("mean", "gated"))}
            inner |= {"top_k": draw.choice((1, 2)), "head_weights": draw.random() < 0.6}
        if draw.random() < 0.4 and inner.get("head_weights", True):
            inner |= {"per_head": True, "heads": draw.choice([n for n in (2, 3, 4, 6, 1) if heads % n == 0][:2])}
        if draw.random() < 0.3 and blocks != "pooled":
            inner = {name: inner[name] for name in ("top_k", "block", "block_score", "local")}
            data["indexer"] = inner
    if blocks == "attention":
        data["window"] = window = draw.choice((None, None, 9))
        inner = {"block": draw.randint(2, 3), "block_score": "attention", "first": draw.choice((0, 1))}
        data["indexer"] = inner | {"local": draw.choice((0, 1)) if causal else 0, "top_k": 3 if window is None else 2}
        data["indexer"]["first"] = min(inner["first"], data["indexer"]["top_k"] - data["indexer"]["local"] - 1)
    if data["indexer"].get("heads") and seed % 3 == 1:
        data["indexer"] |= {"query_norm": True} | ({"norm": {"kind": "rms", "offset": 1.0}} if seed % 2 else {})
    config: Any = parse_config(MixerConfig, data)  # type: ignore[type-abstract]
    mixer = config.build(BuildContext(WIDTH, RMSConfig())).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    lengths = [draw.randint(2, {"": 8, "blocks": 9}.get(blocks, 13)) for _ in range(draw.randint(1, 3))]
    layout = Layout.packed([lengths])
    positions = [p for length in lengths for p in range(length)]
    document = [number for number, length in enumerate(lengths) for _ in range(length)]

    def shows(t: int, s: int) -> bool:
        distance = positions[t] - positions[s]
        near = window is None or (distance < window if causal else abs(distance) <= window)
        return document[t] == document[s] and near and (not causal or distance >= 0)

    seen = [[s for s in range(len(positions)) if shows(t, s)] for t in range(len(positions))]
    return mixer.train(), config.resolved(BuildContext(WIDTH, RMSConfig())), layout, positions, seen


def largest_errors(seed: int, blocks: str = "") -> tuple[float, float, float]:
    """The largest differences of outputs, of the loss, and of all gradients, from those of the loop."""
    mixer, config, layout, positions, seen = random_mixer(seed, blocks)
    x = torch.randn(len(positions), WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x.requires_grad_()
    with record_router_statistics() as recorded:
        y = mixer(x[None], layout)[0][0]
    assert all(int(entry.tokens) == len(positions) for entry in recorded.index_losses)
    assert len(recorded.losses) == (config.indexer.heads is not None)
    want_y, want_loss = loop(mixer, config, x, positions, seen)
    loss = recorded.losses[0] if recorded.losses else want_loss
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = [x, *mixer.parameters()]
    got, want = (
        torch.autograd.grad((out * probe).sum() + (kl if recorded.losses else 0.0), inputs, materialize_grads=True)
        for out, kl in ((y, loss), (want_y, want_loss))
    )
    return (
        float((y - want_y).detach().abs().max()),
        abs(float((loss - want_loss).detach())),
        max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)),
    )


@pytest.mark.parametrize("blocks", ["", "blocks", "pooled", "attention"])
@pytest.mark.parametrize("seed", by_day(12, 48))
def test_attention_and_loss_are_those_of_a_plain_loop(seed: int, blocks: str) -> None:
    y, loss, gradient = largest_errors(seed, blocks)
    assert y < 1e-10
    assert loss < 1e-10
    assert gradient < 1e-9


def mixer_of(data: Data) -> Mixer:
    model = model_under_test(parse_config(ModelConfig, data))
    mixer = model.mixers()[0]
    assert mixer is not None
    return mixer.train()


@pytest.mark.parametrize("data", [INDEXED, design(layer(latent(query_rank=9, indexer=indexer())))])
def test_the_index_learns_from_its_loss_alone(data: Data) -> None:
    """The loss gives gradients to all of the indexer and to nothing else; the outputs give it none."""
    mixer = mixer_of(data)
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    with record_router_statistics() as recorded:
        y, _ = mixer(x, Layout.causal(2, 9))
    names = [name for name, _ in mixer.named_parameters()]
    inputs = [x, *mixer.parameters()]
    for value, taught in ((torch.stack(recorded.losses).sum(), True), (y.sin().sum(), False)):
        x_gradient, *gradients = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
        assert (x_gradient is None) == taught
        for name, gradient in zip(names, gradients, strict=True):
            assert (gradient is not None) == (name.startswith("indexer.") == taught), name
            assert gradient is None or float(gradient.abs().max()) > 0, name


def test_the_loss_is_zero_where_the_scores_are_the_attention() -> None:
    """One head whose logits are the index scores: relu(q·k) of positive q and k, weights of one."""
    q, k = (torch.rand(2, 1, 6, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (0, 1))
    mask = Layout.causal(2, 6).attention_mask(None, True)
    index = q, k, torch.full((2, 1, 6), 0.5, dtype=torch.float64)
    assert abs(float(index_loss(index, (q, k), mask, 0.5))) < 1e-12
    assert float(index_loss(index, (2 * q, k), mask, 0.5)) > 0.01


def test_padding_has_no_loss() -> None:
    mixer, x = mixer_of(INDEXED), torch.randn(2, 9, 24, dtype=torch.float64)
    layout = Layout.padded([9, 4], side="left")
    alone_losses = []
    for row, length in ((0, 9), (1, 4)):
        with record_router_statistics() as recorded:
            mixer(x[row : row + 1, 9 - length :], Layout.causal(1, length))
        alone_losses += recorded.losses
    x[1, :5] = 1e3
    with record_router_statistics() as recorded:
        mixer(x, layout)
    torch.testing.assert_close(sum(recorded.losses), sum(alone_losses), rtol=0, atol=1e-10)
    assert int(recorded.index_losses[0].tokens) == 13


# Ties


def mask_of(positions: Tensor) -> AttentionMask:
    """Queries at position 5 of keys at these positions [1, S]."""
    return AttentionMask(torch.full((1, 1), 5), positions, causal=True)


def test_of_equal_scores_the_lowest_positions_win() -> None:
    """In any order of the slots, and also where scores differ by rounding."""
    scores = torch.tensor([[[0.0, 0.5, -0.0, 0.0, 0.5 + 1e-13, -1.0]]], dtype=torch.float64)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4, 1, 0, 2], [2, 0, 3, 4, 5, 1]):
        positions = torch.tensor([order])
        mask = mask_of(positions)
        permuted = scores[..., order]
        for top_k, expected in ((1, {1}), (2, {1, 4}), (3, {0, 1, 4}), (4, {0, 1, 2, 4}), (5, {0, 1, 2, 3, 4})):
            q_positions = mask.q_positions
            taken = _selected(permuted[:, None], mask.materialize(), q_positions, blocks_of(mask, 1), Choice(top_k))
            assert set(positions[taken[:, 0, 0]].tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [[12], [5, 7], [1] * 12, [3, 1, 8]])
def test_equal_keys_tie_however_the_text_is_cut(dtype: torch.dtype, chunks: list[int]) -> None:
    """A text of two different tokens without positions: scores tie everywhere, and the first of each kind are seen."""
    data = design(layer(attention(position=None, indexer=indexer(top_k=2)), None))
    model = model_under_test(parse_config(ModelConfig, data)).to(dtype)
    tokens = torch.tensor([[3, 7, 3, 3, 7, 7, 3, 7, 3, 7, 7, 3]]).repeat(2, 1)
    with torch.no_grad():
        whole, (cut, _) = model(tokens)[0], forward_in_chunks(model, tokens, chunks, 12)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-10)


def test_long_calls_are_scored_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_under_test(parse_config(ModelConfig, INDEXED)).train()
    tokens, results = random_tokens(model.config, 2, 13), []
    for size in (2**22, 100):
        monkeypatch.setattr("heddle.numerics.attention.indexer.MAX_SCORES", SimpleNamespace(on=lambda _, s=size: s))
        with record_router_statistics() as recorded:
            hidden = model(tokens)[0]
        results.append((hidden, sum(recorded.losses)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_blocks_count_a_documents_own_tokens() -> None:
    """Padding on the left moves no block, nor do other documents in the row; a block of slots sees others."""
    data = alone(kv_heads=2, indexer=MOBA)
    model = model_under_test(parse_config(ModelConfig, data))
    tokens = random_tokens(model.config, 1, 11)
    with torch.no_grad():
        want = model(tokens)[0]
        padded = torch.cat((torch.zeros(1, 4, dtype=torch.int64), tokens), dim=1)
        left = model(padded, Layout.padded([11], 15, side="left"))[0][:, 4:]
        packed = model(torch.cat((tokens[:, :4], tokens), dim=1), Layout.packed([[4, 11]]))[0][:, 4:]
        slots = model(tokens, Layout.causal(1, 11, start=4))[0]  # rotations depend on differences alone
    torch.testing.assert_close(left, want, rtol=0, atol=1e-10)
    torch.testing.assert_close(packed, want, rtol=0, atol=1e-10)
    assert float((slots - want).abs().max()) > 1e-3


@pytest.mark.parametrize("score", ["highest", "mean"])
def test_of_equal_blocks_the_lowest_win_whole_or_cut(score: str) -> None:
    """A text of equal tokens without positions: every score is equal, and the first and the own block are seen."""
    inner = {"top_k": 2, "block": 3, "block_score": score, "local": 1}
    model = model_under_test(parse_config(ModelConfig, design(layer(attention(position=None, indexer=inner), None))))
    tokens = torch.full((1, 12), 3)
    weights = heddle.attention_weights(model, tokens)[0]
    assert weights is not None
    for t in range(12):
        assert {s // 3 for s in range(12) if weights[0, 0, t, s] > 0} == {0, t // 3}
    with torch.no_grad():
        whole, (cut, _) = model(tokens)[0], forward_in_chunks(model, tokens, [5, 1, 6], 12)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-10)


# States, sizes and names


PROJECTED = 2 * 8 + 8  # of two heads and a key


@pytest.mark.parametrize(
    ("inner", "projected", "score", "most", "index"),
    [
        (indexer(), PROJECTED + 2, 2 * 2 * (8 + 1), 3, [(2, 1, 20, 8)] * 2),
        (indexer(heads=2, head_dim=8, block=2, per_head=True), PROJECTED, 2 * 2 * 8, 6, [(2, 1, 20, 8)] * 2),
        (MOBA, 0, 2 * 4 * 6, 6, None),  # the attention's own keys
    ],
    ids=["keys", "heads without weights", "own keys"],
)
def test_states_parameters_and_flops(inner: Data, projected: int, score: int, most: int, index: Any) -> None:
    """projected: outputs of the indexer's projections. score: FLOPs of a pair. most: keys that a query sees."""
    dense, own = (
        heddle.build(parse_config(ModelConfig, alone(kv_heads=2, **each))) for each in ({}, {"indexer": inner})
    )
    state: Any = own.init_state(2, 20)
    keys = sum(math.prod(shape) for shape in index or ())
    assert state.bytes - dense.init_state(2, 20).bytes == 4 * keys
    if index is not None:
        assert [tuple(each.index.keys.shape) for each in state.layers] == index
    larger, smaller = (heddle.size(each.config, 20) for each in (own, dense))
    assert larger.state_bytes - smaller.state_bytes == 4 * keys // 2
    assert larger.parameters - smaller.parameters == 2 * (24 * projected + (2 * 8 if projected else 0))
    pairs = 20 * 21 // 2
    attended = 2 * 4 * 12 * (visible_pairs(20, 20, None, True, most) - pairs) / 20
    flops = 2 * 24 * projected + score * pairs / 20 + attended
    assert larger.flops_per_token - smaller.flops_per_token == pytest.approx(2 * flops)


@pytest.mark.parametrize("pool", ["mean", "gated"])
def test_pooled_keys_have_a_tail_and_flops_count_finished_blocks(pool: str) -> None:
    """A query at position t sees top_k of ⌊(t + 1) / 3⌋ finished blocks, and the (t + 1) mod 3 tokens after them."""
    inner, parts, block, top_k = indexer(block=3, top_k=2, pool=pool), 2 if pool == "gated" else 1, 3, 2
    dense, own = (parse_config(ModelConfig, alone(kv_heads=2, **each)) for each in ({}, {"indexer": inner}))
    for length, rollback in ((20, 0), (21, 0), (21, 4)):
        larger, smaller = (heddle.size(each, length, rollback=rollback) for each in (own, dense))
        index = -(-length // block) * 8 + (block - 1 + rollback) * parts * 8
        assert larger.state_bytes - smaller.state_bytes == 2 * 4 * index
        finished = [t // block for t in range(1, length + 1)]
        seen = [block * min(top_k, n) + t % block for t, n in enumerate(finished, 1)]
        assert seen[5:8] == [6, 7, 8]
        projections = 2 * 24 * (PROJECTED + 2 + 8 * (parts - 1)) * length
        scores = 2 * 2 * (8 + 1) * sum(finished)
        attended = 4 * 4 * 6 * (sum(seen) - length * (length + 1) // 2)
        flops = (larger.flops_per_token - smaller.flops_per_token) * length
        assert flops == pytest.approx(2 * (projections + scores + attended))
        norm_and_bias = 2 * 8 + (parts - 1) * block * 8
        assert larger.parameters - smaller.parameters == 2 * (projections // (2 * length) + norm_and_bias)


def offset_error(seed: int) -> float:
    """Of documents that begin within a block, packed, and with a state in pieces of 3 tokens, against each alone."""
    draw = random.Random(seed)
    inner = indexer(top_k=1, block=draw.choice((2, 3)), pool=draw.choice(("mean", "gated")))
    data = attention(kv_heads=2, head_dim=4, indexer=inner)
    config: Any = parse_config(MixerConfig, data)  # type: ignore[type-abstract]
    mixer = with_large_weights(config.build(BuildContext(WIDTH, RMSConfig())), draw)
    starts, lengths = (draw.randint(0, 7), draw.randint(0, 7)), (draw.randint(2, 9), draw.randint(8, 12))
    x = normal_tensor((1, sum(lengths), WIDTH), torch.Generator().manual_seed(seed))
    positions = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    layout = Layout.of(torch.cat(positions)[None], torch.arange(2).repeat_interleave(torch.tensor(lengths))[None])
    assert layout.segment_ids is not None
    state, table = mixer.init_state(StateSpec(1, None, torch.float64, "cpu")), PositionTable.empty(1, None, None, "cpu")
    pieces = []
    with torch.no_grad():
        alone = [mixer(each, Layout.of(at[None]))[0] for each, at in zip(x.split(lengths, 1), positions, strict=True)]
        whole = mixer(x, layout)[0]
        for token in range(0, x.shape[1], 3):
            part = slice(token, token + 3)
            table, piece = table.extend(Layout(layout.positions[:, part], layout.segment_ids[:, part]))
            y, state = mixer(x[:, part], piece, state)
            pieces.append(y)
    return max(float((y - torch.cat(alone, 1)).abs().max()) for y in (whole, torch.cat(pieces, 1)))


def test_documents_may_begin_within_a_pooled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a block that lacks some are seen, as those of the last one."""
    assert max(map(offset_error, range(8))) < 1e-10
    calls(finished_blocks, "gather", lambda segments, dim, slots: 0 * slots, nth=1)(monkeypatch)
    assert any(offset_error(seed) > 1e-3 for seed in range(8))


@pytest.mark.parametrize("window", [None, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 4, 9])
def test_pairs_are_those_of_a_count(window: int | None, most: int) -> None:
    for keys in range(1, 14):
        for queries in range(1, keys + 1):
            first, seen = keys - queries, keys if window is None else window
            causal = sum(min(most, seen, first + t + 1) for t in range(queries))
            assert visible_pairs(queries, keys, window, True, most) == causal
        both = [min(t, seen) + min(keys - 1 - t, seen) + 1 for t in range(keys)]
        if window is None or most <= 2 * window:
            assert visible_pairs(keys, keys, window, False, most) == sum(min(most, each) for each in both)


def test_a_training_step_counts_tokens_and_not_parts() -> None:
    """The loss of a step is a mean over tokens, however the batch is split."""
    tokens = np.random.default_rng(1).integers(1, 61, (4, 13))
    batch, results = Batch(tokens, ((12,), (5, 7), (1, 1, 10), (3, 9)), np.arange(4)), []
    for parts in (1, 2, 4):
        model = model_under_test(parse_config(ModelConfig, INDEXED)).train()
        step = accumulate_gradients(model, batch, (5, 7), parts)
        results.append((step.aux_loss, [parameter.grad for parameter in model.parameters()]))
    assert float(results[0][0]) > 0
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


def test_transformers_class_trains_the_index() -> None:
    model: Any = HeddleForCausalLM.from_decoder(model_under_test(parse_config(ModelConfig, INDEXED))).train()
    tokens = random_tokens(model.heddle_decoder.config, 2, 9)
    with record_router_statistics() as recorded:
        hidden, _ = model.heddle_decoder(tokens)
    logits = model.heddle_decoder.head(hidden)[:, :-1]
    text = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    want = text + torch.stack(recorded.losses).sum() / tokens.numel()
    torch.testing.assert_close(model(tokens, labels=tokens).loss.double(), want, rtol=0, atol=1e-6)


def test_a_large_design_becomes_small() -> None:
    large = alone(heads=32, head_dim=128, indexer={"top_k": 2048, "heads": 64, "head_dim": 128})
    small: Any = shrink(parse_config(ModelConfig, large)).layers[0].mixer
    assert (small.indexer.top_k, small.indexer.heads, small.indexer.head_dim) == (3, 2, 8)


def test_the_description_names_the_fields() -> None:
    config = parse_config(ModelConfig, INDEXED)
    assert config.layers[0].mixer is not None
    assert "indexer=(top_k=3 heads=2 head_dim=8 loss=1.0)" in describe(config.layers[0].mixer)


def test_designs_without_an_indexer_keep_their_names() -> None:
    config = parse_config(ModelConfig, alone())
    assert config.layers[0].mixer is not None
    assert "indexer" not in config.layers[0].mixer.dump()


def test_a_layer_reads_the_keys_of_an_indexed_one() -> None:
    """It sees all of them: the selection is its source's alone."""
    data = design(layer(attention(indexer=indexer())), layer(attention(shared_kv=True)))
    model = model_under_test(parse_config(ModelConfig, data))
    tokens = random_tokens(model.config, 2, 9)
    weights = heddle.attention_weights(model, tokens)
    assert [int((each[0] > 0).any(0)[-1].sum()) for each in weights if each is not None] == [3, 9]


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_shared_index_is_that_of_the_last_indexer(is_handed_over: bool) -> None:
    """Layers 1 and 2 attend to the keys that layer 0 selected, layer 4 to those of layer 3; a planted bug shows all."""
    own, shared = layer(latent(indexer=indexer())), layer(latent(shared_index=True), None)
    model = model_under_test(parse_config(ModelConfig, design(own, shared, shared, own, shared)))
    assert model.config.kv_sources == (None, 0, 0, None, 3)
    for mixer in model.mixers() if not is_handed_over else ():
        assert mixer is not None
        mixer.kv_source = None
    weights = heddle.attention_weights(model, random_tokens(model.config, 2, 9))
    attended = [(each > 0).any(1) for each in weights if each is not None]
    assert not torch.equal(attended[0], attended[3])
    for reader, source in ((1, 0), (2, 0), (4, 3)):
        assert torch.equal(attended[reader], attended[source]) == is_handed_over
        assert int(attended[source].sum(-1).max()) == 3


# Faults that the checks above see


@pytest.mark.parametrize(
    "plant",
    [
        calls(_block_scores, "scatter_reduce", lambda empty, dim, of_key, shown, _: empty.scatter(dim, of_key, shown)),
        operator(_block_scores, ast.Div, ast.Mult),
        operator(_selected, ast.Lt, ast.LtE, nth=0),
        reads(Indexer.select, "shown", lambda mask: replace(mask, selected=None)),
        calls(AttentionMask.visible, "repeat_interleave", lambda x, times, dim: torch.cat([x] * times, dim)),
    ],
    ids=["the last key's score", "a sum", "one local block more", "a loss over all keys", "heads in another order"],
)
def test_the_loop_sees_other_blocks(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(max(largest_errors(seed, "blocks")) > 1e-3 for seed in range(12, 36))


@pytest.mark.parametrize(
    "plant",
    [
        calls(
            Indexer._pooled,
            "position",
            lambda indexer, keys, layout: indexer.position(
                keys, Layout(layout.positions + (layout.positions >= 0), is_checked=True)
            ),
        ),
        calls(Indexer._pooled, "mean", lambda keys, dim: keys[:, :, -1]),
        reads(Indexer._pooled, "pool_bias", lambda bias: bias.flip(0), 1),
        reads(show_blocks, "finished", torch.ones_like),
        reads(index_loss, "of_block", lambda of_block: of_block[:, :, :, :1].expand_as(of_block)),
    ],
    ids=["a later position", "the last key", "places in reverse", "no tail", "weights of one block"],
)
def test_the_loop_sees_other_pooled_keys(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(max(largest_errors(seed, "pooled")) > 1e-3 for seed in range(10))


@pytest.mark.parametrize(
    "plant",
    [
        calls(_block_scores, "mean", lambda weights, dim: weights[:, :, 0]),
        operator(_selected, ast.Lt, ast.LtE, nth=1),
        operator(_block_scores, ast.Eq, ast.GtE, nth=2),
        calls(_block_scores, "softmax", lambda means, dim: means),
    ],
    ids=["one head for all", "one first block more", "blocks that are not whole", "no softmax"],
)
def test_the_loop_sees_other_weights_of_blocks(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(max(largest_errors(seed, "attention")) > 1e-3 for seed in range(16))


def test_the_loop_sees_scores_without_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(index_scores, "relu", lambda scores: scores)(monkeypatch)
    assert any(largest_errors(seed)[1] > 1e-3 for seed in range(4))


def test_the_loop_sees_keys_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(Indexer.forward, "k_norm", lambda inner, k: inner.k_norm(k).flip(-1))(monkeypatch)
    assert any(largest_errors(seed)[1] > 1e-3 for seed in range(4))


def test_the_loop_sees_queries_without_their_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(Indexer.forward, "q_norm", lambda inner, q: q + 0 * inner.q_norm(q))(monkeypatch)
    assert any(largest_errors(seed)[1] > 1e-3 for seed in (1, 4))


def test_ties_of_the_highest_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(_selected, "cumsum", lambda equal, dim: equal.flip(dim).cumsum(dim).flip(dim))(monkeypatch)
    with pytest.raises(AssertionError):
        test_of_equal_scores_the_lowest_positions_win()


def test_a_loss_that_teaches_the_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(Indexer.forward, "detach", lambda x: x, nth=0)(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_index_learns_from_its_loss_alone(INDEXED)


def test_few_keys_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of at most top_k tokens has the mask itself, and so the kernels of dense attention."""
    mask = Layout.causal(1, 3).attention_mask(None, True)
    x = torch.randn(1, 2, 3, 4)
    assert select_keys(x, x[:, :1], x[..., 0], mask, Choice(3)) is mask
