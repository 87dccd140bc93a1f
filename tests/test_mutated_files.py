"""Files that are changed at random: a share of what `tools/soak.py --name files` reads, and that it can fail."""

from pathlib import Path

import pytest

import tests.mutated_files as mutated_files
from tests.mutated_files import refusals


def test_changed_files_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    assert list(refusals(tmp_path, 150, seed=0)) == []


@pytest.mark.parametrize(
    ("statement", "report"),
    [
        ("raise KeyError('width')", "KeyError: 'width'"),
        ("kept.append(bytearray(b'1') * (96 * 2**20))", "KiB: ''"),
        ("sum(range(10**8))", "s, "),
        ("raise HeddleError('a\\nb')", r"'a\nb'"),
        ("raise HeddleError('w' * 500)", "'wwww"),
        ("raise BaseException('panicked')", "BaseException: panicked"),
    ],
)
def test_a_reader_that_breaks_a_bound_is_reported(
    statement: str, report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"HeddleError": mutated_files.HeddleError, "kept": []}
    exec(f"def broken(folder, draw):\n    {statement}", names)
    monkeypatch.setattr(mutated_files, "READERS", (names["broken"],))
    monkeypatch.setattr(mutated_files, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(mutated_files, "import_readers", lambda folder: None)
    reports = list(refusals(tmp_path, 1, seed=0))
    assert len(reports) == 1
    assert report in reports[0]
