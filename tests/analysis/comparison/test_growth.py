"""Comparisons that grow in place and that stop when they are resolved; their workers give results fixed in advance."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle.cli.main import run_command
from heddle.lab import workers as processes
from heddle.lab.compare import run as run_module
from heddle.lab.compare.probes import MIN_FINAL_TOKENS, final_tokens
from heddle.lab.compare.report import ADDED_SEEDS
from heddle.lab.compare.run import ReportWriter
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.training.loop import FINAL_EVALUATION_TOKENS
from tests.analysis.comparison import reports
from tests.analysis.comparison.runs import equal_designs, read_report
from tests.analysis.scripted_workers import EndedWorkers

LOSSES = {"a": 2.0, "b": 2.001, "c": 2.3, "d": 2.0}
OPTIONS = ["--sequence-length", "32", "--batch-size", "16", "--device", "cpu", "--workers", "1", "--recall", "none"]
OPTIONS += ["--speed-context-length", "24", "--extrapolate", "1", "--tokens", "5200", "--quiet"]


class Workers(EndedWorkers):
    """Takes the place of worker processes: the loss of a run follows from its design and seed."""

    def __init__(self) -> None:
        super().__init__()
        self.final_tokens: set[int] = set()
        self.template = reports.template_run()

    def result(self, task: dict[str, Any], name: str) -> dict[str, Any]:
        if task["task"] == "calibrate":
            return {"status": "done", "seconds_per_step": 0.2, "timed_seconds": 1.0}
        if task["task"] != "train":
            return {"status": "done", "train": [], "prefill": [], "decode": []}
        self.final_tokens.add(task["final_tokens"])
        design, seed = name.split("-seed")
        rng = np.random.default_rng([zlib.crc32(design.encode()), int(seed)])
        loss = LOSSES[design] + np.random.default_rng(int(seed)).normal(0, 0.05) + rng.normal(0, 0.004)
        result = {"seed": int(seed), "bits_per_byte": loss, "windows": [[loss * 1000, 1000]] * 16, "seconds": 2.0}
        return self.template | result


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    monkeypatch.setattr(ReportWriter, "update", lambda self: None)  # the report at the end is enough
    return workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equal_designs(tmp_path_factory.mktemp("growth"), LOSSES)


def command(folder: Path, out: Path, *options: str, designs: str = "ab") -> list[str]:
    files = [f"{folder}/{design}.yaml" for design in designs]
    return ["compare", *files, "--data", f"{folder}/text", "--out", str(out), *OPTIONS, *options]


def trained(workers: Workers) -> list[str]:
    """The training runs since the last call."""
    names = [name for name in workers.ran if "-seed" in name]
    workers.ran = []
    return names


def test_a_comparison_grows_by_seeds_and_designs(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path, "--seeds", "2")) == 0
    assert trained(workers) == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    fixed = read_report(tmp_path)["differences"][0]
    assert "at whatever number of seeds" not in fixed["method"]
    assert ADDED_SEEDS not in read_report(tmp_path)["warnings"]
    assert run_command(command(folder, tmp_path, "--seeds", "4", designs="abc")) == 0
    assert trained(workers) == ["c-seed0", "c-seed1", "a-seed2", "b-seed2", "c-seed2", "a-seed3", "b-seed3", "c-seed3"]
    grown = read_report(tmp_path)
    assert [len(design["runs"]) for design in grown["designs"]] == [4, 4, 4]
    # seeds were added after a look at the first
    assert all("at whatever number of seeds" in row["method"] for row in grown["pairs"])
    assert ADDED_SEEDS in grown["warnings"]
    # and that stays so
    assert run_command(command(folder, tmp_path, "--seeds", "4", designs="abc")) == 0
    assert trained(workers) == []
    assert read_report(tmp_path)["pairs"] == grown["pairs"]


def test_every_run_is_scored_on_the_text_that_the_first_was(
    folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows from the length of the training; an older comparison goes on with what all had."""
    assert run_command(command(folder, tmp_path, "--seeds", "1")) == 0
    assert workers.final_tokens == {MIN_FINAL_TOKENS}
    monkeypatch.setattr(run_module, "final_tokens", lambda *_: 1)
    assert run_command(command(folder, tmp_path, "--seeds", "2", designs="abc")) == 0
    assert workers.final_tokens == {MIN_FINAL_TOKENS}
    data = read_json_file(tmp_path / "data.json")
    write_json_file(tmp_path / "data.json", {"data": data["data"]})
    assert run_command(command(folder, tmp_path, "--seeds", "3", designs="abc")) == 0
    assert workers.final_tokens == {MIN_FINAL_TOKENS, FINAL_EVALUATION_TOKENS}


@pytest.mark.parametrize(
    ("trained", "length", "expected"),
    [(40_000, 128, 2**14), (100_000, 128, 30_000), (40_000, 512, 2**15), (10**6, 128, 2**16), (10, 4096, 2**16)],
)
def test_the_text_that_scores_a_run_grows_with_its_training(trained: int, length: int, expected: int) -> None:
    assert final_tokens(trained, length) == expected


def test_designs_that_are_added_do_not_change_how_it_stops(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path, "--seeds", "2")) == 0
    [alone] = read_report(tmp_path)["pairs"]
    assert run_command(command(folder, tmp_path, "--seeds", "2", designs="abc")) == 0
    assert not any("at whatever number" in row["method"] for row in read_report(tmp_path)["pairs"])
    # but they narrow no interval of a pair that was there, now and in later calls
    for _ in range(2):
        assert read_json_file(tmp_path / "plan.json")["earlier_designs"] == [["a", "b"]]
        [row] = [row for row in read_report(tmp_path)["pairs"] if {row["design"], row["reference"]} == {"a", "b"}]
        assert row["high"] - row["low"] >= alone["high"] - alone["low"]
        assert run_command(command(folder, tmp_path, "--seeds", "2", designs="abc")) == 0


def test_a_plan_without_planned_runs_says_that_more_seeds_follow(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(until(folder, tmp_path)) == 0
    capsys.readouterr()
    again = until(folder, tmp_path, "--until-resolved", "0.003", "--dry-run")
    assert run_command([word for word in again if word != "--quiet"]) == 0
    plan = capsys.readouterr().err
    assert "± 0.003" in plan
    assert " 0 s" not in plan


def test_a_budget_does_not_forget_that_designs_were_added(
    folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget, the schedule is made again once the time for training is known."""
    assert run_command(until(folder, tmp_path, designs="ab")) == 0
    judged, choose = [], run_module.choose_schedule

    def recorded(plan: Any, count: int = 1, saved: Any = (), earlier_designs: Any = ()) -> Any:
        judged.append([*earlier_designs])
        return choose(plan, count, saved, earlier_designs)

    monkeypatch.setattr(run_module, "choose_schedule", recorded)
    assert run_command(until(folder, tmp_path, "--budget", "20m")) == 0
    assert judged == [[["a", "b"]]] * 2


def test_seeds_added_before_the_first_look_are_no_second_look(folder: Path, tmp_path: Path, workers: Workers) -> None:
    workers.interrupted_at = "b-seed1"
    assert run_command(command(folder, tmp_path, "--seeds", "2")) == 143
    workers.interrupted_at = ""
    assert run_command(command(folder, tmp_path, "--seeds", "3")) == 0
    assert not any("at whatever number" in row["method"] for row in read_report(tmp_path)["pairs"])
    assert ADDED_SEEDS not in read_report(tmp_path)["warnings"]


def test_nothing_is_removed_silently(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path, "--seeds", "2", designs="abc")) == 0
    before = (tmp_path / "plan.json").read_bytes()
    capsys.readouterr()
    for options, designs, says in (
        (("--seeds", "2"), "ab", "c is in it too; use the same, or another folder"),
        (("--seeds", "3", "--lr", "0.1"), "abcd", "learning_rate was 0.003"),
    ):
        assert run_command(command(folder, tmp_path, *options, designs=designs)) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1
    assert (tmp_path / "plan.json").read_bytes() == before
    trained(workers)
    flops = [word if word != "--tokens" else "--flops" for word in command(folder, tmp_path / "flops", "--seeds", "2")]
    flops[flops.index("5200")] = "1e10"
    assert run_command(flops) == 0
    flops.insert(1, f"{folder}/c.yaml")
    assert run_command([*flops, "--baseline", "a"]) == 2
    assert "designs can be added only if the budget is in tokens" in capsys.readouterr().err


def until(folder: Path, out: Path, *options: str, designs: str = "abc") -> list[str]:
    return command(folder, out, "--until-resolved", "0.006", *options, designs=designs)


def test_until_resolved(folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(until(folder, tmp_path)) == 0
    names = trained(workers)
    assert names[:9] == [f"{name}-seed{seed}" for seed in range(3) for name in "abc"]
    counts = {name: sum(run.startswith(name) for run in names) for name in "abc"}
    assert counts["a"] == counts["b"] > counts["c"]
    report = read_report(tmp_path)
    assert report["progress"]["stop_reason"] == (
        f"Each design is resolved from {report['leader']} or a tie within ± 0.006, so no more seeds were bought."
    )
    assert report["progress"]["stop_reason"] in " ".join(capsys.readouterr().out.split())
    assert [len(design["runs"]) for design in report["designs"]] == [counts[name] for name in "abc"]
    [tie] = [row for row in report["pairs"] if not row["resolved"]]
    assert tie["tie_within"] <= 0.006
    # the same again buys nothing; a smaller width buys more, and nothing twice
    assert run_command(until(folder, tmp_path)) == 0
    assert trained(workers) == []
    assert run_command(until(folder, tmp_path, "--budget", "2m", "--until-resolved", "0.004")) == 0
    more = trained(workers)
    assert more
    assert not set(more) & set(names)


def test_until_resolved_continues_after_an_interrupt(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(until(folder, tmp_path / "whole")) == 0
    names = trained(workers)
    out = tmp_path / "ended"
    for number in (4, len(names) - 3):
        workers.interrupted_at = names[number]
        assert run_command(until(folder, out)) == 143
    workers.interrupted_at = ""
    assert run_command(until(folder, out)) == 0
    assert trained(workers) == names
    assert read_report(out)["pairs"] == read_report(tmp_path / "whole")["pairs"]


def test_a_fixed_comparison_may_continue_until_resolved_and_not_back(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path, "--seeds", "3", designs="abc")) == 0
    trained(workers)
    assert run_command(until(folder, tmp_path, "--budget", "10m")) == 0
    assert trained(workers)[0].endswith("-seed3")
    capsys.readouterr()
    assert run_command(command(folder, tmp_path, "--seeds", "3", designs="abc")) == 2
    assert "its seeds were bought until resolved (± 0.006)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--until-resolved", "0"), "--until-resolved 0:"),
        (("--until-resolved", "nan"), "--until-resolved nan:"),
        (("--budget", "30min"), "--budget 30min:"),
        (("--until-resolved", "0.1", "--budget", "soon"), "--budget soon:"),
        (("--until-resolved", "0.1", "--budget", "0h"), "--budget 0h:"),
        (("--until-resolved", "0.1", "--seeds", "1"), "--seeds 1:"),
    ],
)
def test_impossible_stops_are_refused(
    options: tuple[str, ...], says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path, *options)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
