"""`heddle compare --track`: each training on text is a run of the tracker, and no tracker stops a comparison."""

import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.distributed.ranks import Ranks
from heddle.lab.compare import worker
from heddle.storage.run_log import read_log
from heddle.training import trackers
from heddle.training.trackers import TRACKERS, metrics_of
from tests.analysis.comparison.runs import Workers, command, read_report, without_timing
from tests.training.test_trackers import StandIn

SHORT = ("--seeds", "1", "--tokens", "1600", "--extrapolate", "1")


class ByRun(StandIn):
    """A library that keeps the lines of each of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[tuple[int, dict[str, float]]]] = []

    def open(self, *arguments: Any, **named: Any) -> Any:
        lines: list[tuple[int, dict[str, float]]] = []
        self.lines.append(lines)
        super().open(*arguments, **named)
        return SimpleNamespace(log=lambda metrics, step: lines.append((step, metrics)), finish=self.close)


def installed(monkeypatch: pytest.MonkeyPatch, library: StandIn) -> None:
    """The stand-in as every tracker's library."""
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name in TRACKERS or find_spec(name, *rest))


def test_each_run_sends_its_design_seed_losses_and_evaluation(
    folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ByRun()
    installed(monkeypatch, library)
    assert run_command(command(folder, tmp_path, "--tokens", "1600", "--extrapolate", "1", "--track", "wandb")) == 0
    runs = [tmp_path / "runs" / name for name in workers.ran if (tmp_path / "runs" / name / "log.jsonl").exists()]
    report = read_report(tmp_path)
    bits = [[run["bits_per_byte"] for run in design["runs"]] for design in report["designs"]]
    assert len(runs) == len(library.lines) == library.closed == 4  # two designs, two seeds: no probe, no speed
    assert len({opened["id"] for opened in library.opened}) == 4
    for run, opened, lines in zip(runs, library.opened, library.lines, strict=True):
        fields, (last_step, evaluation) = opened["config"], lines[-1]
        is_local = run.name.startswith("my local")
        assert opened["name"] == run.name
        assert fields.get("design.layers.0.mixer.window") == (4 if is_local else None)
        log = read_log(run)
        assert lines[:-1] == [(line["step"], metrics_of(line)) for line in log]
        assert all("loss" in metrics for _, metrics in lines[:-1])
        assert last_step == log[-1]["step"]
        assert evaluation == {"final_bits_per_byte": bits[is_local][fields["settings.seed"]]}
    assert {opened["config"]["settings.seed"] for opened in library.opened} == {0, 1}


def test_a_tracker_that_fails_or_hangs_changes_no_report(
    folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path / "plain", *SHORT, designs=("full",))) == 0
    release = threading.Event()

    def fail() -> None:
        raise SystemExit("no server")

    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.1)
    for name, reason, act in (
        ("wandb", "receives no more lines (no server)", fail),
        ("mlflow", "did not finish", release.wait),
    ):
        installed(monkeypatch, StandIn(act))
        assert run_command(command(folder, tmp_path / name, *SHORT, "--track", name, designs=("full",))) == 0
        err = capsys.readouterr().err
        assert f"warning: track {name}: " in err
        assert reason in err
        designs = [without_timing(read_report(tmp_path / each))["designs"] for each in ("plain", name)]
        assert designs[0] == designs[1]
    release.set()


def test_only_the_first_rank_of_a_run_tracks(
    folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ByRun()
    installed(monkeypatch, library)
    perform, seen = worker.TASKS["train"], []

    def as_second_rank(task: dict[str, Any]) -> dict[str, Any]:
        job, _ = worker._text_job(task | {"ranks": Ranks(rank=1, count=2)})
        with trackers.open_trackers(job, 1) as track:
            track({"step": 1, "loss": 2.0})
        seen.append(job.trackers)
        return perform(task)

    monkeypatch.setitem(worker.TASKS, "train", as_second_rank)
    assert run_command(command(folder, tmp_path, *SHORT, "--track", "trackio", designs=("full",))) == 0
    assert seen == [("trackio",)]
    assert len(library.opened) == 1  # that of the first rank
