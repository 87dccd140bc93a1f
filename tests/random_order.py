"""Repeats of the default test suite in random order, by shares, so that flaky tests show: `tools/soak.py --name flaky`.

It is also the pytest plugin that mixes the tests of each file: `pytest -p tests.random_order --order-seed 7 FILES`.
Files run in the order in which they are named, so that fixtures of a file are made once.
"""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.source import ROOT

SHARES = 40  # rounds of one repeat of the suite
NO_TESTS = 5  # pytest's exit code where all tests of the files are left to `make soak`
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the seed."""
    parser.addoption("--order-seed", type=int, default=0, help="the tests of each file run in this random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix the tests of each file."""
    seed = config.getoption("--order-seed")
    mixed: list[pytest.Item] = []
    for path, group in itertools.groupby(items, key=lambda item: item.path):
        tests = list(group)
        random.Random(f"{seed} {path.name}").shuffle(tests)
        mixed += tests
    items[:] = mixed


def share_of_files(files: Sequence[Path], seed: int) -> list[Path]:
    """The files of a round, mixed: seeds from 0 to SHARES - 1 take each file once, the next SHARES seeds again."""
    repeat, share = divmod(seed, SHARES)
    mixed = random.Random(repeat).sample(sorted(files), len(files))
    return mixed[share::SHARES]


def run_in_order(files: Sequence[Path], seed: int, options: Sequence[str] = ()) -> list[str]:
    """Run tests in an order of their own; what failed, in one text, or nothing."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.random_order", "--order-seed", str(seed), *options]
    command += ["-rfE", *map(str, files)]
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode in (0, NO_TESTS):
        return []
    names = FAILED.findall(result.stdout) or [f"exit status {result.returncode}: {result.stderr[-1000:]}"]
    return [f"seed {seed}: {', '.join(names)}: again with {' '.join(command[1:])}\n{result.stdout[-4000:]}"]


def repeat_share(seed: int) -> tuple[int, list[str]]:
    """One round: (1, what failed in it)."""
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    return 1, run_in_order(share_of_files(files, seed), seed)
