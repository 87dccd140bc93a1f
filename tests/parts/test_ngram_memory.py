"""n-gram memory: a plain loop, transformers' layer of Qwen4, hashes, and refusals."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

import heddle
from heddle.errors import ConfigError
from heddle.laws.harness import normal_tensor
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import ngram_memory
from heddle.parts.feedforwards.ngram_memory import NGramMemory, NGramMemoryConfig, NGramState
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.norms.layer import LayerNormConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.states import StateSpec
from tests.cases import case
from tests.laws.planting import Plant, calls, condition, reads, replaced
from tests.parts.loops import assert_none, errors, with_large_weights

WIDTH = 6


def splitmix(state: int) -> int:
    """The published generator's output for a state, with Python's own integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def loop_rows(tokens: list[int], t: int, config: NGramMemoryConfig) -> list[int]:
    """The rows of the table that token t of a document looks up."""
    half = (2**63 - 1) // config.id_range // 2
    seed = config.hash_seed + 10007 * config.index
    odd = [2 * (splitmix(seed + 0x9E3779B97F4A7C15 * (i + 1)) % half) + 1 for i in range(config.order)]
    primes = (n for n in range(config.slots, 10**6) if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)))
    for _ in range(config.index * (config.order - 1) * config.heads):
        next(primes)
    rows, start = [], 0
    for n in range(2, config.order + 1):
        for _ in range(config.heads):
            prime, code = next(primes), 0
            for i in range(n):
                code ^= (tokens[t - i] if t >= i else config.fill) * odd[i]
            rows.append(start + code % prime)
            start += prime
    return rows


def loop(x: Tensor, tokens: list[int], memory: NGramMemory) -> Tensor:
    """x [T, width] of one document -> [T, width], a token at a time."""
    config, weights, values, normed = memory.config, dict(memory.named_parameters()), [], []
    for t in range(len(tokens)):
        read = torch.cat([weights["tables.weight"][row] for row in loop_rows(tokens, t, config)])
        key, value = memory.key_norm(weights["key.weight"] @ read), weights["value.weight"] @ read
        score = torch.dot(key, x[t]) / math.sqrt(len(x[t]))
        root = torch.sqrt(torch.clamp(torch.abs(score), min=1e-6)) * torch.sign(score)
        values.append(value / (1 + torch.exp(-root)))
        normed.append(memory.conv_norm(values[-1]))
    rows = []
    for t, value in enumerate(values):
        z, kernel = torch.zeros_like(value), config.conv_kernel
        for s in range(min(kernel, t // config.order + 1)):
            z = z + weights["convolution.weight"][:, kernel - 1 - s] * normed[t - s * config.order]
        rows.append(value + z / (1 + torch.exp(-z)))
    return torch.stack(rows)


def built(draw: random.Random) -> NGramMemory:
    config = NGramMemoryConfig(
        dim=draw.randint(1, 3), order=draw.randint(2, 4), heads=draw.randint(1, 3), slots=draw.randint(1, 40),
        conv_kernel=draw.randint(1, 4), fill=draw.choice((0, 3)), hash_seed=draw.choice((0, 1234)),
        index=draw.choice((0, 0, 2)), id_range=draw.choice((50, 2**18)),
    )  # fmt: skip
    return with_large_weights(config.build(BuildContext(WIDTH, draw.choice((RMSConfig(), LayerNormConfig())))), draw)


def with_ids(layout: Layout, tokens: Tensor) -> Layout:
    handed_over = HandedOver()
    handed_over.tokens = tokens
    return replace(layout, handed_over=handed_over)


def largest_errors(seed: int) -> tuple[float, float]:
    """Of outputs, packed, padded on the left and cut with a state, and of the gradients of x and all weights."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    memory, lengths = built(draw), [draw.randint(1, 5), draw.randint(8, 14), draw.randint(1, 9)]
    ids = [draw.randrange(50) for _ in range(sum(lengths))]
    x = normal_tensor((sum(lengths), WIDTH), generator).requires_grad_()
    documents = list(zip(x.split(lengths), torch.tensor(ids).split(lengths), strict=True))
    expected = torch.cat([loop(part, tokens.tolist(), memory) for part, tokens in documents])
    actual = memory(x[None], with_ids(Layout.packed([lengths]), torch.tensor([ids])))[0][0]
    error, gradient_error = errors(actual, expected, [x, *memory.parameters()])
    with torch.no_grad():
        padded = torch.cat((x.new_full((3, WIDTH), math.nan), x[: lengths[0]]))[None]
        tokens = torch.tensor([[7, 7, 7, *ids[: lengths[0]]]])
        layout = Layout(torch.tensor([[-1, -1, -1, *range(lengths[0])]]))
        y = memory(padded, with_ids(layout, tokens))[0][0, 3:]
        of_padded = float((y - expected[: lengths[0]]).abs().max())
        cut = cut_errors(memory, x[lengths[0] :], ids[lengths[0] :], expected[lengths[0] :], lengths[1], draw)
        return max(error, of_padded, *cut), gradient_error


def cut_errors(
    memory: NGramMemory, x: Tensor, ids: list[int], expected: Tensor, first: int, draw: random.Random
) -> Iterator[float]:
    """Of a document in pieces with a state, from `first` tokens on the next document in one call."""
    table, start = PositionTable.empty(1, memory.window, None, "cpu"), 0
    state: NGramState | None = memory.init_state(StateSpec(1, None, torch.float64, "cpu"))
    for piece in x[:first].split(draw.choice((1, 2, 3))):
        table, layout = table.extend(table.next_layout(len(piece)))
        tokens = torch.tensor([ids[start : start + len(piece)]])
        y, state = memory(piece[None], with_ids(layout, tokens), state)
        yield float((y[0] - expected[start : start + len(piece)]).abs().max())
        start += len(piece)


def test_outputs_and_gradients_are_those_of_the_plain_loop() -> None:
    for seed in range(40):
        assert_none(largest_errors(seed), seed)


WRONG: dict[str, Plant] = {
    "the id of padding before a document": reads(NGramMemory._look_up, "found", lambda found: found.clamp(min=1), 0),
    "taps of neighboring tokens": reads(
        NGramMemory._convolve, "weight", lambda weight: weight.roll(1, 1) if weight.shape[1] > 1 else weight, 1
    ),
    "ids without factors": replaced(ngram_memory.multipliers, lambda config: [1] * config.order),
    "a state without its ids": reads(NGramMemory._look_up, "earlier", lambda earlier: 0 * earlier, 0),
}


@pytest.mark.parametrize("bug", WRONG)
def test_the_loop_sees_wrong_memories(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[bug](monkeypatch)
    assert any(max(largest_errors(seed)) > 1e-4 for seed in range(12))


def apart_from_qwen4(index: int, streams: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest difference of the outputs, for tokens some of which end n-grams."""
    fields = {
        "ngram_size": 3, "heads_per_ngram": 2, "vocab_size": 40, "ngram_vocab_size_base": 30, "seed": 5,
        "eos_token_id": 39, "make_ngram_vocab_size_divisible_by": 16, "ple_embed_dim": 12, "hidden_size": WIDTH,
        "hc_count": streams, "ple_conv_kernel_size": 3, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    peer = with_large_weights(Qwen4ExpTextPLELayer(SimpleNamespace(**fields), 4, index), random.Random(1))
    config = NGramMemoryConfig(
        dim=3, order=3, heads=2, slots=30, conv_kernel=3, fill=39, hash_seed=5, index=index, id_range=40,
        streams=streams > 1, cut=True, multiple=16,
    )  # fmt: skip
    memory = config.build(BuildContext(WIDTH, RMSConfig(eps=1e-6), streams=streams)).double()
    weights = {
        "tables.weight": peer.ple_embedding.ngram_embedding.weight,
        "key.weight": peer.key_proj.weight,
        "value.weight": peer.value_proj.weight,
        "key_norm.weight": 1 + peer.norm_key.weight,
        "conv_norm.weight": 1 + peer.norm_conv.weight,
        "convolution.weight": peer.conv1d.weight[:, 0],
    }
    if streams > 1:
        weights["query_norm.weight"] = 1 + peer.norm_query.weight
    own = memory.state_dict()
    memory.load_state_dict({name: value.detach().view(own[name].shape) for name, value in weights.items()})
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 39, (2, 17), generator=generator)
    tokens[0, 4], tokens[1, 9] = 39, 39
    hidden = normal_tensor((2, 17, streams * WIDTH), generator)
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # their norms compute in float32
    with torch.no_grad():
        expected = peer(hidden, tokens, None)
        read = hidden.unflatten(2, (streams, WIDTH)) if streams > 1 else peer.norm_query(hidden)
        actual = memory(read, with_ids(Layout.causal(2, 17), tokens))[0]
    return float((actual.reshape(expected.shape) - expected).abs().max())


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_it_is_the_layer_of_qwen4(index: int, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart_from_qwen4(index, streams, monkeypatch) < 1e-12


OF_STREAMS: dict[str, Plant] = {
    "n-grams over an end": condition(ngram_memory.Tables.forward, "cut", False),
    "streams without a norm": calls(NGramMemory.forward, "query_norm", lambda memory, x: x),
}


@pytest.mark.parametrize("bug", OF_STREAMS)
def test_the_layer_of_qwen4_sees(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    OF_STREAMS[bug](monkeypatch)
    assert apart_from_qwen4(0, 3, monkeypatch) > 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streams": True}, "streams: reads the streams of hyper-connections, but the residual has one stream"),
        ({"streams": True, "short_convolution": {"of": ["input"]}}, "streams: reads every stream, but short_conv"),
    ],
)
def test_streams_that_are_not_there_are_refused(fields: dict[str, Any], message: str) -> None:
    memory = {"kind": "ngram_memory", "dim": 2, "slots": 9} | fields
    with pytest.raises(ConfigError, match=message):
        heddle.build(heddle.load_config({"vocab_size": 30, "width": 8, "layers": [{"feedforward": memory}]}))


def test_a_part_alone_asks_for_a_model() -> None:
    memory = NGramMemoryConfig(dim=2, slots=5).build(BuildContext(WIDTH, RMSConfig()))
    with pytest.raises(ConfigError, match="ngram_memory"):
        memory(torch.zeros(1, 3, WIDTH), Layout.causal(1, 3))


def test_vectors_in_place_of_ids_are_refused() -> None:
    model = heddle.build(case("ngram-memory"))
    with pytest.raises(ConfigError, match="ids"):
        model(torch.zeros(1, 3, model.config.width))
