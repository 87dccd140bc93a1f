"""Every bug of the museum has something that kills it: a planted bug that a law or a test catches."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.laws.test_planted import BUGS
from tests.museum.exhibits import CANNOT_EXIST, EXHIBITS
from tests.museum.mutants import MUTANTS, Mutant
from tests.source import ROOT

FAST = [mutant for mutant in MUTANTS if not mutant.is_slow]
SLOW = [mutant for mutant in MUTANTS if mutant.is_slow]


def killers() -> set[str]:
    """The descriptions of all planted bugs."""
    return {bug.description for bug in BUGS} | {mutant.description for mutant in MUTANTS}


def run_test(node: str, folder: Path) -> pytest.ExitCode:
    """Run a test within this process, where a bug is planted; the first failure ends it.

    It has a folder of its own: pytest deletes those of earlier sessions, which takes seconds.
    """
    options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak", "--tb=no"]
    options.append(f"--basetemp={folder / 'tests'}")
    with contextlib.redirect_stdout(io.StringIO()):
        return pytest.ExitCode(pytest.main([f"{ROOT / node.split('::')[0]}::{node.split('::')[1]}", *options]))


def check_killed(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    assert run_test(mutant.killer, folder) == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("mutant", FAST, ids=[mutant.description for mutant in FAST])
def test_a_mutant_is_killed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_killed(mutant, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("mutant", SLOW, ids=[mutant.description for mutant in SLOW])
def test_a_slow_mutant_is_killed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_killed(mutant, tmp_path, monkeypatch)


def test_every_exhibit_has_what_kills_it() -> None:
    planted = killers()
    assert [row.source for row in EXHIBITS if not row.killers or not planted.issuperset(row.killers)] == []
    assert len({row.source for row in EXHIBITS}) == len(EXHIBITS)
    assert CANNOT_EXIST.keys().isdisjoint(row.source for row in EXHIBITS)
    assert len({mutant.description for mutant in MUTANTS}) == len(MUTANTS)


def test_a_test_that_passes_kills_nothing(tmp_path: Path) -> None:
    assert run_test("tests/training/test_settings.py::test_the_shapes_of_the_schedules", tmp_path) == pytest.ExitCode.OK
    assert run_test("tests/training/test_settings.py::test_that_is_not_there", tmp_path) == pytest.ExitCode.USAGE_ERROR
