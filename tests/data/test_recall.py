"""The synthetic tasks: their targets against a plain solver, their ranges, and their options."""

import itertools
from typing import Any

import numpy as np
import pytest

from heddle.data.recall import (
    IGNORE_INDEX,
    TASKS,
    VALIDATION_SEED,
    Copying,
    Induction,
    Mqar,
    MqarMixture,
    Needle,
    Parity,
    Permutation,
    Task,
    TaskStream,
    is_recall_argument,
    parse_recall,
)
from heddle.data.sources import parse_source
from heddle.errors import DataError

ROWS = 300
TASK_SIZES: list[Task] = [
    *(kind() for kind in TASKS.values()),
    Mqar(pairs=1, keys=1, length=3),
    Mqar(pairs=4, keys=9, length=31),
    Induction(words=5, length=9),
    Copying(tokens=1, letters=2, length=2),
    Needle(needles=1, words=2, length=4),
    Needle(needles=8, words=3, length=33),
    Parity(length=1),
    Permutation(elements=3, length=7),
    MqarMixture(pairs=8, smallest=1),
]


def documents_of(task: MqarMixture, row: list[int]) -> list[list[int]]:
    """The documents of a row. The first two keys in a row tell how many pairs each of them has."""
    is_key = [token <= task.keys for token in [*row, 1]]
    pairs = next(start for start in range(2, len(row), 2) if is_key[start] and is_key[start + 1]) // 2
    return [row[start : start + 3 * pairs] for start in range(0, len(row), 3 * pairs)]


def expected_targets(task: Task, row: list[int]) -> list[int]:
    """The targets of a row, computed from its inputs as the paper says; −1 where there is none."""
    targets = [IGNORE_INDEX] * len(row)
    if isinstance(task, Mqar):
        pairs = dict(zip(row[0 : 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2], strict=True))
        assert len(pairs) == task.pairs
        for position in range(2 * task.pairs, len(row)):
            if row[position] != 0:
                targets[position] = pairs.pop(row[position])  # each key is queried once
        assert pairs == {}
    elif isinstance(task, MqarMixture):
        documents = documents_of(task, row)
        single = Mqar(len(documents[0]) // 3, task.keys, len(documents[0]))
        return [target for document in documents for target in expected_targets(single, document)]
    elif isinstance(task, Induction):
        followers: dict[int, int] = {}
        for position, token in enumerate(row):
            if token in followers:
                targets[position] = followers[token]
            if position:
                followers.setdefault(row[position - 1], token)
    elif isinstance(task, Copying):
        letters = [token for token in row if token > 1]
        marks = [position for position, token in enumerate(row) if token == 1]
        assert marks == list(range(len(row) - task.tokens, len(row)))
        for position, letter in zip(marks, letters, strict=True):
            targets[position] = letter
    elif isinstance(task, Needle):
        for position in range(len(row) - task.needles, len(row)):
            assert row[position] >= task.words
            first = row.index(row[position])
            assert first < len(row) - task.needles
            targets[position] = row[first + 1]
            assert targets[position] < task.words
    elif isinstance(task, Parity):
        targets = [row[: position + 1].count(1) % 2 for position in range(len(row))]
    else:
        all_permutations = list(itertools.permutations(range(task.elements)))
        state = list(range(task.elements))
        for position, token in enumerate(row):
            state = [all_permutations[token][element] for element in state]
            targets[position] = all_permutations.index(tuple(state))
    return targets


def check_rows(task: Task, inputs: np.ndarray, targets: np.ndarray) -> None:
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert expected_targets(task, row) == target


@pytest.mark.parametrize("task", TASK_SIZES, ids=repr)
def test_every_target_follows_from_the_inputs_before_it(task: Task) -> None:
    inputs, targets = task.draw_rows(3, np.arange(ROWS))
    assert inputs.shape == targets.shape == (ROWS, task.length)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.min() >= 0
    assert max(inputs.max(), targets.max()) < task.vocab_size
    assert ((targets >= 0).sum(1) >= 1).all()
    check_rows(task, inputs, targets)


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_a_wrong_answer_or_a_wrong_mask_is_caught(task: Task) -> None:
    inputs, targets = task.draw_rows(3, np.arange(40))
    for wrong in (np.roll(targets, 1, axis=1), np.roll(targets, 1, axis=0), np.where(targets < 0, 0, targets)):
        if not np.array_equal(wrong, targets):
            with pytest.raises(AssertionError):
                check_rows(task, inputs, wrong)


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_a_row_is_a_function_of_seed_and_index(task: Task) -> None:
    whole = task.draw_rows(7, np.arange(100))
    for index in (0, 41, 99):
        alone = task.draw_rows(7, np.array([index]))
        assert all(np.array_equal(single[0], rows[index]) for single, rows in zip(alone, whole, strict=True))
    other, later = task.draw_rows(8, np.arange(100))[0], task.draw_rows(7, np.arange(100, 200))[0]
    for rows in (other, later):
        assert (rows != whole[0]).any(1).mean() > 0.95
    assert len(np.unique(whole[0], axis=0)) > 95


def test_rows_never_change() -> None:
    """Written down once: other rows on another machine or release would break every resumed run."""
    assert Mqar(pairs=2, keys=3, length=8).draw_rows(0, np.arange(1))[0].tolist() == [[2, 5, 3, 6, 3, 2, 0, 0]]
    assert Permutation().draw_rows(5, np.arange(1))[0][0, :6].tolist() == [89, 58, 48, 50, 105, 93]
    mixture = MqarMixture(pairs=2, smallest=1)
    assert mixture.draw_rows(0, np.arange(2))[0].tolist() == [[1, 5, 1, 2, 5, 2], [2, 5, 3, 8, 3, 2]]


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_blind_picking_does_as_well_as_is_told(task: Task) -> None:
    """A random guess among the answers that a row allows."""
    draw = np.random.default_rng(0)
    inputs, targets = task.draw_rows(11, np.arange(2000))
    right = total = 0.0
    for row, target in zip(inputs, targets, strict=True):
        asked = target[target >= 0]
        pool: Any = np.arange(task.vocab_size)
        if isinstance(task, MqarMixture):
            pairs = len(documents_of(task, row.tolist())[0]) // 3
            right += (draw.permuted(asked.reshape(-1, pairs), axis=1).ravel() == asked).sum()
            total += len(asked)
            continue
        elif isinstance(task, Mqar | Needle):
            pool = asked
        elif isinstance(task, Induction):
            pool = np.unique(row)
        elif isinstance(task, Copying):
            pool = np.arange(2, task.vocab_size)
        right += (draw.choice(pool, len(asked)) == asked).sum()
        total += len(asked)
    assert right / total == pytest.approx(task.chance_accuracy, abs=5 * (task.chance_accuracy / total) ** 0.5)


def test_draws_are_even() -> None:
    inputs, targets = Parity().draw_rows(1, np.arange(4000))
    assert inputs.mean() == pytest.approx(0.5, abs=0.01)
    assert targets.mean() == pytest.approx(0.5, abs=0.01)
    counts = np.bincount(Permutation().draw_rows(1, np.arange(4000))[0].ravel(), minlength=120)
    assert ((counts - 64000 / 120) ** 2 / (64000 / 120)).sum() < 119 + 6 * (2 * 119) ** 0.5
    positions = (Mqar().draw_rows(1, np.arange(4000))[1] >= 0).mean(0)
    assert np.allclose(positions[24:], 1)
    spread = (Mqar(length=60).draw_rows(1, np.arange(4000))[1] >= 0).mean(0)[24:]
    assert np.allclose(spread, 12 / 36, atol=0.04)


def test_batches_and_validation_rows() -> None:
    task_stream = parse_recall("recall:mqar,pairs=2,keys=4,length=8")
    batch = task_stream.batch(1, 6, 3)
    assert batch.tokens.shape == (3, 9)
    assert batch.doc_lengths == ((8,),) * 3
    assert batch.sample_indices.tolist() == [6, 7, 8]
    assert np.array_equal(batch.tokens[:, :-1], task_stream.task.draw_rows(1, np.arange(6, 9))[0])
    assert np.array_equal(batch.targets, task_stream.task.draw_rows(1, np.arange(6, 9))[1])
    batches = list(task_stream.validation_batches(7, 3))
    assert [len(part.tokens) for part in batches] == [3, 3, 1]
    rows = np.concatenate([part.tokens[:, :-1] for part in batches])
    assert np.array_equal(rows, task_stream.task.draw_rows(VALIDATION_SEED, np.arange(7))[0])
    assert task_stream.vocab_size == 9
    task_stream.check_vocab_size(None)
    task_stream.check_vocab_size(9)
    with pytest.raises(DataError, match=r"recall:mqar,pairs=2,keys=4,length=8.*9 tokens.*vocab_size.*8.*set"):
        task_stream.check_vocab_size(8)


def test_rows_of_a_mixture_are_packed_with_documents_of_one_number_of_pairs() -> None:
    task_stream = parse_recall("recall:mqar_mixture,pairs=8,smallest=2")
    assert isinstance(task_stream.task, MqarMixture)
    assert task_stream.task.pair_counts == (2, 4, 8)
    batch = task_stream.batch(0, 2, 4)
    assert batch.doc_lengths == ((24,), (6,) * 4, (12,) * 2, (24,))
    assert ((batch.targets >= 0).sum(1) == 8).all()
    for row, lengths in zip(batch.tokens[:, :-1].tolist(), batch.doc_lengths, strict=True):
        assert [len(document) for document in documents_of(task_stream.task, row)] == list(lengths)
    # short documents have the first keys only, and no number of pairs repeats the rows of another
    assert {token for token in batch.tokens[1, :-1].tolist() if token <= 16} <= {1, 2, 3, 4}
    first, second = (task_stream.batch(0, row, 1).tokens[0, :6].tolist() for row in (0, 1))
    assert first != second


def test_arguments() -> None:
    assert is_recall_argument("recall:x")
    assert not is_recall_argument("./recall:x")
    for name, kind in TASKS.items():
        task_stream = parse_recall(f"recall:{name}")
        assert task_stream == TaskStream(name, kind())
        assert parse_recall(task_stream.argument) == task_stream
    assert parse_recall("recall:parity,length=5").task == Parity(length=5)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("recall:mqr", "data recall:mqr:"),
        ("recall:", "data recall:: unknown task ''; choices: mqar"),
        ("recall:mqar,pair=3", "pairs, keys, length"),
        ("recall:mqar,", "pairs, keys, length"),
        ("recall:mqar,pairs", "pairs=:"),
        ("recall:mqar,pairs=-1", "pairs=-1:"),
        ("recall:mqar,pairs=٣", "pairs=٣:"),
        ("recall:mqar,pairs=1,pairs=2", "has pairs twice; keep one"),
        ("recall:mqar,pairs=0", "data recall:mqar,pairs=0: pairs=0"),
        ("recall:mqar,pairs=13", "pairs=13:"),
        ("recall:mqar,keys=11", "keys=11:"),
        ("recall:mqar,length=0", "length=0: must be from 3"),
        ("recall:induction,words=31", "words=31:"),
        ("recall:copying,tokens=33", "tokens=33:"),
        ("recall:needle,needles=33", "needles=33:"),
        ("recall:parity,length=0", "length=0: must be from 1"),
        ("recall:mqar_mixture,pairs=12,smallest=8", "pairs=12:"),
        ("recall:mqar_mixture,smallest=0", "smallest=0:"),
        ("recall:mqar_mixture,pairs=8192", "pairs=8192:"),
        ("recall:s5,elements=7", "elements=7:"),
    ],
)
def test_mistakes_are_one_sentence(argument: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_recall(argument)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_is_no_text() -> None:
    with pytest.raises(DataError, match="recall:mqar"):
        parse_source("recall:mqar@2")
