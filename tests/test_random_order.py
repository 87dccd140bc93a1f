"""Repeats of the suite take every file once, in an order of their seed, and a planted flaky test is caught."""

from collections import Counter
from pathlib import Path

import pytest

from tests.random_order import SHARES, run_in_order, share_of_files

FLAKY = """
seen = []

def test_first():
    seen.append(1)

def test_second():
    assert seen, "runs only after the first"

def test_third():
    pass
"""


def test_the_shares_of_a_repeat_are_every_file_once() -> None:
    files = [Path(f"tests/test_{number}.py") for number in range(101)]
    repeats = [[share_of_files(files, seed + first) for seed in range(SHARES)] for first in (0, SHARES)]
    for shares in repeats:
        assert Counter(file for share in shares for file in share) == Counter(files)
        assert {len(share) for share in shares} == {2, 3}
    assert repeats[0] != repeats[1]
    assert share_of_files(files, 7) == repeats[0][7]


def test_a_planted_flaky_test_is_caught_by_some_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes or fails with the order, which the seed alone decides."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_planted.py").write_text(FLAKY)
    options = ["-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider"]
    failures = [run_in_order([tmp_path / "test_planted.py"], seed, options) for seed in (0, 1, 2)]
    assert {len(failure) for failure in failures} == {0, 1}
    for (failure,) in filter(None, failures):
        assert "test_planted.py::test_second" in failure.splitlines()[0]
