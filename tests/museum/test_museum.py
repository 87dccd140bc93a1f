"""Every bug of the museum has something that kills it: a planted bug that a law catches, or a test."""

from tests.laws.test_planted import BUGS
from tests.museum.exhibits import EXHIBITS
from tests.source import ROOT


def is_alive(killer: str, planted: set[str]) -> bool:
    """Whether nothing kills a bug: neither a planted bug of this description nor this test exists."""
    path, _, function = killer.partition("::")
    if not path.endswith(".py"):
        return killer not in planted
    file = ROOT / path
    return not file.is_file() or f"def {function}" not in file.read_text(encoding="utf-8")


def test_every_exhibit_has_what_kills_it() -> None:
    planted = {bug.description for bug in BUGS}
    assert [row.source for row in EXHIBITS if any(is_alive(killer, planted) for killer in row.killers)] == []
    assert len({row.source for row in EXHIBITS}) == len(EXHIBITS)


def test_a_bug_that_nothing_kills_is_seen() -> None:
    planted = {bug.description for bug in BUGS}
    assert is_alive("a bug that nobody planted", planted)
    assert is_alive("tests/training/test_step.py::test_that_is_not_there", planted)
    assert is_alive("tests/not_there.py", planted)
