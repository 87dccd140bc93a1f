"""The recall tasks against plain readings of their rows: what is told, what is asked, and what the answer must be."""

import itertools
from typing import Any

import numpy as np
import pytest

from heddle.data.recall import HELD_OUT, Practice, is_recall, open_recall
from heddle.data.recall_tasks import TASKS, UNSCORED, Copying, Induction, Mqar, Needle, Parity, Permutation, Task
from heddle.data.sources import open_source
from heddle.errors import DataError

ROWS = 300
SIZES: list[Task] = [
    *(kind() for kind in TASKS.values()),
    Mqar(pairs=1, keys=1, length=3),
    Mqar(pairs=4, keys=9, length=31),
    Induction(words=5, length=9),
    Copying(tokens=1, letters=2, length=2),
    Needle(needles=1, words=2, length=4),
    Needle(needles=8, words=3, length=33),
    Parity(length=1),
    Permutation(elements=3, length=7),
]


def answers_of(task: Task, row: list[int]) -> list[int]:
    """The targets of a row, read from its inputs as the paper says; −1 where nothing is asked."""
    found = [UNSCORED] * len(row)
    if isinstance(task, Mqar):
        told = dict(zip(row[0 : 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2], strict=True))
        assert len(told) == task.pairs
        for place in range(2 * task.pairs, len(row)):
            if row[place] != 0:
                found[place] = told.pop(row[place])  # each is asked once
        assert told == {}
    elif isinstance(task, Induction):
        followers: dict[int, int] = {}
        for place, token in enumerate(row):
            if token in followers:
                found[place] = followers[token]
            if place:
                followers.setdefault(row[place - 1], token)
    elif isinstance(task, Copying):
        letters = [token for token in row if token > 1]
        marks = [place for place, token in enumerate(row) if token == 1]
        assert marks == list(range(len(row) - task.tokens, len(row)))
        for place, letter in zip(marks, letters, strict=True):
            found[place] = letter
    elif isinstance(task, Needle):
        for place in range(len(row) - task.needles, len(row)):
            assert row[place] >= task.words
            first = row.index(row[place])
            assert first < len(row) - task.needles
            found[place] = row[first + 1]
            assert found[place] < task.words
    elif isinstance(task, Parity):
        found = [row[: place + 1].count(1) % 2 for place in range(len(row))]
    else:
        every = list(itertools.permutations(range(task.elements)))
        now = list(range(task.elements))
        for place, token in enumerate(row):
            now = [every[token][thing] for thing in now]
            found[place] = every.index(tuple(now))
    return found


def check_rows(task: Task, inputs: np.ndarray, targets: np.ndarray) -> None:
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert answers_of(task, row) == target


@pytest.mark.parametrize("task", SIZES, ids=repr)
def test_every_answer_follows_from_what_stands_before(task: Task) -> None:
    inputs, targets = task.rows(3, np.arange(ROWS))
    assert inputs.shape == targets.shape == (ROWS, task.length)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.min() >= 0
    assert max(inputs.max(), targets.max()) < task.vocab_size
    assert ((targets >= 0).sum(1) >= 1).all()
    check_rows(task, inputs, targets)


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_a_wrong_answer_or_a_wrong_mask_is_caught(task: Task) -> None:
    inputs, targets = task.rows(3, np.arange(40))
    for wrong in (np.roll(targets, 1, axis=1), np.roll(targets, 1, axis=0), np.where(targets < 0, 0, targets)):
        if not np.array_equal(wrong, targets):
            with pytest.raises(AssertionError):
                check_rows(task, inputs, wrong)


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_a_row_is_a_function_of_seed_and_index(task: Task) -> None:
    whole = task.rows(7, np.arange(100))
    for index in (0, 41, 99):
        alone = task.rows(7, np.array([index]))
        assert all(np.array_equal(one[0], every[index]) for one, every in zip(alone, whole, strict=True))
    other, later = task.rows(8, np.arange(100))[0], task.rows(7, np.arange(100, 200))[0]
    for rows in (other, later):
        assert (rows != whole[0]).any(1).mean() > 0.95
    assert len(np.unique(whole[0], axis=0)) > 95


def test_rows_never_change() -> None:
    """Written down once: other rows on another machine or release would break every resumed run."""
    assert Mqar(pairs=2, keys=3, length=8).rows(0, np.arange(1))[0].tolist() == [[2, 5, 3, 6, 3, 2, 0, 0]]
    assert Permutation().rows(5, np.arange(1))[0][0, :6].tolist() == [89, 58, 48, 50, 105, 93]


@pytest.mark.parametrize("task", [kind() for kind in TASKS.values()], ids=repr)
def test_blind_picking_does_as_well_as_is_told(task: Task) -> None:
    """Among the answers that a row leaves open, one is picked at random."""
    draw = np.random.default_rng(0)
    inputs, targets = task.rows(11, np.arange(2000))
    right = total = 0.0
    for row, target in zip(inputs, targets, strict=True):
        asked = target[target >= 0]
        pool: Any = np.arange(task.vocab_size)
        if isinstance(task, Mqar | Needle):
            pool = asked
        elif isinstance(task, Induction):
            pool = np.unique(row)
        elif isinstance(task, Copying):
            pool = np.arange(2, task.vocab_size)
        right += (draw.choice(pool, len(asked)) == asked).sum()
        total += len(asked)
    assert right / total == pytest.approx(task.chance, abs=5 * (task.chance / total) ** 0.5)


def test_draws_are_even() -> None:
    inputs, targets = Parity().rows(1, np.arange(4000))
    assert inputs.mean() == pytest.approx(0.5, abs=0.01)
    assert targets.mean() == pytest.approx(0.5, abs=0.01)
    counts = np.bincount(Permutation().rows(1, np.arange(4000))[0].ravel(), minlength=120)
    assert ((counts - 64000 / 120) ** 2 / (64000 / 120)).sum() < 119 + 6 * (2 * 119) ** 0.5
    places = (Mqar().rows(1, np.arange(4000))[1] >= 0).mean(0)
    assert np.allclose(places[24:], 1)
    spread = (Mqar(length=60).rows(1, np.arange(4000))[1] >= 0).mean(0)[24:]
    assert np.allclose(spread, 12 / 36, atol=0.04)


def test_batches_and_held_out_rows() -> None:
    practice = open_recall("recall:mqar,pairs=2,keys=4,length=8")
    batch = practice.batch(1, 6, 3)
    assert batch.tokens.shape == (3, 9)
    assert batch.lengths == ((8,),) * 3
    assert batch.samples.tolist() == [6, 7, 8]
    assert np.array_equal(batch.tokens[:, :-1], practice.task.rows(1, np.arange(6, 9))[0])
    assert np.array_equal(batch.targets, practice.task.rows(1, np.arange(6, 9))[1])
    held = list(practice.held_out(7, 3))
    assert [len(one.tokens) for one in held] == [3, 3, 1]
    rows = np.concatenate([one.tokens[:, :-1] for one in held])
    assert np.array_equal(rows, practice.task.rows(HELD_OUT, np.arange(7))[0])
    assert practice.vocab_size == 9
    practice.check_vocabulary(None)
    practice.check_vocabulary(9)
    with pytest.raises(DataError, match=r"recall:mqar,pairs=2,keys=4,length=8 has 9 tokens, but vocab_size is 8: set"):
        practice.check_vocabulary(8)


def test_spellings() -> None:
    assert is_recall("recall:x")
    assert not is_recall("./recall:x")
    for name, kind in TASKS.items():
        practice = open_recall(f"recall:{name}")
        assert practice == Practice(name, kind())
        assert open_recall(practice.spelling) == practice
    assert open_recall("recall:parity,length=5").task == Parity(length=5)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("recall:mqr", "data recall:mqr: knows no task 'mqr'; did you mean 'mqar'? choices: mqar, induction,"),
        ("recall:", "data recall:: knows no task ''; choices: mqar"),
        ("recall:mqar,pair=3", "mqar has no option 'pair'; did you mean 'pairs'? choices: pairs, keys, length"),
        ("recall:mqar,", "mqar has no option ''; choices: pairs, keys, length"),
        ("recall:mqar,pairs", "pairs=: expected a whole number, such as pairs=8"),
        ("recall:mqar,pairs=-1", "pairs=-1: expected a whole number, such as pairs=8"),
        ("recall:mqar,pairs=٣", "pairs=٣: expected a whole number"),
        ("recall:mqar,pairs=1,pairs=2", "says pairs twice; keep one"),
        ("recall:mqar,pairs=0", "data recall:mqar,pairs=0: pairs=0: must be from 1 to 12, a third of length = 36"),
        ("recall:mqar,pairs=13", "pairs=13: must be from 1 to 12, a third of length = 36"),
        ("recall:mqar,keys=11", "keys=11: must be from 12 to 65536, at least pairs = 12"),
        ("recall:mqar,length=0", "length=0: must be from 3 to 1048576"),
        ("recall:induction,words=31", "words=31: must be from 32 to 65536, at least half of length = 64"),
        ("recall:copying,tokens=33", "tokens=33: must be from 1 to 32, half of length = 64"),
        ("recall:needle,needles=33", "needles=33: must be from 1 to 32, a quarter of length = 128"),
        ("recall:parity,length=0", "length=0: must be from 1 to 1048576, tokens of a row"),
        ("recall:s5,elements=7", "elements=7: must be from 2 to 6"),
    ],
)
def test_mistakes_are_told_in_a_sentence(argument: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        open_recall(argument)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_is_no_text() -> None:
    with pytest.raises(DataError, match=r"data recall:mqar is a task, not text: give it to train as the only --data"):
        open_source("recall:mqar@2")
