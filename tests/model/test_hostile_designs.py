"""Designs with absurd numbers: each is answered or refused in a sentence, before memory is taken for it."""

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.model.load_config import load_config
from tests.cases import CASES, Data
from tests.model.test_fuzz import paths, with_value_at

ABSURD = (10**9, 2**20)
MORE = (2**31 - 1, 2**16, 4096, -(2**31), 10**4000)
MAX_SENTENCE = 400
MAX_KIB = 64 * 1024


def at(design: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        design = design[step]
    return design


def number_fields() -> Iterator[tuple[Data, tuple[str | int, ...]]]:
    """A design for each field of each kind that holds a number, and the field's path."""
    seen: set[tuple[Any, ...]] = set()
    for name in sorted(CASES):
        for path in paths(CASES[name]):
            owner, field = at(CASES[name], path[:-1]), path[-1]
            key = (
                (owner.get("kind"), *(step for step in path if isinstance(step, str)))
                if isinstance(owner, dict)
                else ()
            )
            if key and type(owner[field]) in (int, float) and key not in seen:
                seen.add(key)
                yield CASES[name], path


def sentence(design: Data) -> str:
    """The sentence that refuses a design, or nothing."""
    try:
        load_config(design)
    except ConfigError as error:
        return str(error)
    return ""


def peak_kib() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def memory_of(design: Data) -> tuple[int, str]:
    """KiB beyond those before, and the sentence."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that other tests have freed would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_kib()
    reason = sentence(design)
    return peak_kib() - before, reason


def check(values: tuple[int, ...]) -> int:
    kinds = 0
    for design, path in number_fields():
        load_config(design)  # imports what the kind needs
        for value in values:
            kib, reason = memory_of(with_value_at(design, path, value))
            assert kib < MAX_KIB, (path, value, kib)
            assert len(reason) <= MAX_SENTENCE, reason
            kinds += 1
    return kinds


def test_an_absurd_number_takes_no_memory() -> None:
    assert check(ABSURD) >= 250


@pytest.mark.soak
def test_more_absurd_numbers_take_no_memory() -> None:
    assert check(MORE) >= 600


def test_memory_that_a_design_takes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is able to fail."""
    monkeypatch.setattr("tests.model.test_hostile_designs.load_config", lambda _: bytearray(b"1") * (96 * 2**20))
    assert memory_of({})[0] > MAX_KIB


WRONG: tuple[Any, ...] = ("no number", {}, [[]], float("nan"), "\x1b[2J", "9" * 5000, [None] * 1000, {"kind": "none"})


def check_random(count: int, seed: int) -> None:
    """A wrong value at a random number, truth value or word of a random design names its field."""
    draws = random.Random(seed)
    places = {
        name: [path for path in paths(design) if type(at(design, path)) in (int, float, bool)]
        for name, design in CASES.items()
    }
    names = sorted(name for name in CASES if places[name])
    for _ in range(count):
        name = draws.choice(names)
        path = draws.choice(places[name])
        reason = sentence(with_value_at(CASES[name], path, draws.choice(WRONG)))
        field = next(str(step) for step in reversed(path) if isinstance(step, str))
        assert field in reason, (name, path, reason)
        assert len(reason) <= MAX_SENTENCE, reason


def test_a_wrong_value_in_a_random_design_names_its_field() -> None:
    check_random(2000, seed=0)


@pytest.mark.soak
def test_a_wrong_value_in_many_random_designs_names_its_field() -> None:
    check_random(100_000, seed=1)


@pytest.mark.parametrize("answer", ["layers[0]: is wrong; choose another", ""])
def test_a_refusal_without_its_field_is_seen(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that names no field, and a wrong value that is accepted."""
    monkeypatch.setattr("tests.model.test_hostile_designs.sentence", lambda design: answer)
    with pytest.raises(AssertionError):
        check_random(20, seed=0)
