"""Key/value heads: repeating is exact, merging is what an oracle computes, equal heads lose nothing."""

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.conversion.head_parameters import (
    _heads_of,
    batches,
    build_mixer,
    rotary_pairs,
    select_heads,
    text_statistics,
)
from heddle.conversion.merge_heads import Merge, MergedHeads
from heddle.conversion.rewrites import kv_heads as head_conversion
from heddle.conversion.rewrites.kv_heads import KVHeads, fit_output
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, ModelWeights, layer_activations
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.build import BuildContext
from heddle.parts.mixers.attention import AttentionConfig
from tests import cases
from tests.conversion.exactness import (
    calibration_text,
    converted_model,
    design,
    difference,
    greedy_text,
    logits,
    random_text,
    source_model,
)
from tests.laws.planting import Plant, calls, operator, wrapped

ROPE: dict[str, Any] = {"kind": "rope", "layout": "half"}
INTERLEAVED = {"kind": "rope", "layout": "interleaved"}
ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 8, "kv_heads": 4, "head_dim": 6, "position": ROPE}
# Each feature that belongs to a head, or that stands between a key and its query.
MIXERS: dict[str, dict[str, Any]] = {
    "plain": ATTENTION,
    "mha": ATTENTION | {"kv_heads": 8, "position": INTERLEAVED},
    "biases-value-dim": ATTENTION | {"bias": True, "value_dim": 4, "position": INTERLEAVED | {"rotary_dim": 4}},
    "sink-window-softcap": ATTENTION | {"sink": True, "window": 5, "softcap": 3.0, "bias": "qkv"},
    "head-gate-partial": ATTENTION | {"gate": "head", "bias": True, "position": ROPE | {"rotary_dim": 4}},
    "channel-gate": ATTENTION | {"gate": "channel", "bias": True, "value_dim": 5},
    "exclusive": ATTENTION | {"exclusive": True, "value_dim": 5},
    "forget-relative": ATTENTION | {"forget": True, "relative_dim": 3, "relative_extent": 5},
    "exclusive-channel-gate": ATTENTION | {"exclusive": True, "gate": "channel"},
    "head-norm": ATTENTION | {"qk_norm": "head", "bias": "qkv", "position": ROPE | {"rotary_dim": 4}},
    "per-head-norm": ATTENTION | {"qk_norm": "per_head", "bias": True},
    "projection-norm": ATTENTION | {"qk_norm": "projection"},
    "norm-after-rotation": ATTENTION | {"qk_norm": "head", "norm_after_rotation": True},
    "axial": ATTENTION | {"head_dim": 10, "position": {"kind": "axial_rope", "rotary_dim": 8}},
    "relative-bias": ATTENTION | {"position": {"kind": "relative_bias", "buckets": 4, "max_distance": 9}},
    "alibi": ATTENTION | {"position": {"kind": "alibi"}},
    "no-position": {name: value for name, value in ATTENTION.items() if name != "position"},
}
NORMED = [name for name in MIXERS if "norm" in name]
TEXT_OPTIONS = [("similar-outputs", "least-squares"), ("similar-outputs", "aligned")]


def text() -> CalibrationText:
    return random_text(rows=10, length=17)


@pytest.mark.parametrize("name", MIXERS)
def test_repeated_heads_compute_the_same(name: str) -> None:
    source = source_model(design(MIXERS[name]))
    rewrite = KVHeads(kv_heads=8)
    if name == "mha":
        with pytest.raises(ConfigError, match="nothing would change"):
            converted_model(source, rewrite, text=text())
        return
    assert rewrite.is_exact(source.config.resolved())
    converted = converted_model(source, rewrite, text=text())
    assert difference(source, converted) < 1e-10
    prompt = random_text().batches[0]
    assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))


def split(model: Decoder, kv_heads: int, rotations: str | None, seed: int = 0) -> Decoder:
    """A model with more key heads that computes the same: each head is repeated, then heads are shuffled.

    Plain loops over heads, apart from the code under test. rotations: "keys" and "values" are turned head by head, and
    queries and outputs with them, as far as the design allows; "signs": keys by half turns, values by any rotation.
    """
    generator = np.random.default_rng(seed)
    mixer = model.config.resolved().layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    heads, groups, d, d_v = mixer.heads, mixer.kv_heads or 0, mixer.head_dim or 0, mixer.value_dim or 0
    config = mixer.replace(kv_heads=kv_heads)
    layers = [layer.replace(mixer=config) for layer in model.config.resolved().layers]
    result = source_model(model.config.resolved().replace(layers=tuple(layers)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    order = [int(unit) for unit in generator.permutation(kv_heads)]  # new unit -> old unit
    size = heads // kv_heads
    for index in range(model.config.depth):
        old = {
            name.removeprefix(f"layers.{index}.mixer."): x
            for name, x in state.items()
            if f"layers.{index}.mixer." in name
        }
        new = dict(old)
        blocks: dict[str, list[Tensor]] = {}
        for unit in order:
            source_head = unit // (kv_heads // groups)
            turn_k, turn_v = turns(mixer, rotations, generator)
            for query in range(unit * size, (unit + 1) * size):
                add(blocks, old, "q", query, d, turn_k)
                add(blocks, old, "gate", query, d_v if mixer.gate == "channel" else 1, None)
                add(blocks, old, "q_norm", query, d, None)
                add(blocks, old, "sink", query, 1, None)
                add(blocks, old, "score_bias", query, 1, None)
                add(blocks, old, "forget", query, 1, None)
                add(blocks, old, "relative", query, mixer.relative_dim or 0, None)
                out = old["out.weight"][:, query * d_v : (query + 1) * d_v]
                blocks.setdefault("out.weight", []).append((out @ turn_v.T).T)
            add(blocks, old, "k", source_head, d, turn_k)
            add(blocks, old, "v", source_head, d_v, turn_v)
            add(blocks, old, "k_norm", source_head, d, None)
        for name, parts in blocks.items():
            if old[name].numel() and not (mixer.qk_norm == "head" and "norm" in name):
                new[name] = torch.cat(parts).T if name == "out.weight" else torch.cat(parts)
        state |= {f"layers.{index}.mixer.{name}": x for name, x in new.items()}
    result.load_state_dict(state)
    return result


def add(blocks: dict[str, list[Tensor]], old: dict[str, Tensor], module: str, head: int, rows: int, turn: Any) -> None:
    """Append a head's rows of every parameter of a module."""
    for name, value in old.items():
        if name.partition(".")[0] == module:
            if module.endswith("norm") and value.dim() == 2:
                part = value[head : head + 1]
            else:
                part = value[head * rows : (head + 1) * rows]
            blocks.setdefault(name, []).append(part if turn is None else turn @ part)


def turns(mixer: AttentionConfig, rotations: str | None, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A rotation of a head's keys that commutes with RoPE and the norm, and one of its values."""
    d, d_v = mixer.head_dim or 0, mixer.value_dim or 0
    k, v = np.eye(d), np.eye(d_v)
    if rotations is None:
        return torch.tensor(k), torch.tensor(v)
    position: Any = mixer.position
    if mixer.gate != "channel":
        v = np.linalg.qr(generator.normal(size=(d_v, d_v)))[0]
    dims = [] if position is None or position.kind == "relative_bias" else rotated_pairs(position)
    for a, b in dims:
        angle = generator.uniform(0, 2 * np.pi) if mixer.qk_norm is None else np.pi * generator.integers(2)
        k[np.ix_([a, b], [a, b])] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    rest = sorted(set(range(d)) - {dim for pair in dims for dim in pair})
    if rest and mixer.qk_norm is None:
        k[np.ix_(rest, rest)] = np.linalg.qr(generator.normal(size=(len(rest), len(rest))))[0]
    return torch.tensor(k), torch.tensor(v)


def rotated_pairs(position: Any) -> list[tuple[int, int]]:
    """The dims that RoPE rotates together, written out."""
    rotary = position.rotary_dim
    if position.kind == "axial_rope":
        return [(0, 2), (1, 3), (4, 6), (5, 7)]
    if position.layout == "interleaved":
        return [(dim, dim + 1) for dim in range(0, rotary, 2)]
    return [(dim, dim + rotary // 2) for dim in range(rotary // 2)]


def few(name: str) -> Decoder:
    """A model with two key heads, alike in all features to that of the name."""
    return source_model(design(MIXERS[name] | {"kv_heads": 2}, depth=1, width=20))


def many(model: Decoder, rotations: str | None, kv_heads: int = 4) -> Decoder:
    return split(model, kv_heads, rotations)


@pytest.mark.parametrize("name", [name for name in MIXERS if name != "alibi"])
def test_equal_heads_lose_nothing(name: str) -> None:
    small = few(name)
    large = many(small, None)
    assert difference(small, large) < 1e-10  # the test's own loops are right
    for merge in ("mean", "first", "aligned", "least-squares"):
        converted = converted_model(large, KVHeads(kv_heads=2, merge=merge), text=text())
        assert difference(small, converted) < 1e-10, merge


@pytest.mark.parametrize(
    ("name", "merge"),
    [
        each
        for turn, merge in enumerate(("aligned", "least-squares"))
        for each in cases.in_turn([(name, merge) for name in MIXERS if name != "alibi"], turn)
    ],
)
def test_heads_that_are_equal_up_to_a_rotation_lose_nothing(name: str, merge: Any) -> None:
    small = few(name)
    large = many(small, "any")
    assert difference(small, large) < 1e-10
    options = [KVHeads(kv_heads=2, groups="similar-outputs", merge=merge)]
    options += [KVHeads(kv_heads=2, groups="similar-keys-values", merge=merge)]
    if merge == "aligned":
        options += [KVHeads(kv_heads=2, groups="similar-keys-values", merge=merge, similarity="weights")]
    for rewrite in options:
        converted = converted_model(large, rewrite, text=text())
        assert difference(large, converted) < 1e-10, rewrite
    prompt = random_text().batches[0]
    assert torch.equal(greedy_text(large, prompt), greedy_text(converted, prompt))


def oracle(
    mixer: AttentionConfig, old: dict[str, np.ndarray], x: np.ndarray, groups: Sequence[Sequence[int]]
) -> np.ndarray:
    """The output of causal attention on x [T, width] where the key heads of a group are their mean, in numpy."""
    heads, units, d, d_v = mixer.heads, mixer.kv_heads or 0, mixer.head_dim or 0, mixer.value_dim or 0
    k_maps = [np.c_[old["k.weight"], old["k.bias"]][u * d : (u + 1) * d] for u in range(units)]
    v_maps = [np.c_[old["v.weight"], old["v.bias"]][u * d_v : (u + 1) * d_v] for u in range(units)]
    q_map, ones = np.c_[old["q.weight"], old["q.bias"]], np.c_[x, np.ones(len(x))]
    y = np.tile(old["out.bias"], (len(x), 1))
    for h in range(heads):
        unit = h // (heads // units)
        (group,) = [group for group in groups if unit in group]
        q = ones @ q_map[h * d : (h + 1) * d].T
        k = ones @ np.mean([k_maps[u] for u in group], axis=0).T
        v = ones @ np.mean([v_maps[u] for u in group], axis=0).T
        if mixer.qk_norm == "per_head":
            gain = np.mean([old["k_norm.weight"][u] for u in group], axis=0)
            q = q / np.sqrt((q**2).mean(1, keepdims=True) + 1e-5) * old["q_norm.weight"][h]
            k = k / np.sqrt((k**2).mean(1, keepdims=True) + 1e-5) * gain
        q, k = (rotate(z, rotated_pairs(mixer.position)) for z in (q, k))
        gate = 1 / (1 + np.exp(-(x @ old["gate.weight"][h] + old["gate.bias"][h])))
        for i in range(len(x)):
            scores = np.append(q[i] @ k[: i + 1].T * d**-0.5, old["sink"][h])
            p = np.exp(scores - scores.max())
            y[i] += gate[i] * old["out.weight"][:, h * d_v : (h + 1) * d_v] @ (p[:-1] / p.sum() @ v[: i + 1])
    return y


def rotate(x: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """RoPE with base 10000 on x [T, d]."""
    result = x.copy()
    for number, (a, b) in enumerate(pairs):
        angle = np.arange(len(x)) * 10000.0 ** (-number / len(pairs))
        result[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        result[:, b] = x[:, b] * np.cos(angle) + x[:, a] * np.sin(angle)
    return result


FEATURES = {"bias": True, "sink": True, "gate": "head", "value_dim": 5}
ORACLE_MIXERS = [ATTENTION | FEATURES, ATTENTION | FEATURES | {"qk_norm": "per_head", "position": INTERLEAVED}]


@pytest.mark.parametrize("fields", ORACLE_MIXERS, ids=["plain", "per-head-norm"])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 3], [1, 2]]], ids=["neighbors", "others"])
def test_the_mean_is_that_of_the_oracle(
    fields: dict[str, Any], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_conversion, "contiguous_groups", lambda *_: groups)
    source = source_model(design(fields))
    converted = converted_model(source, KVHeads(kv_heads=2, groups="contiguous", merge="mean"))
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mixer = source.config.resolved().layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    old = {name: value.detach().numpy() for name, value in source.layers[0].mixer.named_parameters()}  # type: ignore[union-attr]
    layout = next(iter(random_text(rows=1, length=7).layouts))
    with torch.no_grad():
        y = converted.layers[0].mixer(x[None], layout)[0][0]  # type: ignore[operator]
    assert np.abs(y.numpy() - oracle(mixer, old, x.numpy(), groups)).max() < 1e-10


@pytest.mark.parametrize("merge", ["mean", "aligned"])
def test_the_cost_of_two_heads_is_what_merging_them_changes(merge: Any) -> None:
    fields = ATTENTION | {"bias": True, "gate": "head", "heads": 5, "kv_heads": 5}
    source, calibration = source_model(design(fields, depth=1)), text()
    activations = next(iter(layer_activations(ModelWeights(source), calibration)))
    mixer, layer = source.config.resolved().layers[0].mixer, ModelWeights(source).layer(0)
    assert isinstance(mixer, AttentionConfig)
    context = BuildContext(16, source.config.norm)
    statistics = text_statistics(layer, mixer, context, activations)
    costs = MergedHeads(layer, mixer, context, statistics, merge).similar_outputs(activations)
    # Two heads alone, and their outputs alone.
    pair, two = select_heads(layer, mixer, [1, 3]), mixer.replace(heads=2, kv_heads=2)
    merged = MergedHeads(pair, two, context, statistics.select([1, 3]), merge).merge_groups([[0, 1]])
    before, after = build_mixer(two, context, pair), build_mixer(two.replace(kv_heads=1), context, merged)
    changes = [after(x, layout)[0] - before(x, layout)[0] for x, layout in batches(activations)]
    measured = float(torch.stack(changes).square().sum(-1).mean())
    assert costs[1, 3] == pytest.approx(measured, rel=1e-9)
    assert np.array_equal(costs, costs.T)


def of_query_heads(
    take: Any, value: Tensor, dim: int, heads: int, chosen: Any, *, is_key: bool, queries: Any
) -> Tensor:
    return take(value, dim, heads, [each % heads for each in queries[: len(chosen)]] if is_key else chosen)


def without_heads(is_missed: Callable[[str], bool]) -> Plant:
    """Parameters that are not among those of heads."""
    return wrapped(
        _heads_of, lambda heads_of, name, config: (None, False) if is_missed(name) else heads_of(name, config)
    )


# Each planted mistake, and the mixer on which it is caught.
PLANTED = {
    "keys-permuted-by-query-heads": (calls(select_heads, "_take", of_query_heads), "plain"),
    "strided-groups": (
        calls(
            MergedHeads.merge_groups,
            "select_heads",
            lambda select, layer, config, heads, *, groups: select(
                layer, config, [head for heads in zip(*groups, strict=True) for head in heads]
            ),
        ),
        "plain",
    ),
    "output-not-permuted": (without_heads(lambda name: name == "mixer.out.weight"), "plain"),
    "sink-left-behind": (without_heads(lambda name: name == "mixer.sink"), "sink-window-softcap"),
    "gain-left-behind": (without_heads(lambda name: "_norm." in name), "per-head-norm"),
    "rotation-across-pairs": (operator(rotary_pairs, ast.Eq, ast.NotEq), "plain"),
    "alignment-not-folded-into-queries": (
        calls(MergedHeads.merge_groups, "set_head_maps", lambda *_: None, nth=1), "plain",
    ),
    "alignment-not-folded-into-outputs": (
        calls(MergedHeads.merge_groups, "set_output_maps", lambda *_: None), "plain",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = PLANTED[mistake]
    rewrite = KVHeads(kv_heads=2, groups="similar-keys-values", merge="aligned")
    large = many(few(name), "any")
    assert difference(large, converted_model(large, rewrite, text=text())) < 1e-10
    plant(monkeypatch)
    assert difference(large, converted_model(large, rewrite, text=text())) > 1e-3


def kv_heads_of(model: Decoder) -> list[int]:
    mixers = [layer.mixer for layer in model.config.resolved().layers]
    return [mixer.kv_heads or 0 for mixer in mixers if isinstance(mixer, AttentionConfig)]


def test_all_ways_to_group_and_merge_convert_to_any_number() -> None:
    source = source_model(design(ATTENTION | {"heads": 6, "kv_heads": 2, "head_dim": 4, "bias": True}, depth=1))
    for groups in ("contiguous", "similar-queries", "similar-keys-values", "similar-outputs"):
        for merge in ("mean", "first", "aligned", "least-squares"):
            options: dict[str, Any] = {"groups": groups, "merge": merge}
            rewrite = KVHeads(kv_heads=3, **options)  # two heads become six, then three
            converted = converted_model(source, rewrite, text=text())
            assert kv_heads_of(converted) == [3]
            assert difference(source, converted) > 1e-3
            assert not rewrite.is_exact(source.config.resolved())


def test_weights_are_read_if_asked_for() -> None:
    for groups, merge in (("similar-queries", "mean"), ("similar-keys-values", "first"), ("contiguous", "aligned")):
        options: dict[str, Any] = {"groups": groups, "merge": merge, "similarity": "weights"}
        rewrite = KVHeads(kv_heads=2, **options)
        assert not rewrite.needs_text
        converted_model(source_model(design(ATTENTION)), rewrite)
    assert KVHeads(kv_heads=2, groups="similar-queries", merge="mean").needs_text
    assert not KVHeads(kv_heads=2, groups="contiguous", merge="first").needs_text


def test_the_refit_lowers_the_error_on_the_text() -> None:
    source, calibration = source_model(design(ATTENTION | {"bias": True, "gate": "channel"}, depth=1)), text()
    layer, mixer = ModelWeights(source).layer(0), source.config.resolved().layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    activations = next(iter(layer_activations(ModelWeights(source), calibration)))
    context = BuildContext(16, source.config.norm)
    statistics = text_statistics(layer, mixer, context, activations)
    errors = {}
    merges: tuple[Merge, ...] = ("mean", "aligned", "least-squares")
    for merge in merges:
        merged = MergedHeads(layer, mixer, context, statistics, merge).merge_groups([[0, 1], [2, 3]])
        config = mixer.replace(kv_heads=2)
        refitted = fit_output(merged, build_mixer(config, context, merged), activations)
        errors[merge] = tuple(output_error(config, context, each, activations) for each in (merged, refitted))
    assert all(refitted < error for error, refitted in errors.values())
    assert errors["least-squares"][0] < errors["aligned"][0] < errors["mean"][0]


def output_error(config: AttentionConfig, context: BuildContext, layer: dict[str, Tensor], activations: Any) -> float:
    """The squared error of the mixer's output."""
    mixer = build_mixer(config, context, layer)
    outputs = [mixer(x, layout)[0] for x, layout in batches(activations)]
    return sum(float((y - z).square().sum()) for y, z in zip(activations.mixer_outputs, outputs, strict=True))


def written_text(model: Decoder) -> CalibrationText:
    """A text drawn from the model itself, so that other weights predict it worse."""
    generator = torch.Generator().manual_seed(5)
    tokens = random_text(rows=24, length=1).batches[0]
    while tokens.shape[1] < 17:
        probabilities = logits(model, tokens)[:, -1].softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    return calibration_text([tokens])


def test_a_budget_gives_heads_to_the_layers_that_need_them() -> None:
    mixer = ATTENTION | {"heads": 4, "kv_heads": 4, "head_dim": 4}
    source = source_model(design(mixer, depth=3, width=12, head={"scale": 8.0}))
    with torch.no_grad():  # a layer whose heads are equal needs one only
        for name, weight in source.layers[1].named_parameters():
            if name in ("mixer.k.weight", "mixer.v.weight"):
                weight.copy_(weight[:4].repeat(4, 1))
    calibration = written_text(source)
    converted = converted_model(source, KVHeads(state_budget=0.6), text=calibration)
    counts = kv_heads_of(converted)
    assert 5 <= sum(counts) <= 0.6 * 12
    assert counts[1] == 1
    whole = converted_model(source, KVHeads(state_budget=0.75), text=calibration)
    assert kv_heads_of(whole) == [4, 1, 4]
    assert difference(source, whole) < 1e-10


def test_a_target_may_name_the_rewrite_alone() -> None:
    assert parse_rewrite("kv_heads,state_budget=25%,merge=aligned") == KVHeads(state_budget=0.25, merge="aligned")
    assert parse_rewrite("layers.1.mixer.kv_heads=2,groups=similar-queries") == KVHeads(
        kv_heads=2, groups="similar-queries", layers=(1,)
    )


def test_one_layer_alone_is_converted() -> None:
    source = source_model(design(ATTENTION))
    converted = converted_model(source, KVHeads(kv_heads=2, layers=(1,)), text=text())
    assert kv_heads_of(converted) == [4, 2]
    tokens = random_text().batches[0]
    assert not torch.equal(logits(source, tokens), logits(converted, tokens))


LATENT = {"kind": "latent_attention", "heads": 2, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "position": ROPE}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "does-not-divide": (ATTENTION, {"kv_heads": 3}, "layers.0.mixer.kv_heads: 3 does not divide heads = 8; give 1, 2"),
    "nothing-changes": (ATTENTION, {"kv_heads": 4}, "nothing would change"),
    "no-attention": (LATENT, {"kv_heads": 1}, "kv_heads: converts attention, but these layers have latent_attention"),
    "alibi": (MIXERS["alibi"], {"kv_heads": 2}, "alibi gives each head its own bias .*; use groups=contiguous"),
    "long-heads-short-text": (ATTENTION | {"head_dim": 64}, {"kv_heads": 2}, "needs a text of 1024 tokens, but there"),
    "budget-too-small": (ATTENTION, {"state_budget": 0.1}, "state_budget: 0.1 of the state per token is less than"),
    "no-layer": (ATTENTION, {"kv_heads": 2, "layers": (7,)}, "the design has layers 0 to 1"),
    "no-number": (ATTENTION, {}, "kv_heads: is missing"),
    "both": (ATTENTION, {"kv_heads": 2, "state_budget": 0.5}, "conflicts with state_budget"),
    "similarity": (ATTENTION, {"kv_heads": 2, "similarity": "weights"}, "least-squares are defined on a text"),
    "similarity-of-nothing": (
        ATTENTION, {"kv_heads": 2, "groups": "contiguous", "merge": "mean", "similarity": "weights"}, "no heads are",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_possible_is_refused(name: str) -> None:
    mixer, options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        converted_model(source_model(design(mixer)), KVHeads(**options), text=text())


@pytest.mark.parametrize(
    ("option", "choices"),
    [("groups=random", "similar-outputs"), ("merge=fresh", "least-squares"), ("seed=1", "unknown")],
)
def test_the_controls_are_gone(option: str, choices: str) -> None:
    """Each answer names what there is instead, and conversions on disk keep their identity."""
    with pytest.raises(ConfigError, match=rf"'kv_heads=2,{option}': .*{choices}"):
        parse_rewrite(f"kv_heads=2,{option}")
    assert parse_rewrite("kv_heads=2").describe() == {
        "rewrite": "kv_heads",
        "kv_heads": 2,
        "groups": "similar-outputs",
        "merge": "least-squares",
        "similarity": "text",
        "seed": 0,
    }


def test_a_text_is_asked_for_only_if_heads_are_merged() -> None:
    weights = ModelWeights(source_model(design(ATTENTION)))
    with pytest.raises(ConfigError, match="kv_heads:"):
        KVHeads(kv_heads=2).apply(weights, None)
    KVHeads(kv_heads=8).apply(weights, None)


@pytest.mark.parametrize(
    ("field", "value"), [("value_residual", "learned"), ("indexer", {"top_k": 3, "heads": 2, "head_dim": 6})]
)
def test_heads_with_a_place_are_not_merged(field: str, value: Any) -> None:
    fields = {name: each for name, each in ATTENTION.items() if name not in ("kind", "position")}
    source = source_model(
        load_config(
            cases.design(
                cases.layer(cases.attention(**fields)), cases.layer(cases.attention(**fields | {field: value}))
            )
        )
    )
    with pytest.raises(ConfigError, match=rf"layers\.1\.mixer\.{field}: .* heads cannot be merged"):
        converted_model(source, KVHeads(kv_heads=2), text=text())
    repeated = converted_model(source, KVHeads(kv_heads=8), text=text())
    assert difference(source, repeated) < 1e-10


def test_heads_with_a_score_bias_of_their_own_are_merged_in_place() -> None:
    source = source_model(design(MIXERS["alibi"]))
    small = few("alibi")
    for rewrite in (KVHeads(kv_heads=2, groups="contiguous"), KVHeads(kv_heads=1)):
        converted_model(source, rewrite, text=text())
    repeated = converted_model(small, KVHeads(kv_heads=4))
    again = converted_model(repeated, KVHeads(kv_heads=2, groups="contiguous", merge="aligned"), text=text())
    assert difference(small, again) < 1e-10
