"""Compressed attention against a plain loop and against DeepSeek-V4 in transformers: blocks, ties, states, sizes."""

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import forward_in_chunks, forward_no_grad, model_under_test, normal_tensor, random_tokens
from heddle.model.config import ModelConfig
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig
from heddle.parts.mixers.compressed_attention import CompressedAttention, CompressedCache
from heddle.parts.modules.blocks import _call_blocks, block_ends, block_mask, block_pairs, extend_blocks
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec
from tests.cases import case, design, layer
from tests.laws.planting import Plant, assigned, calls, reads
from tests.parity.reference import close, compute_in_float64
from tests.parts.loops import assert_none, mixer_errors, normalized, rotated, with_large_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what a third party says while it is imported is not ours
    from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

WIDTH = 10
DYNAMIC = {"kind": "ntk", "factor": 2.0, "original_length": 8}
BASE = 100.0


class Loop:
    """One document x [T, width], a token, a block and a head at a time."""

    def __init__(self, x: Tensor, mixer: Any) -> None:
        self.x, self.mixer, self.get = x, mixer, dict(mixer.named_parameters()).__getitem__

    def turned(self, head: Tensor, position: int) -> Tensor:
        """A head whose last dims are rotated."""
        dims, rotation = self.mixer.rope_dim, self.mixer.position
        if not dims:
            return head
        last = rotated(head[-dims:], position, interleaved=rotation.layout == "interleaved", base=rotation.config.base)
        return torch.cat((head[:-dims], last))

    def entries(self, name: str) -> list[Tensor]:
        """The entries of all finished blocks."""
        m, series, bias = self.mixer.ratio, self.mixer.series, self.get(f"{name}.bias")
        values, gates = (
            (self.x @ self.get(f"{name}.{part}.weight").T).unflatten(-1, (series, -1)) for part in ("values", "gates")
        )
        found = []
        for b in range(len(self.x) // m):
            tokens = [(b * m + place, place, series - 1) for place in range(m)]
            if series == 2 and b:
                tokens += [((b - 1) * m + place, place, 0) for place in range(m)]
            weights = torch.stack([gates[t, own] + bias[place, own] for t, place, own in tokens]).softmax(0)
            pooled = (weights * torch.stack([values[t, own] for t, _, own in tokens])).sum(0)
            found.append(self.turned(normalized(pooled, self.get(f"{name}.norm.weight")), b * m))
        return found

    def chosen(self, t: int, latent: Tensor, index: list[Tensor]) -> list[int]:
        """The blocks that query t sees."""
        finished = list(range((t + 1) // self.mixer.ratio))
        if self.mixer.index is None:
            return finished
        heads, d = self.mixer.index.heads, self.mixer.index.dim
        queries = [self.turned(q, t) for q in (self.get("index.q.weight") @ latent).split(d)]
        weights = self.get("index.weights.weight") @ self.x[t] * (heads * d) ** -0.5
        scores = [
            sum(float((w * (q @ index[b]).clamp(min=0)).detach()) for w, q in zip(weights, queries, strict=True))
            for b in finished
        ]
        return sorted(finished, key=lambda b: (-scores[b], b))[: self.mixer.index.selector.choice.top_k]

    def outputs(self) -> Tensor:
        """[T, width]."""
        mixer, d, rows = self.mixer, self.mixer.head_dim, []
        keys = [
            self.turned(normalized(self.get("kv.weight") @ x, self.get("kv_norm.weight")), s)
            for s, x in enumerate(self.x)
        ]
        entries = [] if mixer.pool is None else self.entries("pool")
        index = [] if mixer.index is None else self.entries("index.pool")
        for t, x in enumerate(self.x):
            latent = x
            if mixer.q_down is not None:
                latent = normalized(self.get("q_down.weight") @ x, self.get("q_norm.weight"))
            queries = (self.get("q.weight" if mixer.q_down is None else "q_up.weight") @ latent).split(d)
            chosen = self.chosen(t, latent, index) if mixer.ratio else []
            seen = torch.stack([*keys[max(0, t + 1 - mixer.local) : t + 1], *(entries[b] for b in chosen)])
            heads = []
            for h, head in enumerate(queries):
                logits = seen @ self.turned(normalized(head), t) * mixer.scale
                weights = logits.exp()
                total = weights.sum() + (0 if mixer.sink is None else mixer.sink[h].exp())
                heads.append(self.turned((weights / total) @ seen, -t))
            y = torch.cat(heads)
            if mixer.out_down is not None:
                parts = zip(self.get("out_down.weight").chunk(mixer.groups), y.chunk(mixer.groups), strict=True)
                y = torch.cat([weight @ part for weight, part in parts])
            rows.append(mixer.out.weight @ y)
        return torch.stack(rows)


def loop(x: Tensor, mixer: Mixer) -> Tensor:
    return Loop(x, mixer).outputs()


def drawn(draw: random.Random, blocks: bool = True) -> dict[str, Any]:
    """Random fields."""
    groups, dim = draw.choice((1, 2)), draw.choice((2, 4, 5))
    fields: dict[str, Any] = {"heads": groups * draw.choice((1, 2)), "head_dim": dim, "sink": draw.random() < 0.7}
    ratio = draw.choice((2, 3, 4))
    fields |= {"window": draw.randint(ratio - 1, 5), "query_rank": draw.choice((None, 4))}
    fields |= {"scale": draw.choice((None, 0.4))}
    fields |= {"groups": groups, "out_rank": 3} if draw.random() < 0.5 else {}
    if draw.random() < 0.8:
        fields |= {"rope_dim": 2 * draw.randint(1, dim // 2)}
        fields |= {"position": {"kind": "rope", "base": BASE, "layout": draw.choice(("half", "interleaved"))}}
    if blocks:
        fields |= {"compress_ratio": ratio, "overlap": draw.random() < 0.5}
    if blocks and draw.random() < 0.6:
        fields |= {"top_k": draw.choice((1, 2)), "index_heads": draw.choice((1, 3)), "index_head_dim": 4}
    return fields


def built(fields: dict[str, Any], width: int = WIDTH) -> CompressedAttention:
    """The mixer."""
    config: Any = parse_config(MixerConfig, {"kind": "compressed_attention", **fields})  # type: ignore[type-abstract]
    mixer = config.build(BuildContext(width, RMSConfig()))
    assert isinstance(mixer, CompressedAttention)
    return mixer


def largest_errors(seed: int) -> tuple[float, float]:
    """Of the outputs, with and without a state, and of the gradients, for two packed documents."""
    draw = random.Random(seed)
    mixer = with_large_weights(built(drawn(draw, blocks=seed % 8 > 0)), draw)
    return mixer_errors(mixer, loop, WIDTH, [draw.randint(1, 5), draw.randint(8, 11)], draw)


def test_outputs_and_gradients_are_those_of_the_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "blocks that end a token early": reads(block_ends, "positions", lambda positions: positions + 1, 3),
    "the tail lost at a cut": reads(extend_blocks, "last", lambda last: 0.0 * last),
    "blocks that count the row's tokens": reads(
        block_ends, "positions", lambda positions: torch.arange(positions.shape[1]).expand_as(positions), 3
    ),
    "the block before of another document": reads(
        _call_blocks, "theirs", lambda theirs, *, all_segments: all_segments[..., None].expand_as(theirs)
    ),
    "an index that ranks unfinished blocks": reads(block_mask, "ends", lambda ends: 0 * ends),
    "entries at the position of their second token": calls(
        _call_blocks, "Layout", lambda make, positions, is_checked: make(positions + 1, is_checked=is_checked)
    ),
    "outputs that are not rotated back": reads(CompressedAttention._turned, "inverse", lambda _: lambda x, _: x),
    "places of a block in reverse": assigned(CompressedAttention._entries, "bias", lambda bias: bias.flip(0)),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_other_blocks(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-3 for seed in range(12))


def offset_errors(seed: int) -> float:
    """Of documents that begin within a block, packed, in one call and in pieces with a state, against each alone."""
    draw = random.Random(seed)
    mixer = with_large_weights(built(drawn(draw)), draw)
    starts, lengths = (draw.randint(0, 7), draw.randint(0, 7)), (draw.randint(2, 9), draw.randint(8, 12))
    x = normal_tensor((1, sum(lengths), WIDTH), torch.Generator().manual_seed(seed))
    positions = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    segments = torch.arange(2).repeat_interleave(torch.tensor(lengths))[None]
    layout, table = Layout.of(torch.cat(positions)[None], segments), PositionTable.empty(1, None, None, "cpu")
    state, pieces = mixer.init_state(StateSpec(1, None, torch.float64, "cpu")), []
    with torch.no_grad():
        alone = [mixer(each, Layout.of(at[None]))[0] for each, at in zip(x.split(lengths, 1), positions, strict=True)]
        found = [mixer(x, layout)[0]]
        for token in range(0, x.shape[1], 3):
            part = slice(token, token + 3)
            table, piece = table.extend(Layout(layout.positions[:, part], segments[:, part]))
            y, state = mixer(x[:, part], piece, state)
            pieces.append(y)
    return max(float((y - torch.cat(alone, 1)).abs().max()) for y in (*found, torch.cat(pieces, 1)))


def test_documents_may_begin_within_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(offset_errors, range(6))) < 1e-10
    reads(block_ends, "first", lambda _, *, segment_ids: segment_ids)(monkeypatch)
    assert any(offset_errors(seed) > 1e-3 for seed in range(6))


# DeepSeek-V4 in transformers, on whole texts.

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 3, "heavily_compressed_attention": 4}


def stable_topk(x: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """Of equal numbers the first ones, which torch does not promise."""
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def their_layer(kind: str, fields: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """Their layer with random weights, and its config."""
    rope = {"rope_type": "default", "partial_rotary_factor": fields["rope_dim"] / fields["head_dim"]}
    config = configuration_deepseek_v4.DeepseekV4Config(
        hidden_size=WIDTH, num_hidden_layers=1, layer_types=[kind], num_attention_heads=fields["heads"],
        head_dim=fields["head_dim"], q_lora_rank=fields["query_rank"], sliding_window=fields["window"],
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 4},
        o_groups=fields["groups"], o_lora_rank=fields["out_rank"], index_n_heads=2, index_head_dim=6, index_topk=2,
        rms_norm_eps=1e-5,
        rope_parameters={"main": rope | {"rope_theta": BASE}, "compress": rope | {"rope_theta": 2 * BASE}},
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = with_large_weights(modeling_deepseek_v4.DeepseekV4Attention(config, 0), random.Random(seed))
    return theirs.eval(), config


RENAMED = {
    "q_a_proj": "q_down", "q_a_norm": "q_norm", "q_b_proj": "q_up", "kv_proj": "kv", "o_a_proj": "out_down",
    "o_b_proj": "out", "sinks": "sink", "compressor.kv_proj": "pool.values", "compressor.gate_proj": "pool.gates",
    "compressor.position_bias": "pool.bias", "compressor.kv_norm": "pool.norm",
    "compressor.indexer.kv_proj": "index.pool.values", "compressor.indexer.gate_proj": "index.pool.gates",
    "compressor.indexer.position_bias": "index.pool.bias", "compressor.indexer.kv_norm": "index.pool.norm",
    "compressor.indexer.q_b_proj": "index.q", "compressor.indexer.scorer.weights_proj": "index.weights",
}  # fmt: skip


def renamed(name: str) -> str:
    """The name of one of their parameters here."""
    stem = name.removesuffix(".weight")
    return RENAMED.get(stem, stem) + name[len(stem) :]


def their_outputs(theirs: Any, config: Any, x: Tensor, cache: Any = None, start: int = 0, padding: int = 0) -> Tensor:
    """Of tokens from `start` on, the first `padding` slots of which are padding on the left."""
    length = x.shape[1]
    slots = torch.arange(start, start + length)
    positions = (slots - padding).clamp(min=0).expand(len(x), -1)
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config).double()
    tables = {kind: rotary(x, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    first = max(0, start - config.sliding_window + 1)
    keys = torch.arange(first, start + length)
    distance = slots[:, None] - keys
    hidden = (distance < 0) | (distance >= config.sliding_window) | (keys < padding)
    mask = torch.zeros(distance.shape, dtype=torch.float64).masked_fill(hidden, float("-inf")).expand(len(x), 1, -1, -1)
    output: Tensor = theirs(x, tables, positions, mask, past_key_values=cache)[0]
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch, modeling_deepseek_v4)
    monkeypatch.setattr(Tensor, "topk", stable_topk)
    for seed in range(4):
        draw = random.Random(seed)
        fields = {"heads": 4, "head_dim": 8, "query_rank": 5, "window": draw.randint(3, 6), "groups": 2, "out_rank": 3}
        fields["rope_dim"] = draw.choice((2, 4))
        theirs, config = their_layer(kind, fields, seed)
        ours = {"compress_ratio": KINDS[kind] or None}
        if kind == "compressed_sparse_attention":
            ours |= {"overlap": True, "top_k": 2, "index_heads": 2, "index_head_dim": 6}
        base = 2 * BASE if KINDS[kind] else BASE
        mixer = built(fields | ours | {"position": {"kind": "rope", "base": base, "layout": "interleaved"}}).double()
        weights = {renamed(name): value for name, value in theirs.state_dict().items()}
        shapes = {name: value.shape for name, value in mixer.state_dict().items()}
        mixer.load_state_dict({name: value.view(shapes[name]) for name, value in weights.items()})
        x = normal_tensor((2, draw.randint(14, 20), WIDTH), torch.Generator().manual_seed(seed)).requires_grad_()
        got, want = mixer(x, Layout.causal(*x.shape[:2]))[0], their_outputs(theirs, config, x)
        close(got, want)
        probe = normal_tensor(tuple(got.shape), torch.Generator().manual_seed(99))
        parameters = {renamed(name): value for name, value in theirs.named_parameters()}
        inputs = [x, *mixer.parameters()], [x, *(parameters[name] for name, _ in mixer.named_parameters())]
        gradients = [
            torch.autograd.grad((y * probe).sum(), each, materialize_grads=True)
            for y, each in zip((got, want), inputs, strict=True)
        ]
        for mine, expected in zip(*gradients, strict=True):
            assert float((mine - expected.view_as(mine)).abs().max()) < 1e-9


# What is selected, and what the state keeps.

INDEXED = design(
    layer(
        {
            "kind": "csa", "heads": 2, "window": 3, "compress_ratio": 2, "top_k": 2, "index_heads": 2,
            "index_head_dim": 4,
        },
        repeat=2,
    )
)  # fmt: skip


def test_of_equal_scores_the_first_blocks_win() -> None:
    """Whole, and cut anywhere."""
    config = parse_config(ModelConfig, INDEXED)
    model = model_under_test(config)
    for mixer in model.mixers():
        assert isinstance(mixer, CompressedAttention)
        assert mixer.index is not None
        torch.nn.init.zeros_(mixer.index.weights.weight)
    seen = list[Tensor]()
    tokens = random_tokens(config, 2, 13)
    with observing_attention(lambda observation: seen.append(observation.weights[0, :, :, 13:].amax(0) > 0)):
        whole = forward_no_grad(model, tokens)
    expected = [[(t + 1) // 2 > b and b < 2 for b in range(7)] for t in range(13)]
    assert [weights.tolist() for weights in seen] == [expected, expected]
    assert torch.allclose(forward_in_chunks(model, tokens, [5, 1, 1, 6])[0], whole, rtol=0, atol=1e-10)


def test_a_query_sees_top_k_of_the_finished_blocks_and_its_window() -> None:
    config, counts = parse_config(ModelConfig, INDEXED), list[Tensor]()

    def count(observation: Observation) -> None:
        shown = (observation.weights > 0).any(1)
        counts.append(torch.stack((shown[:, :, :13].sum(-1), shown[:, :, 13:].sum(-1)), dim=-1))

    with observing_attention(count):
        forward_no_grad(model_under_test(config), random_tokens(config, 1, 13), Layout.packed([[5, 8]]))
    expected = [[min(3, t + 1), min(2, (t + 1) // 2)] for length in (5, 8) for t in range(length)]
    assert [each[0].tolist() for each in counts] == [expected, expected]


def test_the_index_learns_from_its_own_loss_alone() -> None:
    config = parse_config(ModelConfig, INDEXED)
    model = model_under_test(config).train()
    with record_router_statistics() as recorded:
        hidden = model(random_tokens(config, 2, 9), Layout.causal(2, 9))[0]
    named = dict(model.named_parameters())
    for value, is_own in ((hidden.sin().sum(), False), (torch.stack(recorded.losses).sum(), True)):
        gradients = torch.autograd.grad(
            value, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        reached = {name for name, gradient in zip(named, gradients, strict=True) if bool(gradient.any())}
        assert {".mixer.index." in name for name in reached} == {is_own}
    assert len(recorded.losses) == 2


def test_the_state_has_the_window_the_entries_and_the_tail() -> None:
    config = case("compressed-index")
    part: Any = config.resolved().layers[0].mixer
    channels, series = part.head_dim + part.index_head_dim, 1 + part.overlap
    for length, rollback in ((20, 0), (21, 0), (40, 0), (40, 3)):
        found = heddle.size(config, length, dtype=torch.bfloat16, rollback=rollback).layers[0].state_bytes
        tail = (series * part.compress_ratio - 1 + rollback) * 2 * series * channels
        entries = -(-length // part.compress_ratio) * channels
        assert found == 2 * ((part.window + rollback) * part.head_dim + entries + tail)
    state = heddle.build(config).init_state(3, 20).layers[0]
    assert isinstance(state, CompressedCache)
    assert state.entries.shape[1] * part.compress_ratio == 20


@pytest.mark.parametrize("ratio", [2, 3, 5])
def test_pairs_are_counted(ratio: int) -> None:
    for tokens in range(40):
        for most in (None, 1, 2, 4):
            seen = [t // ratio for t in range(1, tokens + 1)]
            assert block_pairs(tokens, ratio, most) == sum(n if most is None else min(most, n) for n in seen)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlap": True}, "overlap: is for entries"),
        ({"top_k": 2, "index_heads": 1, "index_head_dim": 4}, "top_k: is for entries"),
        ({"compress_ratio": 4, "index_heads": 2}, "index_heads: does nothing without top_k"),
        ({"compress_ratio": 4, "window": 2}, "window: 2 hides tokens of a block of 4"),
        ({"compress_ratio": 1}, "compress_ratio"),
        ({"index_loss": 0.5}, "index_loss: does nothing"),
        ({"groups": 3, "out_rank": 2}, "groups: 3 does not divide heads = 4"),
        ({"out_rank": 2}, "out_rank: does nothing without groups"),
        ({"rope_dim": 2}, "rope_dim: does nothing"),
        ({"rope_dim": 8, "position": {"kind": "rope"}}, "rope_dim: rope_dim = 8 dims of 6"),
        ({"position": {"kind": "axial_rope"}, "head_dim": 8}, "position: rotates by more"),
        ({"position": {"kind": "rope", "scaling": DYNAMIC}}, "position: rotates by more"),
        ({"kind": "csa", "top_k": 1, "overlap": False}, "overlap: False contradicts csa"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        heddle.build(parse_config(ModelConfig, design(layer({"kind": "compressed_attention", "heads": 4} | fields))))


def test_short_names_have_the_numbers_of_deepseek_v4() -> None:
    found: list[Any] = [parse_config(MixerConfig, {"heads": 2, "kind": kind}) for kind in ("csa", "hca")]  # type: ignore[type-abstract]
    assert [(part.compress_ratio, part.overlap, part.top_k) for part in found] == [(4, True, 512), (128, False, None)]


def test_widths_that_are_not_given_follow_from_the_heads() -> None:
    """A quarter of the heads for the index, and of a group's width for its rank; at least 1."""
    given = {"kind": "csa", "heads": 8, "groups": 2, "position": {"kind": "rope"}}
    mixer: Any = parse_config(ModelConfig, design(layer(given)) | {"width": 48}).resolved().layers[0].mixer
    assert (mixer.index_heads, mixer.index_head_dim, mixer.out_rank) == (2, 6, 6)
    few: Any = parse_config(ModelConfig, design(layer(given | {"heads": 2, "head_dim": 2}))).resolved().layers[0].mixer
    assert (few.index_heads, few.index_head_dim, few.out_rank) == (1, 2, 1)
    sizes = {}
    for name, fields in (("drawn", given), ("written", mixer.dump())):
        model = heddle.build(parse_config(ModelConfig, design(layer(fields)) | {"width": 48}))
        sizes[name] = {key: value.shape for key, value in model.state_dict().items()}
    assert sizes["drawn"] == sizes["written"]


def test_flops_count_what_is_seen() -> None:
    """Beyond those of the window: the pools, pairs of a query and an entry that it sees, and the index's scores."""
    tokens, heads, d, ratio, series, top_k, index_heads, index_dim = 23, 4, 6, 3, 2, 2, 3, 5

    def flops(**fields: Any) -> int:
        mixer = {"kind": "compressed_attention", "heads": heads, "window": 4, **fields}
        return round(heddle.size(parse_config(ModelConfig, design(layer(mixer))), tokens).flops_per_token * tokens)

    finished = [t // ratio for t in range(1, tokens + 1)]
    pools, seen = 2 * tokens * 24 * 2 * series, 4 * heads * d
    alone = flops()
    blocks = {"compress_ratio": ratio, "overlap": True}
    assert flops(**blocks) - alone == pools * d + seen * sum(finished)
    index = {"top_k": top_k, "index_heads": index_heads, "index_head_dim": index_dim}
    projections = 2 * tokens * 24 * (index_heads * index_dim + index_heads)
    scores = 2 * sum(finished) * index_heads * (index_dim + 1)
    expected = pools * (d + index_dim) + seen * sum(min(top_k, n) for n in finished) + projections + scores
    assert flops(**blocks, **index) - alone == expected
    grouped = 2 * tokens * (heads * d * 5 + 2 * 5 * 24) - 2 * tokens * heads * d * 24
    assert flops(groups=2, out_rank=5) - alone == grouped
