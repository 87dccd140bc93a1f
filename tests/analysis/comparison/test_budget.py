"""`compare --budget`: what it chooses, what it refuses, and that the end of the budget is the end of the command.

The workers are scripted: each says how long its step takes, and a clock that only they move counts their seconds.
"""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.data.corpus import prepare_corpus
from heddle.errors import ConfigError
from heddle.lab import workers as processes
from heddle.lab.compare import budget
from heddle.lab.compare import run as comparison_run
from heddle.lab.compare.budget import StepTime, TimeBudget, format_seconds
from heddle.progress import parse_duration
from heddle.signals import Interrupted
from heddle.storage.file_io import read_json_file, write_json_file
from tests.analysis.comparison import reports
from tests.analysis.comparison.runs import equal_designs, read_report

OPTIONS = ["--sequence-length", "32", "--batch-size", "4", "--device", "cpu", "--workers", "2", "--recall", "none"]
OPTIONS += ["--speed-context-length", "24", "--extrapolate", "1"]
STEP_TOKENS = 128
START = 2.0  # seconds that a worker takes beside its steps


class Clock:
    """time.monotonic(), moved by the workers."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """Takes the place of worker processes on a machine where every step takes `step` seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.step, self.slower, self.speed_steps = clock, 0.05, 1.0, 7
        self.other_steps = 7
        self.running: list[Worker] = []
        self.trained: list[str] = []
        self.timings = 0
        self.stops_before = ""
        self.template = reports.template_run()

    def start(self, request: Path, target: Path) -> "Worker":
        task = json.loads(request.read_text(encoding="utf-8"))
        if target.stem == self.stops_before:
            raise Interrupted(2)
        worker = Worker(self, task, target)
        self.running.append(worker)
        return worker

    def sleep(self, seconds: float) -> None:
        """What the parent does while workers run; it looks at them once a second."""
        self.clock.now += max(seconds, 1.0)


class Worker:
    """Takes as long as its task: a training its steps, a timing and a speed measurement a few of them."""

    def __init__(self, machine: Machine, task: dict[str, Any], target: Path) -> None:
        self.machine, self.task, self.target, self.signals = machine, task, target, list[int]()
        steps = {"train": task["settings"]["steps"] * machine.slower, "speed": machine.speed_steps, "calibrate": 7}
        steps = steps.get(task["task"], machine.other_steps)
        self.seconds = START + steps * machine.step
        self.ends = machine.clock.now + self.seconds

    def poll(self) -> int | None:
        if self.signals:
            return 143
        if self.machine.clock.now < self.ends:
            return None
        if not self.target.is_file():
            write_json_file(self.target, self.result())
        return 0

    def result(self) -> dict[str, Any]:
        step, settings = self.machine.step, self.task["settings"]
        self.machine.timings += self.task["task"] == "calibrate"
        if self.task["task"] == "calibrate":
            return {"status": "done", "seconds_per_step": step, "timed_seconds": 7 * step}
        if self.task["task"] == "speed":
            return {"status": "done", "train": [], "prefill": [], "decode": []}
        self.machine.trained.append(self.target.stem)
        seed, is_second = settings["seed"], self.target.stem.startswith("b")
        loss = 2.0 + 0.03 * math.sin(7 * seed + 2 * is_second)
        tokens = settings["steps"] * STEP_TOKENS
        result = {"seed": settings["seed"], "bits_per_byte": loss, "windows": [[loss * 1000, 1000]] * 16}
        return self.machine.template | result | {"seconds": self.seconds, "train_tokens": tokens}

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(9)

    def wait(self) -> int:
        return -9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Clock()
    machine = Machine(clock)
    monkeypatch.setattr(processes, "start_worker", machine.start)
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", machine.sleep)
    monkeypatch.setattr(budget, "final_tokens", lambda *_: 0)  # these workers evaluate in no time
    monkeypatch.setattr(budget, "OTHER_EVALUATED_TOKENS", 0)
    monkeypatch.setattr(budget, "UNTIMED_FLOPS", 0.0)
    monkeypatch.setattr(budget, "KEPT_SECONDS", 0.0)  # tests share a cache
    return machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return equal_designs(tmp_path_factory.mktemp("budget"), "ab")


def compare(folder: Path, out: Path, *options: str) -> int:
    files = [f"{folder}/{name}.yaml" for name in "ab"]
    return run_command(["compare", *files, "--data", f"{folder}/text", "--out", str(out), *OPTIONS, *options])


def plan(out: Path) -> tuple[int, int]:
    """(tokens of each run, seeds)."""
    saved = read_json_file(out / "plan.json")
    return int(saved["budget_value"]), len(saved["seeds"])


def test_the_budget_chooses_the_training_and_ends_within_it(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    started = machine.clock.now
    assert compare(folder, tmp_path / "short", "--budget", "3m") == 0
    took, printed = machine.clock.now - started, capsys.readouterr().err
    tokens, seeds = plan(tmp_path / "short")
    assert 0.5 * 180 < took <= 180
    assert seeds == 3
    assert f"2 designs × 3 seeds on {tokens:,} tokens" in printed
    assert "the budget chose: each run trains on" in printed
    assert len(machine.trained) == 6
    report = read_report(tmp_path / "short")
    assert any(f"{tokens:,} tokens" in warning for warning in report["warnings"])
    assert compare(folder, tmp_path / "long", "--budget", "6m") == 0
    assert plan(tmp_path / "long")[0] > tokens


def test_what_was_given_is_never_changed(folder: Path, tmp_path: Path, machine: Machine) -> None:
    assert compare(folder, tmp_path / "tokens", "--budget", "150s", "--tokens", "64000") == 0
    assert plan(tmp_path / "tokens") == (64000, 3)
    assert compare(folder, tmp_path / "fewer", "--budget", "100s", "--tokens", "64000") == 0
    assert plan(tmp_path / "fewer") == (64000, 2)
    assert compare(folder, tmp_path / "seeds", "--budget", "3m", "--seeds", "5") == 0
    tokens, seeds = plan(tmp_path / "seeds")
    assert seeds == 5
    assert tokens >= budget.MIN_STEPS * STEP_TOKENS


def test_a_warmup_longer_than_the_run_is_refused_or_follows_what_the_budget_chose(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup = ["--warmup", "100000"]
    assert compare(folder, tmp_path / "explicit", "--tokens", "64000", *warmup) == 2
    assert "--warmup 100000: is longer than a run of" in capsys.readouterr().err
    assert machine.trained == []
    for _ in range(2):  # and again, when it is finished
        assert compare(folder, tmp_path / "chosen", "--budget", "3m", *warmup) == 0
        assert "the warmup takes a twentieth, not 100000" in capsys.readouterr().err
    assert read_json_file(tmp_path / "chosen/plan.json")["warmup"] is None
    assert compare(folder, tmp_path / "short", "--budget", "3m", "--warmup", "2") == 0
    assert read_json_file(tmp_path / "short/plan.json")["warmup"] == 2


def test_a_text_that_takes_long_shortens_the_training(
    folder: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = list[str]()

    def slow(*sources: Any, **options: Any) -> Any:
        read.append("text")
        if len(read) == 1:  # then it is in the cache
            assert machine.clock.now < options["until"] < machine.clock.now + 180
            machine.clock.now += 60.0
        return prepare_corpus(*sources, **options)

    for name, seconds in (("quick", 0.0), ("slow", 60.0)):
        read[:] = ["before"] if not seconds else []
        monkeypatch.setattr(comparison_run, "prepare_corpus", slow)
        started = machine.clock.now
        assert compare(folder, tmp_path / name, "--budget", "3m") == 0
        assert 0.5 * 180 < machine.clock.now - started <= 180
    assert len(machine.trained) == 12
    assert plan(tmp_path / "slow")[0] < 0.8 * plan(tmp_path / "quick")[0]
    printed = capsys.readouterr().err
    assert "preparing the text took 60 s; the rest of the budget is planned again" in printed
    assert "ends before that" not in printed
    # hardly any time is left, and the same command has it all
    read.clear()
    assert compare(folder, tmp_path / "late", "--budget", "80s") == 1
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("heddle: --budget 80 s: preparing the text took 60 s, which leaves too little")
    assert not (tmp_path / "late").exists()
    assert compare(folder, tmp_path / "late", "--budget", "80s") == 0


@pytest.mark.parametrize(
    "options",
    [("--budget", "20s"), ("--budget", "1m", "--tokens", "1M"), ("--budget", "2m", "--tokens", "100k", "--seeds", "9")],
)
def test_what_cannot_fit_is_refused_before_the_text_is_read(
    options: tuple[str, ...], folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, tmp_path / "out", *options) == 2
    *_, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("heddle: --budget")
    assert " s/step, take about " in sentence  # a busy machine shows
    assert not (tmp_path / "out").exists()
    assert machine.trained == []
    # the time it names is enough
    seconds = seconds_in(sentence.split("take about ")[1].split(":")[0])
    assert compare(folder, tmp_path / "out", *options, "--budget", f"{seconds + 5:.0f}s") == 0


@pytest.mark.parametrize(
    ("options", "advised"),
    [
        (("--speed-context-length", "2048"), {"--batch-size 2", "--speed-context-length 512"}),
        (("--batch-size", "2", "--speed-context-length", "512"), {"--batch-size 1"}),
        (("--batch-size", "1", "layers.*.repeat=3"), {"layers.*.repeat=2"}),
        (("--batch-size", "1", "--seeds", "3"), {"--seeds 2"}),
        (("--batch-size", "1", "--tune", "lr=0.001,0.002"), {"a smaller --tune-budget"}),
        (("--batch-size", "1", "--tune", "lr=0.001,0.002", "--tune-budget", "2m"), {"a smaller --tune-budget"}),
    ],
)
def test_a_refused_budget_names_what_takes_time_and_only_options_that_help(
    options: tuple[str, ...], advised: set[str], folder: Path, tmp_path: Path, machine: Machine,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert compare(folder, tmp_path / "out", "--budget", "20s", *options) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    whole, _, listed = sentence.split("take about ")[1].partition(";")[0].partition(": ")
    parts = [re.sub(r"^[a-z ]+", "", part) for part in listed.split(", ")]
    assert len(parts) > 2
    assert ("tuning" in listed) == ("--tune" in options)
    assert sum(map(seconds_in, parts)) == pytest.approx(seconds_in(whole), abs=len(parts))
    assert set(sentence.partition("such as ")[2].split(", ")) == advised
    assert compare(folder, tmp_path / "out", *options, "--budget", f"{seconds_in(whole) + 5:.0f}s", "--dry-run") == 0


def test_a_refused_budget_keeps_its_step_times(
    folder: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.step = 0.04
    for kept, options, code, timings in (
        (0.0, ("--budget", "20s"), 2, 2),
        (600.0, ("--budget", "20s"), 2, 2),
        (600.0, ("--budget", "3m", "--dry-run"), 0, 2),
        (600.0, ("--budget", "3m", "--dry-run", "--lr", "0.1"), 0, 4),  # other settings
        (600.0, ("--budget", "3m", "--dry-run", "width=32"), 0, 6),  # other designs
        (0.0, ("--budget", "3m", "--dry-run"), 0, 8),  # too old
    ):
        monkeypatch.setattr(budget, "KEPT_SECONDS", kept)
        assert compare(folder, tmp_path, *options) == code
        assert machine.timings == timings
    assert ", 0.04 s/step, " in capsys.readouterr().err


def seconds_in(duration: str) -> float:
    """The seconds of `1 min 30 s`."""
    words, units = duration.split(), {"s": 1, "min": 60, "h": 3600}
    return sum(float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


def test_processes_that_share_a_comparison_choose_nothing(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ((), ("--tokens", "64000"), ("--seeds", "2")):
        assert compare(folder, tmp_path / "out", "--budget", "3m", "--share", "0/2", *options) == 2
        assert "would choose its own; give --tokens and --seeds" in capsys.readouterr().err


def test_a_machine_that_becomes_slow_ends_in_time_with_what_it_has(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.slower, started = 2.5, machine.clock.now
    assert compare(folder, tmp_path / "out", "--budget", "3m") == 0
    assert machine.clock.now - started <= 181
    report = read_report(tmp_path / "out")
    assert report["progress"]["stop_reason"].startswith("The budget of 3 min ended before seed ")
    assert 0 < len(machine.trained) < 6
    assert [len(design["runs"]) for design in report["designs"]] == [len(machine.trained) // 2] * 2
    assert report["progress"]["stop_reason"] in " ".join(capsys.readouterr().out.split())
    before = list(machine.trained)
    assert compare(folder, tmp_path / "out", "--budget", "1h") == 0
    assert len(machine.trained) == 6
    assert machine.trained[: len(before)] == before


def test_the_last_paired_seed_comes_before_speeds(folder: Path, tmp_path: Path, machine: Machine) -> None:
    """Trainings that take a little longer than planned use the time that was planned for speeds."""
    machine.slower, machine.speed_steps, started = 1.4, 400, machine.clock.now
    assert compare(folder, tmp_path, "--budget", "3m", "--speed-context-length", "5600") == 0
    assert machine.clock.now - started <= 181
    report = read_report(tmp_path)
    assert [len(design["runs"]) for design in report["designs"]] == [3, 3]
    assert report["progress"]["stop_reason"].startswith("The budget of 3 min ended before the speed of ")


def test_slow_recall_tasks_leave_time_for_a_round_of_speeds(folder: Path, tmp_path: Path, machine: Machine) -> None:
    machine.other_steps, machine.speed_steps = 10_000, 150
    assert compare(folder, tmp_path, "--budget", "5m", "--recall", "mqar", "--speed-context-length", "5600") == 0
    assert [len(list((tmp_path / "runs").glob(f"{name}-speed-1.json"))) for name in "ab"] == [1, 1]
    assert not list((tmp_path / "runs").glob("*recall*.json"))


def test_speeds_that_the_budget_cuts_are_named(folder: Path, tmp_path: Path, machine: Machine) -> None:
    machine.speed_steps = 10_000
    assert compare(folder, tmp_path / "out", "--budget", "3m") == 0
    reason = read_report(tmp_path / "out")["progress"]["stop_reason"]
    assert reason == "The budget of 3 min ended before the speed of a and b; the same command continues."


def test_seeds_and_speeds_that_the_budget_cuts_are_named_together(
    folder: Path, tmp_path: Path, machine: Machine
) -> None:
    machine.slower, machine.speed_steps = 2.5, 10_000
    assert compare(folder, tmp_path / "out", "--budget", "3m") == 0
    reason = read_report(tmp_path / "out")["progress"]["stop_reason"]
    assert "ended before seed " in reason
    assert "speed of a and b" in reason


def test_the_clock_can_fail(folder: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.slower, started = 2.5, machine.clock.now
    monkeypatch.setattr(
        comparison_run, "run_tasks", lambda tasks, workers, add, **_: processes.run_tasks(tasks, workers, add)
    )
    assert compare(folder, tmp_path / "out", "--budget", "3m") == 0
    assert machine.clock.now - started > 200


def test_until_resolved_buys_seeds_within_the_budget(folder: Path, tmp_path: Path, machine: Machine) -> None:
    started = machine.clock.now
    assert compare(folder, tmp_path / "out", "--budget", "4m", "--until-resolved", "1e-9") == 0
    assert 0.6 * 240 < machine.clock.now - started <= 240 + START
    assert len(machine.trained) > 6


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, tmp_path / "out", "--dry-run", "--tokens", "64000") == 0
    out, err = capsys.readouterr()
    assert "plan: 2 designs × 3 seeds on 64,000 tokens, 0.05 s/step, 2 at a time on " in err
    assert out == "Nothing was trained.\n"
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_the_plan_of_a_comparison_that_is_there_and_of_seconds(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, tmp_path / "out", "--tokens", "64000") == 0
    capsys.readouterr()
    assert compare(folder, tmp_path / "out", "--tokens", "64000", "--dry-run") == 0
    assert "plan: 2 designs × 3 seeds on 64,000 tokens: everything is finished" in capsys.readouterr().err
    assert compare(folder, tmp_path / "out", "--tokens", "32000", "--dry-run") == 2
    assert "holds another comparison: tokens" in capsys.readouterr().err
    assert compare(folder, tmp_path / "timed", "--seconds", "30", "--dry-run") == 0
    assert "plan: 2 designs × 3 seeds on 30 seconds, 2 at a time" in capsys.readouterr().err


def test_a_plan_counts_what_is_left_and_keeps_what_the_budget_chose(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    machine.stops_before = "b-seed1"
    assert compare(folder, out, "--budget", "100s", "--tokens", "64000") == 130
    first = capsys.readouterr().err
    assert "plan: 2 designs × 2 seeds on 64,000 tokens, 0.05 s/step" in first
    note = "2 seeds of each design are trained, not 3"
    assert f"the budget chose: {note}" in first
    machine.stops_before, started = "", machine.clock.now
    assert compare(folder, out, "--budget", "100s", "--tokens", "64000", "--dry-run") == 0
    left = capsys.readouterr().err
    assert "2 seeds on 64,000 tokens, 2 of 4 runs finished, 0.05 s/step" in left
    assert f"the budget had chosen: {note}" in left
    assert seconds_of(left) < 0.7 * seconds_of(first)
    assert machine.clock.now - started < 100
    assert compare(folder, out, "--budget", "100s", "--tokens", "64000") == 0
    for again in (["--budget", "100s"], ["--seeds", "2"]):  # the report is written again
        assert compare(folder, out, "--tokens", "64000", *again) == 0
        warnings = read_report(out)["warnings"]
        assert any(note in warning for warning in warnings), again
    assert "everything is finished" in capsys.readouterr().err
    assert compare(folder, out, "--tokens", "64000", "--seeds", "3") == 0  # then there are 3
    assert not any("not 3" in each for each in read_report(out)["warnings"])


def test_a_plan_that_the_budget_cuts_says_so(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.stops_before = "a-seed1"
    assert compare(folder, tmp_path / "out", "--tokens", "64000", "--workers", "1") == 130
    capsys.readouterr()
    assert compare(folder, tmp_path / "out", "--tokens", "64000", "--budget", "30s", "--dry-run") == 0
    assert "the budget of 30 s ends before that; the same command continues" in capsys.readouterr().err


def seconds_of(printed: str) -> float:
    """The time that a plan names."""
    return seconds_in(printed.split("about ")[1].split(" in all")[0].split(" left")[0])


def test_a_tuning_budget_that_is_too_small_is_refused_before_the_text_is_read(
    folder: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison_run, "prepare_corpus", None)
    options = ("--tokens", "64000", "--tune", "lr=0.001..0.02", "--tune-budget", "5s")
    assert compare(folder, tmp_path / "out", *options) == 2
    assert "a budget of 5 seconds is too small" in capsys.readouterr().err


@pytest.mark.parametrize("is_slow", [False, True])
def test_an_interrupt_prints_the_table_the_report_and_what_is_missing(
    folder: Path,
    tmp_path: Path,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_slow: bool,
) -> None:
    """Also where a report takes so long to write that it is not written after every run."""
    machine.stops_before = "b-seed1"
    monkeypatch.setattr(comparison_run, "SLOW_REPORT_SECONDS", 0.0 if is_slow else 1e9)
    monkeypatch.setattr(comparison_run, "MAX_REPORT_SHARE", 0.0)
    options = ("--tokens", "64000", "--workers", "1", "--seeds", "2")
    assert compare(folder, tmp_path / "out", *options) == 130
    out = capsys.readouterr().out
    assert "bits per" in out
    *_, last = out.splitlines()
    assert f"{tmp_path}/out/report.html" in last
    assert "missing: 1 of 4 training runs" in last


def test_the_estimate_is_linear_in_steps_and_seeds() -> None:
    step = StepTime(step=0.5, start=3.0, flops=1e9)
    assert step.forward(4e9) == pytest.approx(2.0)
    limit = TimeBudget(seconds=parse_duration("7m", "--budget"), started=0.0)
    assert limit.end == pytest.approx(420 - 8.4)
    times = {"90s": 90, "1.5h": 5400, "1d": 86400, " 0.5d ": 43200}
    assert {text: parse_duration(text, "--budget") for text in times} == times
    for text in ("", "d", "0d", "1w", "1 d", "-1d", "1e3s", f"{'9' * 400}d"):
        with pytest.raises(ConfigError, match=r"--budget .*such as 90s, 30m, 2h or 1d"):
            parse_duration(text, "--budget")
    assert [format_seconds(seconds) for seconds in (4, 60, 90, 7200)] == ["4 s", "1 min", "1 min 30 s", "2.0 h"]
