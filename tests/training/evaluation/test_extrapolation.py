"""The same text in pieces of many lengths: against a plain loop, and which text is chosen."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.training.evaluation import length_extrapolation as module
from heddle.training.evaluation.length_extrapolation import (
    ExtrapolationPlan,
    evaluate_extrapolation,
    plan_extrapolation,
    span_batches,
)
from heddle.training.evaluation.scores import bits_and_bytes
from tests import small

VOCABULARY = 40
SIZES = np.array([0, *(1 + token % 4 for token in range(1, VOCABULARY))], dtype=np.int64)  # token 0 is the end
Read = list[tuple[float, int]]


class Text:
    """Documents of given lengths, the end token that opens each counted, in memory."""

    def __init__(self, *lengths: int) -> None:
        self.offsets = np.cumsum([0, *lengths[:-1]]).astype(np.uint64) if lengths else np.zeros(0, np.uint64)
        self.tokens = np.random.default_rng(3).integers(1, VOCABULARY, sum(lengths))
        self.tokens[self.offsets.astype(np.int64)] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        return self.tokens[start:stop]


TEXT = Text(30, 200, 12, 150, 33, 90)
CHOSEN = plan_extrapolation(TEXT, 8, 4, 6 * 3 * 32 * 6)


@pytest.fixture
def model() -> Decoder:
    data = small.dropping() | {"vocab_size": VOCABULARY, "initialization": {"std": 0.3}}
    return build(small.config(data), dtype=torch.float64, seed=4)


def plainly(model: Decoder, stretch: np.ndarray, context: int) -> tuple[float, int]:
    """Bits and bytes of a stretch, one target after another, each from the tokens before it in its piece."""
    bits, size = 0.0, 0
    for position in range(1, len(stretch)):
        begin = (position - 1) // context * context
        with torch.no_grad():
            hidden, _ = model(torch.from_numpy(stretch[begin:position])[None])
            bits -= float(model.head(hidden[0, -1]).log_softmax(-1)[stretch[position]]) / math.log(2)
        size += int(SIZES[stretch[position]])
    return bits, size


def agrees(model: Decoder, multiple: int, scores: Read) -> bool:
    expected = [plainly(model, TEXT.read(start, start + 33), 8 * multiple) for start in CHOSEN.starts]
    return all(math.isclose(a, b, rel_tol=1e-11) and n == m for (a, n), (b, m) in zip(scores, expected, strict=True))


def test_each_multiple_equals_a_plain_loop(model: Decoder) -> None:
    model.train()
    readings = evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)
    assert model.training
    model.eval()
    assert [reading.multiple for reading in readings] == [1, 2, 4]
    for reading in readings:
        assert agrees(model, reading.multiple, reading.scores)
        assert reading.refusal is None
    bits = [[bits for bits, _ in reading.scores] for reading in readings]
    assert len({tuple(row_bits) for row_bits in bits}) == 3
    # another multiple's answer is told apart
    assert not agrees(model, 2, readings[0].scores)


def targets_of(cut: Callable[[Any, ExtrapolationPlan, int], Iterator[Batch]], multiple: int) -> list[list[int]]:
    return [batch.tokens[:, 1:].ravel().tolist() for batch in cut(TEXT, CHOSEN, multiple)]


def same_text(cut: Callable[[Any, ExtrapolationPlan, int], Iterator[Batch]]) -> bool:
    """Whether each multiple asks for every token of every stretch once, in order, knowing the token before."""
    whole = [TEXT.read(start + 1, start + 33).tolist() for start in CHOSEN.starts]
    chained = all(
        (batch.tokens[1:, 0] == batch.tokens[:-1, -1]).all() and batch.doc_lengths == ((8 * k,),) * (4 // k)
        for k in CHOSEN.multiples
        for batch in cut(TEXT, CHOSEN, k)
    )
    return chained and all(targets_of(cut, multiple) == whole for multiple in CHOSEN.multiples)


def cutting(step: Callable[[int], int], shift: Callable[[int], int]) -> Callable[[Any, ExtrapolationPlan, int], Any]:
    """A wrong way to cut."""

    def cut(text: Text, stretches: ExtrapolationPlan, multiple: int) -> Iterator[Batch]:
        length = multiple * stretches.sequence_length
        for start in stretches.starts:
            begins = range(start, start + stretches.span_length - length + 1, step(length))
            rows = [text.read(begin + shift(length), begin + shift(length) + length + 1) for begin in begins]
            yield Batch(np.stack(rows), ((length,),) * len(rows), np.arange(len(rows)))

    return cut


def test_every_multiple_reads_the_same_bytes() -> None:
    assert same_text(span_batches)
    assert same_text(cutting(lambda length: length, lambda length: 0))
    assert {SIZES[targets_of(span_batches, multiple)].sum() for multiple in CHOSEN.multiples} == {
        sum(SIZES[TEXT.read(start + 1, start + 33)].sum() for start in CHOSEN.starts)
    }


@pytest.mark.parametrize(
    ("step", "shift"),
    [
        (lambda length: length // 2, lambda length: 0),  # pieces overlap
        (lambda length: length + 1, lambda length: 0),  # the token between two pieces is lost
        (lambda length: length, lambda length: length // 8),  # longer pieces begin later
        (lambda length: length, lambda length: -1),
    ],
)
def test_planted_cuts_are_caught(
    step: Callable[[int], int], shift: Callable[[int], int], model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = cutting(step, shift)
    assert not same_text(wrong)
    monkeypatch.setattr(module, "span_batches", wrong)
    readings = evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)
    assert not all(agrees(model.eval(), reading.multiple, reading.scores) for reading in readings)


def documents_of(text: Text, chosen: ExtrapolationPlan) -> list[int]:
    """The document of each stretch, which must hold all of it."""
    edges = [*text.offsets.tolist(), len(text)]
    documents = []
    for start in chosen.starts:
        document = int(np.searchsorted(edges, start, side="right")) - 1
        assert start + chosen.span_length + 1 <= edges[document + 1]
        documents.append(document)
    return documents


def test_the_longest_documents_are_read_first_and_evenly() -> None:
    few = plan_extrapolation(TEXT, 8, 4, 0)
    assert (few.multiples, few.span_length, few.note) == ((1, 2, 4), 32, None)
    assert documents_of(TEXT, few) == [1, 3]
    assert documents_of(TEXT, CHOSEN) == [1, 1, 3, 3, 4, 5]  # the fifth holds one stretch, exactly
    assert CHOSEN.document_count == 4
    assert few.starts == (30 + 32 * 3, 242 + 32 * 2)  # in the middle of six, and of four
    every = plan_extrapolation(TEXT, 8, 4, 10**9)
    assert documents_of(TEXT, every) == [1] * 6 + [3] * 4 + [4] + [5] * 2
    assert len(set(every.starts)) == 13
    assert min(np.diff(every.starts)) >= 32
    assert plan_extrapolation(TEXT, 8, 4, 6 * 3 * 32 * 6) == CHOSEN
    assert len(plan_extrapolation(Text(10_000), 8, 4, 10**9).starts) == module.MAX_SPANS


def test_all_multiples_together_read_a_sixth_of_what_a_run_trains_on() -> None:
    for trained in (3100, 5000, 9000):
        chosen = plan_extrapolation(Text(*[300] * 40), 8, 8, trained)
        read = len(chosen.starts) * chosen.span_length * len(chosen.multiples)
        assert trained / 6 - 256 < read <= trained / 6


def test_short_documents_bound_the_multiples() -> None:
    assert plan_extrapolation(Text(65), 8, 8, 0).multiples == (1, 2, 4, 8)
    short = plan_extrapolation(Text(64, 40), 8, 8, 0)
    assert short.multiples == (1, 2, 4)
    assert short.note == "the longest held-out document has 64 tokens, so 4 times the context is the largest"
    none = plan_extrapolation(Text(16, 16), 8, 8, 0)
    assert (none.multiples, none.starts, none.span_length) == ((), (), 0)
    assert none.note == "the longest held-out document has 16 tokens, fewer than two contexts of 8 and one more"
    assert plan_extrapolation(Text(), 8, 8, 0).multiples == ()
    assert plan_extrapolation(TEXT, 8, 1, 10**6) == ExtrapolationPlan(8)


def test_a_refused_length_tells_why_and_stops_no_other() -> None:
    data = small.design(vocab_size=VOCABULARY, embedding={"position": {"kind": "learned", "length": 16}})
    data["layers"][0]["mixer"]["position"] = None
    model = build(small.config(data), seed=0)
    single, double, quadruple = evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)
    assert len(single.scores) == len(double.scores) == 6
    assert single.scores != double.scores
    assert quadruple.scores == []
    assert quadruple.refusal is not None
    assert "position 31" in quadruple.refusal


@pytest.mark.parametrize(("error", "refusal"), [(MemoryError(), "out of memory"), (ConfigError("why"), "why")])
def test_what_a_length_can_fail_by(
    error: Exception, refusal: str, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bits_and_bytes

    def measure(model: Decoder, batches: list[Batch], *more: Any) -> Read:
        if batches[0].tokens.shape[1] > 16:
            raise error
        return right(model, batches, *more)

    monkeypatch.setattr(module, "bits_and_bytes", measure)
    readings = evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)
    assert [reading.refusal for reading in readings] == [None, refusal, refusal]
    monkeypatch.setattr(module, "bits_and_bytes", lambda *batches: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)


def test_numbers_that_are_not_finite_are_kept(model: Decoder) -> None:
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))
    readings = evaluate_extrapolation(model, TEXT, CHOSEN, SIZES)
    assert all(math.isnan(bits) and size > 0 for reading in readings for bits, size in reading.scores)
