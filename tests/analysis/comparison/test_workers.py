"""Real worker processes: they save when told, die with their parent, and a comparison goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heddle import signals
from heddle.errors import CheckpointError
from heddle.lab.compare import worker
from heddle.lab.workers import Task, Workers, run_tasks
from heddle.signals import Interrupted
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.lock import RunLock
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
        run_tasks([Task("a", tmp_path / "result.json", {"task": "train"})], Workers(("cpu",)))
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
        run_tasks([Task("a", tmp_path / "result.json", {"task": "train"})], Workers(("cpu",)))
    assert started[0].returncode == -9


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
