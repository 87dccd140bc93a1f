"""Files that are changed at random: a share of what `tools/soak.py --name files` reads, and that it can fail."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.errors import HeddleError
from tests import mutated_files
from tests.mutated_files import refusals


def test_changed_files_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    assert list(refusals(tmp_path, 150, seed=0)) == []


def raising(error: BaseException) -> Callable[[], object]:
    def broken() -> None:
        raise error

    return broken


leaked: list[bytearray] = []


@pytest.mark.parametrize(
    ("broken", "report"),
    [
        (raising(KeyError("width")), "KeyError: 'width'"),
        (lambda: leaked.append(bytearray(b"1") * (96 * 2**20)), "KiB: ''"),
        (lambda: sum(range(10**8)), "s, "),
        (raising(HeddleError("a\nb")), r"'a\nb'"),
        (raising(HeddleError("w" * 500)), "'wwww"),
        (raising(BaseException("panicked")), "BaseException: panicked"),
    ],
)
def test_a_reader_that_breaks_a_bound_is_reported(
    broken: Callable[[], object], report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reader(folder: Path, draw: random.Random) -> None:
        broken()

    monkeypatch.setattr(mutated_files, "READERS", (reader,))
    monkeypatch.setattr(mutated_files, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(mutated_files, "import_readers", lambda folder: None)
    reports = list(refusals(tmp_path, 1, seed=0))
    leaked.clear()
    assert len(reports) == 1
    assert report in reports[0]
