"""Decoding by replays of a graph: the same text, the same draws, the same ends; host reads in blocks alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.errors import MachineError
from heddle.generation import decode
from heddle.generation import decode as decode_module
from heddle.generation.decode import Sampler, next_limit
from heddle.generation.generate import generate
from heddle.laws.harness import encoder_output_for, model_under_test, new_state, random_tokens
from heddle.model.decoder import Decoder, build
from heddle.numerics.dispatch import DeviceSize, KernelChoice, record_choices
from heddle.parts.layout import Layout
from heddle.tokenization.tokenizer import Tokenizer
from tests import small
from tests.cases import CASES, case
from tests.generation.loops import amplify_layers, is_causal
from tests.generation.recorded_graph import RecordedGraph, record

CAUSAL = [name for name in CASES if is_causal(case(name))]
COVERING = [
    "attention-softcap-sink-window", "alibi", "latent-hybrid", "learned", "axial-window-beside-rope", "delta-hybrid",
    "retention-beside-attention", "kda", "mamba2", "cross-grouped", "pair-windows", "rope-ntk-dynamic",
    "residual-hyper-apart", "differential-window-own-widths",
]  # fmt: skip
REST = [pytest.param(name, marks=pytest.mark.soak) for name in CAUSAL if name not in COVERING]
PROMPTS = [[5, 3, 8, 13, 21, 34, 55, 1], [2], [7, 7, 7, 9]]
TOKENS = 20  # the longest row goes beyond the first limit of 16
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs recorded in a test, by the stand-in for CUDA's."""
    recorded: list[RecordedGraph] = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        recorded.append(record(step))
        return recorded[-1].replay

    monkeypatch.setattr(decode, "capture", capture)
    monkeypatch.setattr(decode, "MIN_LIMIT", 16)
    return recorded


def model_of(name: str) -> Decoder:
    return amplify_layers(build(case(name), dtype=torch.float64, seed=1).eval())


def as_on_cuda(model: Decoder, **settings: Any) -> tuple[list[list[int]], list[KernelChoice]]:
    """The text of the test's prompts, decoded as on CUDA, and how it was decoded."""
    with record_choices("cuda") as choices:
        text = generate(model, PROMPTS, max_new_tokens=TOKENS, **settings)
    return text, [choice for choice in choices if choice.operation == "decoding"]


@pytest.mark.parametrize("name", [*COVERING, *REST])
def test_the_graph_generates_the_same_text(name: str, graphs: list[RecordedGraph]) -> None:
    model = model_of(name)
    settings = SAMPLED | {"encoder_output": encoder_output_for(model, len(PROMPTS))}
    expected = generate(model, PROMPTS, max_new_tokens=TOKENS, **settings)
    text, choices = as_on_cuda(model, **settings)
    assert text == expected
    assert [choice.kernel for choice in choices] == ["graph"], choices
    assert [graph.replays for graph in graphs] == [7, 10]  # 8 + 1 … 16 and 17 … 27 tokens; the first of each is eager


def test_greedy_text_is_the_same_too(graphs: list[RecordedGraph]) -> None:
    model = model_of("attention-gqa")
    assert as_on_cuda(model)[0] == generate(model, PROMPTS, max_new_tokens=TOKENS)
    assert graphs


def test_a_number_of_the_recording_in_the_graph_is_caught(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: each token is drawn as that of the step that was recorded."""
    model, original = model_of("attention-gqa"), Sampler.choose
    steps = iter(range(10 * TOKENS))

    def choose(self: Sampler, logits: Tensor, position: Tensor) -> Tensor:
        return original(self, logits, torch.full((), next(steps)))

    monkeypatch.setattr(Sampler, "choose", choose)
    by_steps = generate(model, PROMPTS, max_new_tokens=TOKENS, **SAMPLED)
    steps = iter(range(10 * TOKENS))
    assert as_on_cuda(model, **SAMPLED)[0] != by_steps


def test_a_step_that_reads_a_value_runs_without_a_graph_and_says_why(
    graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original = model_of("attention-gqa"), Decoder.forward

    def forward(self: Decoder, tokens: Tensor, *rest: Any) -> Any:
        tokens.sum().item()
        return original(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "forward", forward)
    text, choices = as_on_cuda(model)
    assert text == generate(model, PROMPTS, max_new_tokens=TOKENS)
    assert [choice.kernel for choice in choices] == ["graph", "pinned"]
    assert "_local_scalar_dense" in choices[1].rejected[0][1]
    assert not graphs


@pytest.mark.parametrize(
    ("tokens", "capacity", "limit"), [(5, 1000, 256), (255, 1000, 256), (256, 1000, 512), (600, 700, 700), (3, 9, 9)]
)
def test_limits_double_up_to_the_capacity(tokens: int, capacity: int, limit: int) -> None:
    assert next_limit(tokens, capacity) == limit


@pytest.mark.parametrize("name", [*COVERING, *REST])
def test_a_pinned_state_equals_a_plain_one_and_stays_where_it_is(name: str) -> None:
    model, length = model_under_test(case(name)), 8
    tokens, layout = random_tokens(model.config, 3, 14), Layout.padded([3, length, 6])

    def read(state: Any, step: int) -> tuple[Tensor, Any]:
        with torch.no_grad():
            hidden: tuple[Tensor, Any] = model(tokens[:, step : step + 1], None, state)
        return hidden

    with torch.no_grad():
        states = [model(tokens[:, :length], layout, new_state(model, 3, 24))[1] for _ in range(2)]
    plain, (first, pinned) = states[0], read(states[1].pinned(16), length)
    pinned = pinned.pinned(16)
    addresses = {name: tensor.data_ptr() for name, tensor in pinned.tensors().items()}
    got = [first]

    def advance(state: Any) -> Any:
        hidden, newer = read(state, step)
        got.append(hidden)
        return newer

    for step in range(length, 14):
        expected, plain = read(plain, step)
        if step > length:
            pinned.advance(advance)
        assert (got[-1] - expected).abs().max() < 1e-10
    assert {name: tensor.data_ptr() for name, tensor in pinned.tensors().items()} == addresses
    assert all((pinned.tensors()[name] == tensor).all() for name, tensor in plain.tensors().items() if "table" in name)


@pytest.mark.parametrize("block", [2, 5, 16])
def test_text_ends_where_it_does_when_tokens_are_read_one_by_one(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.train([small.text(4000)], small.VOCABULARY)
    model = amplify_layers(build(small.config(small.design(vocab_size=tokenizer.vocab_size)), torch.float64, seed=2))
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 2, "stop": "e"}
    pieces: dict[int, list[Any]] = {1: [], block: []}
    texts = []
    for size in pieces:
        monkeypatch.setattr(decode_module, "STEPS_PER_READ", DeviceSize(size, size))
        on_text = lambda row, piece, size=size: pieces[size].append((row, piece))  # noqa: E731
        texts.append(generate(model, ["a", "the ", ""], tokenizer, on_text=on_text, **settings))
    assert texts[0] == texts[1]
    assert pieces[1] == pieces[block]


def test_logits_that_are_no_numbers_after_the_end_of_all_rows_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("attention-gqa"), 0
    original = Decoder.forward

    def forward(self: Decoder, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        hidden, state = original(self, *args)
        return (hidden * float("nan") if calls > 6 else hidden), state

    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(decode_module, "STEPS_PER_READ", DeviceSize(4, 4))
    assert len(generate(model, PROMPTS, max_new_tokens=6)[0]) == 6
    calls = 0
    with pytest.raises(MachineError, match="not finite"):
        generate(model, PROMPTS, max_new_tokens=7)
