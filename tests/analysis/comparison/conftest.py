"""Fixtures of comparisons: workers within this process, two designs with a text, and probes of a few steps."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.lab import workers as processes
from heddle.lab.compare import probes, run
from tests import small
from tests.analysis.comparison.runs import JAPANESE, Workers


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    for limit in ("SLOW_REPORT_SECONDS", "MAX_REPORT_SHARE"):  # a report at the beginning and at the end
        monkeypatch.setattr(run, limit, 0.0)
    monkeypatch.setattr(probes, "MIN_FINAL_TOKENS", 2**12)  # a quarter of the text at the end of each run
    return workers


@pytest.fixture
def report_after_each_run(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it on a slow machine, too."""
    monkeypatch.setattr(run, "SLOW_REPORT_SECONDS", 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two designs of one size, one with a window, and a folder of Japanese text."""
    root = tmp_path_factory.mktemp("comparison")
    (root / "text").mkdir()
    for number in range(30):
        lines = "".join(JAPANESE[(number * 7 + line * line) % len(JAPANESE)] for line in range(220))
        (root / "text" / f"{number}.txt").write_text(lines, encoding="utf-8")
    assert sum(path.stat().st_size for path in (root / "text").iterdir()) > 250_000
    small.design_file(root / "full.yaml")
    local = small.design()
    local["layers"][0]["mixer"]["window"] = 4
    small.design_file(root / "my local.yaml", local)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a few steps and a few rows."""
    monkeypatch.setattr(probes, "FINAL_TOKENS", 360)
    for name, probe in probes.RECALL_PROBES.items():
        monkeypatch.setitem(probes.RECALL_PROBES, name, dataclasses.replace(probe, steps=2, batch_size=2))
