"""Layouts given as tensors: what is accepted equals each document alone in every mixer, and all else is refused."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import (
    assert_close,
    encoder_output_for,
    fork,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout, _check_order, _check_range, layout_facts
from heddle.parts.position_table import PositionTable
from heddle.parts.positions.rope import Rope
from tests.cases import CASES, alone, attention, case, delta, design, layer
from tests.laws.planting import Plant, assigned, condition, constant, replaced, result
from tests.random_layouts import random_layout, random_tensors

DYNAMIC = {"kind": "rope", "scaling": {"kind": "ntk", "factor": 4.0, "original_length": 3}}
LONG = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 4.0, 9.0], "original_length": 3, "factor": 4.0}
LENGTH_DEPENDENT = {
    "dynamic ntk": alone(kv_heads=2, position=DYNAMIC),
    "longrope": alone(window=4, position={"kind": "rope", "scaling": {"kind": "longrope", **LONG}}),
    "longrope-bidirectional": alone(causal=False, position={"kind": "rope", "scaling": {"kind": "longrope", **LONG}}),
}
DESIGNS = LENGTH_DEPENDENT | {
    "hybrid": design(layer(attention(window=3)), delta(repeat=1), layer(attention(kv_heads=2))),
    "attention-window-7": CASES["attention-window-7"],
    "attention-bidirectional-window": CASES["attention-bidirectional-window"],
    "alibi-window": CASES["alibi-window"],
    "sinusoidal": CASES["sinusoidal"],
}


def one_case_of_each_mixer() -> Iterator[str]:
    """The first case of each kind of mixer, causal and bidirectional."""
    covered: set[tuple[str, bool]] = set()
    for name in CASES:
        mixers = [layer.mixer for _, layer in case(name).expand() if layer.mixer is not None]
        kinds = {(mixer.kind, getattr(mixer, "causal", True)) for mixer in mixers}
        if not kinds <= covered:
            covered |= kinds
            yield name


NAMES = sorted({*DESIGNS, *one_case_of_each_mixer()})


def model_of(name: str) -> Decoder:
    return model_under_test(parse_config(ModelConfig, DESIGNS[name]) if name in DESIGNS else case(name))


def documents(positions: list[int], segment_ids: list[int]) -> list[list[int]] | None:
    """The columns of each document of a row, read token by token; None if the row is no layout."""
    result: list[list[int]] = []
    last = (-1, -1)
    for column, token in enumerate(zip(positions, segment_ids, strict=True)):
        if token[0] < -1 or (token[0] >= 0 and token[1] < 0):
            return None
        if token[0] < 0:
            continue
        if not result or token[1] > last[1]:
            result.append([])
        elif token != (last[0] + 1, last[1]):
            return None
        result[-1].append(column)
        last = token
    return result


def rows_of(layout: Layout) -> list[list[list[int]]]:
    rows = [documents(*row) for row in zip(layout.positions.tolist(), layout.dense_segment_ids.tolist(), strict=True)]
    assert None not in rows
    return [row for row in rows if row is not None]


def check_against_documents_alone(model: Decoder, tokens: Tensor, layout: Layout, what: str) -> None:
    hidden = forward_no_grad(model, tokens, layout)
    for row, columns_of_documents in enumerate(rows_of(layout)):
        for columns in columns_of_documents:
            start = int(layout.positions[row, columns[0]])
            by_itself = forward_no_grad(model, tokens[row : row + 1, columns], Layout.causal(1, len(columns), start))
            assert_close(hidden[row : row + 1, columns], by_itself, f"{what}: row {row}, columns {columns}")


def draws(name: str, count: int) -> Iterator[tuple[random.Random, int, int]]:
    for seed in range(count):
        generator = random.Random(f"{name} {seed}")
        yield generator, generator.randint(1, 3), generator.randint(1, 12)


def documents_alone(name: str, count: int) -> None:
    model = model_of(name)
    for generator, rows, length in draws(name, count):
        layout = random_layout(generator, rows, length)
        raw = Layout(layout.positions, layout.segment_ids, has_padding=False, start=0)  # its facts are not believed
        for way, entering in (("Layout.of", layout), ("Layout", raw)):
            check_against_documents_alone(model, random_tokens(model.config, rows, length), entering, way)


@pytest.mark.parametrize("name", NAMES)
def test_each_document_is_as_alone(name: str) -> None:
    documents_alone(name, 2)


def chunks_continue(name: str, count: int) -> None:
    """A random layout read in random chunks, each made from its own tensors, equals one call."""
    model = model_of(name)
    if not model.causal:
        return
    for generator, rows, length in draws(f"chunks of {name}", count):
        layout = random_layout(generator, rows, length)
        tokens, lengths = random_tokens(model.config, rows, length), None
        if model.length_dependent:  # with a state each row is one text
            if any(len(row) > 1 for row in layout.text_lengths):
                continue
            lengths = [sum(row) or 1 for row in layout.text_lengths]
        state = model.init_state(rows, generator.choice((None, length)), encoder_output_for(model, rows), 0, lengths)
        whole, start, chunks = forward_no_grad(model, tokens, layout), 0, []
        while start < length:
            stop = generator.randint(start + 1, length)
            ids = None if layout.segment_ids is None else layout.segment_ids[:, start:stop]
            chunk = Layout.of(layout.positions[:, start:stop], ids)
            hidden, state = forward_with_state(model, state, tokens[:, start:stop], chunk)
            chunks.append(hidden)
            start = stop
        is_token = (layout.positions >= 0)[..., None]
        assert_close(torch.cat(chunks, dim=1) * is_token, whole * is_token, f"{rows} rows of {length} in chunks")


@pytest.mark.parametrize("name", NAMES)
def test_chunks_go_on_in_their_documents(name: str) -> None:
    chunks_continue(name, 4)


def test_documents_are_counted_from_the_first_token() -> None:
    """Whatever the segment ids of padding before it are."""
    layout = Layout.of(torch.tensor([[-1, 4, -1, 5, 0, -1]]), torch.tensor([[7, 2, 0, 2, 9, 1]]))
    assert layout.call_segment_ids is not None
    assert layout.call_segment_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert layout.text_lengths == ((2, 1),)


def changed(generator: random.Random, positions: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same tensors with a number or two columns of one row changed."""
    tensors = positions.clone(), segment_ids.clone()
    row, column, other = (generator.randrange(n) for n in (positions.shape[0], *[positions.shape[1]] * 2))
    if generator.random() < 0.3:
        for tensor in tensors:
            tensor[row, [column, other]] = tensor[row, [other, column]]
    else:
        target = generator.choice(tensors)
        target[row, column] = generator.choice((-2, -1, 0, 1, int(target[row, column]) + generator.choice((-1, 1, 2))))
    return tensors


def refused_or_right(count: int, model: Decoder | None = None) -> None:
    outcomes = {True: 0, False: 0}
    for generator, rows, length in draws("changed", count):
        positions, ids = random_tensors(generator, rows, length)
        positions, ids = changed(generator, positions, torch.zeros_like(positions) if ids is None else ids)
        pairs = zip(positions.tolist(), ids.tolist(), strict=True)
        is_layout = all(documents(*pair) is not None for pair in pairs)
        outcomes[is_layout] += 1
        if is_layout and model is not None:
            layout = Layout.of(positions, ids)
            check_against_documents_alone(model, random_tokens(model.config, rows, length), layout, "changed")
        elif is_layout:
            assert Layout.of(positions, ids).is_checked
        else:
            with pytest.raises(ConfigError, match=r"^layout: (position|segment id) \S+ .*row \d"):
                Layout.of(positions, ids)
    assert min(outcomes.values()) > count // 5


def test_all_else_is_refused() -> None:
    refused_or_right(1500)


def length_dependent_row(name: str) -> tuple[Decoder, Tensor, Tensor]:
    """A model, a batch of 2 with an 11-token text beside one of 3, and the short text's hidden states alone."""
    model = model_of(name)
    tokens = random_tokens(model.config, 2, 11)
    return model, tokens, forward_no_grad(model, tokens[:1, :3])


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_a_longer_neighbor_changes_no_text(name: str) -> None:
    """Below and above the switch of frequencies at 3 tokens: in a batch, in a packed row, as lengths and as tensors."""
    model, tokens, _ = length_dependent_row(name)
    right = Layout.padded([3, 11], side="right")
    packed = Layout.packed([[3, 8], [8, 3]])
    for layout in (right, packed):
        for entering in (layout, Layout.of(layout.positions, layout.segment_ids), layout.map_tensors(lambda x: x)):
            check_against_documents_alone(model, tokens, entering, "texts of several lengths")
    both = forward_no_grad(model, tokens, Layout.packed([[5, 6], [6, 5]]))
    tensors = Layout.of(torch.tensor([[*range(5), *range(6)], [*range(6), *range(5)]]), torch.tensor(IDS))
    assert torch.equal(forward_no_grad(model, tokens, tensors), both)


IDS = [[0] * 5 + [7] * 6, [2] * 6 + [3] * 5]


@pytest.mark.parametrize("name", [name for name in LENGTH_DEPENDENT if "bidirectional" not in name])
def test_a_state_knows_the_length_of_each_text(name: str) -> None:
    model, tokens, short = length_dependent_row(name)
    state = model.init_state(2, text_lengths=[3, 11])
    hidden, state = forward_with_state(model, state, tokens[:, :2])
    last, _ = forward_with_state(model, state.select([1, 0]), tokens.flip(0)[:, 2:3])
    hidden = torch.cat((hidden, last.flip(0)), dim=1)
    assert_close(hidden[:1], short, "the short text, in a batch with a longer one")
    for lengths in ([3], [3, 0]):
        with pytest.raises(ConfigError, match=r"^state: text_lengths = \[.*\]"):
            model.init_state(2, text_lengths=lengths)


def test_text_lengths_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^state:.*text_lengths"):
        model_of("attention-mha").init_state(1, text_lengths=[4])


@pytest.mark.parametrize("name", ["hybrid", "attention-mha"])
@pytest.mark.parametrize(
    ("positions", "segment_ids", "message"),
    [
        ([[0, 1]], None, r"position 0.*row 0.*5"),
        ([[7, 8]], None, r"position 7.*row 0.*5"),
        ([[-1, 7]], [[0, 1]], r"position 7.*row 0.*5"),
        ([[0, 1]], [[0, 0]], r"segment id 0.*row 0.*1"),
        ([[6, 0]], [[1, 0]], r"segment id 0.*1.*token 1.*row 0"),
    ],
)
def test_a_call_that_does_not_go_on_is_refused(
    name: str, positions: list[list[int]], segment_ids: list[list[int]] | None, message: str
) -> None:
    """After documents of 3 and 6 tokens, the newest of which is at position 5. The handle stays valid."""
    model = model_of(name)
    tokens = random_tokens(model.config, 1, 11)
    _, state = forward_with_state(model, new_state(model, 1), tokens[:, :9], Layout.packed([[3, 6]]))
    ids = None if segment_ids is None else torch.tensor(segment_ids)
    for make in (Layout.of, Layout):
        with pytest.raises(ConfigError, match=f"^layout: {message}"):
            forward_with_state(model, state, tokens[:, 9:], make(torch.tensor(positions), ids))
    right = Layout.of(torch.tensor([[6, 7]]))  # in the document of the newest token
    expected, _ = forward_with_state(model, fork(state), tokens[:, 9:])
    assert_close(forward_with_state(model, state, tokens[:, 9:], right)[0], expected, "after a refused call")


NOT_NEXT = ([[7, 8]], None, "position 7 in row 0 follows 5, the state's newest")
BUGS: list[tuple[Plant, Callable[[], object]]] = [
    (assigned(_check_order, "is_wrong", np.zeros_like, nth=1), lambda: refused_or_right(100)),
    (assigned(_check_order, "is_wrong", np.zeros_like, nth=0), lambda: refused_or_right(100)),
    (constant(_check_range, 1, 9, nth=0), lambda: refused_or_right(100)),
    (result(layout_facts, lambda facts: facts._replace(doc_lengths=tuple((sum(row),) for row in facts.doc_lengths))),
     lambda: documents_alone("attention-mha", 20)),
    (replaced(Layout.checked, lambda layout: layout), lambda: documents_alone("attention-mha", 9)),
    (condition(Layout._call_segment_ids, "padding", True, nth=0), test_documents_are_counted_from_the_first_token),
    (condition(Rope._inv_freq, "all", True), lambda: test_a_longer_neighbor_changes_no_text("dynamic ntk")),
    (assigned(PositionTable.extend, "check", lambda check: False),
     lambda: test_a_call_that_does_not_go_on_is_refused("hybrid", *NOT_NEXT)),
    (condition(PositionTable.select, "texts", True),
     lambda: test_a_state_knows_the_length_of_each_text("longrope")),
]  # fmt: skip


@pytest.mark.parametrize("bug", range(len(BUGS)))
def test_a_planted_bug_is_caught(bug: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        check()


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_many_layouts(name: str) -> None:
    documents_alone(name, 60)
    chunks_continue(name, 60)
    refused_or_right(100, model_of(name))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_tensors_without_whole_numbers_are_refused(dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=f"positions.*{dtype}"):
        Layout(zeros.to(dtype))
    with pytest.raises(ConfigError, match=f"segment_ids.*{dtype}"):
        Layout(zeros, zeros.to(dtype))
