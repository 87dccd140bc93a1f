"""Real worker processes: they save when told, die with their parent, and a comparison goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from heddle import signals
from heddle.cli.main import run_command
from heddle.errors import CheckpointError, HeddleError
from heddle.lab import workers as processes
from heddle.lab.compare import run, worker
from heddle.lab.workers import Result, Task, Workers, default_workers, describe_workers, run_tasks
from heddle.signals import Interrupted
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.lock import RunLock
from heddle.storage.model import load
from heddle.storage.run_log import read_log
from tests import small
from tools.kill_test import done

OPTIONS = ["--sequence-length", "32", "--batch-size", "8", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--speed-context-length", "16", "--recall", "none"]


def start(folder: Path, out: Path, tokens: int) -> subprocess.Popen[str]:
    asked = ["--data", f"{folder}/text", "--out", str(out), "--seeds", "1", "--tokens", str(tokens), *OPTIONS]
    command = [sys.executable, "-m", "heddle", "compare", f"{folder}/one.yaml", *asked]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    small.folder(root / "text")
    small.design_file(root / "one.yaml")
    return root


def holder(run: Path) -> int | None:
    """The process that holds a run's folder, if one does."""
    try:
        with RunLock(run):
            return None
    except CheckpointError as error:
        return int(str(error).partition("process ")[2].partition(";")[0])


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    while done(run) < step:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_signals_and_the_death_of_the_parent(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one-seed0"
    first = start(folder, tmp_path, 30_000)
    wait_for_step(first, run, 2)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate()
    assert first.returncode == 143
    assert out.startswith("report so far: ")
    assert "saved at step" in err
    assert "Traceback" not in err
    assert holder(run) is None
    saved = checkpoint_steps(run)[-1]
    assert saved >= 2

    second = start(folder, tmp_path, 30_000)
    wait_for_step(second, run, saved + 2)
    worker = holder(run)
    assert worker not in (None, second.pid)
    second.kill()
    _, err = second.communicate()  # the worker holds the other end too: it saves, and goes
    assert holder(run) is None
    assert checkpoint_steps(run)[-1] > saved, err

    third = start(folder, tmp_path, 30_000)
    out, err = third.communicate()
    assert third.returncode == 0, err
    assert f"{run} from" in err
    assert "report: " in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [design["runs"][0]["status"] for design in report["designs"]] == ["done"]
    assert not any((tmp_path / "runs").glob(".*.task.json"))


@pytest.mark.usefixtures("real_starts")
def test_a_worker_whose_parent_is_gone_before_it_starts_does_nothing(tmp_path: Path) -> None:
    request = tmp_path / "task.json"
    request.write_text(json.dumps({"parent_pid": os.getpid() + 1, "task": "speed", "quiet": True}))
    command = [sys.executable, "-m", worker.__name__, str(request), str(tmp_path / "result.json")]
    code = subprocess.run(command, check=False).returncode
    assert code == (143 if sys.platform == "linux" else 1)
    assert not (tmp_path / "result.json").exists()


def sleeper(path: Path, answer: str) -> str:
    """A stand-in for Python that does `answer` when it is told to end, or sleeps."""
    path.write_text(f"#!/bin/sh\ntrap '{answer}' TERM INT\necho ready > {path}.ready\nwhile :; do sleep 0.02; done\n")
    path.chmod(0o755)
    return str(path)


def test_a_signal_is_handed_on_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", sleeper(program, f"echo saved > {tmp_path}/saved; exit 143"))
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        if waits == 0 and program.with_name("python.ready").exists():
            waits = 1
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(Interrupted) as caught:
        run_tasks([Task("a", tmp_path / "result.json", {"task": "speed"})], Workers(("cpu",)))
    assert caught.value.exit_code == 143
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_a_second_signal_kills_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", sleeper(program, ":"))
    started: list[subprocess.Popen[bytes]] = []
    right = subprocess.Popen

    def popen(*arguments: object, **named: object) -> subprocess.Popen[bytes]:
        started.append(right(*arguments, **named))  # type: ignore[call-overload]
        return started[-1]

    def sleep(seconds: float) -> None:
        if program.with_name("python.ready").exists():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", -1.0)
    with pytest.raises(Interrupted):
        run_tasks([Task("a", tmp_path / "result.json", {"task": "speed"})], Workers(("cpu",)))
    assert started[0].returncode == -9


def requests_of(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    """The training tasks of a comparison of two seeds, which is not run."""
    tasks: dict[str, Task] = {}

    def keep(asked: Iterable[Task], *_: object, **__: object) -> list[Result]:
        tasks.update({task.result_file.stem: task for task in asked if task.request["task"] == "train"})
        return []

    with monkeypatch.context() as patch:
        patch.setattr(run, "run_tasks", keep)
        patch.setattr(run, "_train", lambda writer, *_: keep(
            [run._training_task(writer, entry, seed) for entry in writer.comparison.plan.entries for seed in (0, 1)]
        ))  # fmt: skip
        options = ["--data", f"{folder}/text", "--out", str(out), "--seeds", "2", "--tokens", "3000", *OPTIONS]
        assert run_command(["compare", f"{folder}/one.yaml", *options, "--quiet"]) == 0
    return tasks


def timeless(result: Result) -> Result:
    """A result without what depends on the clock."""
    timed = ("seconds", "wall_seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes")
    return {name: value for name, value in result.items() if name not in timed}


def moved(task: Task, name: str, **fields: object) -> Task:
    """The same task with a result and a folder of its own."""
    file = task.result_file.with_name(f"{name}.json")
    return Task(task.label, file, {**task.request, "out": str(file.with_suffix("")), **fields}, task.is_optional)


@pytest.mark.usefixtures("real_starts")
def test_a_forked_run_is_that_of_a_fresh_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, the weights too, after another run and after one that failed in the same server."""
    first, second = requests_of(folder, tmp_path, monkeypatch).values()
    failing = moved(second, "failing", design=second.request["design"] | {"width": 7})
    with pytest.raises(HeddleError, match="width"):
        run_tasks([failing], Workers(("cpu",)))
    forked = run_tasks([moved(first, "a"), moved(second, "b")], Workers(("cpu", "cpu")))
    assert [server.has_ended for server in processes._servers] == [False] * (sys.platform == "linux")
    monkeypatch.setattr(processes, "FORKED", ())
    fresh = run_tasks([moved(first, "c"), moved(second, "d")], Workers(("cpu", "cpu")))
    assert [timeless(result) for result in forked] == [timeless(result) for result in fresh]
    runs = tmp_path / "runs"
    for ours, theirs in (("a", "c"), ("b", "d")):
        weights = [load(runs / name)[0].state_dict() for name in (ours, theirs)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
    assert read_log(runs / "a")[-1]["loss"] != read_log(runs / "b")[-1]["loss"]


def test_the_end_of_a_fork_server_ends_its_workers_and_a_new_one_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        return  # each worker is a process of its own
    task, _ = requests_of(folder, tmp_path, monkeypatch).values()
    settings = task.request["settings"] | {"steps": 10**6, "save_every": None, "evaluate_every": None}
    endless, out = moved(task, "endless", settings=settings), tmp_path / "runs" / "endless"

    def kill(*_: object) -> None:
        if done(out) > 2:
            processes._servers[0]._process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", kill)
        (result,) = run_tasks([endless], Workers(("cpu",)))
    assert (result["status"], result["message"].partition(": ")[2].partition(",")[0]) == (
        "failed", "was ended by SIGKILL"
    )  # fmt: skip
    while holder(out) is not None:  # the worker saves, and goes
        time.sleep(0.01)
    assert checkpoint_steps(out)
    (result,) = run_tasks([moved(task, "next")], Workers(("cpu",)))
    assert result["status"] == "done"


@pytest.mark.soak
def test_a_worker_that_is_really_killed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one-seed0"
    process = start(folder, tmp_path, 100_000)
    wait_for_step(process, run, 3)
    worker = holder(run)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 0
    assert "warning: one, seed 0: was ended by SIGKILL" in err
    again = start(folder, tmp_path, 100_000)
    assert again.communicate() is not None
    report = json.loads((tmp_path / "report.json").read_text())
    assert [design["runs"][0]["status"] for design in report["designs"]] == ["done"]


def test_a_plan_says_workers_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = default_workers("cpu", 1), default_workers("cpu", 4, 2)
    assert describe_workers(one, 1) == "1 at a time on 1 thread (OMP_NUM_THREADS=1, of 4 cores)"
    assert describe_workers(two, 4) == "2 at a time on 2 threads each"
    assert describe_workers(Workers(("cuda:0",)), 4) == "1 at a time"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert describe_workers(one, 1) == "1 at a time on 1 thread"
