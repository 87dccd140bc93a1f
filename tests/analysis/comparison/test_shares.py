"""A comparison on several devices, and shared among several processes: each run is done once, and gives the same."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.lab import workers as processes
from heddle.storage import lock
from heddle.storage.lock import RunLock
from tests.analysis.comparison.runs import Ended, Workers, command, read_report, without_timing
from tools.kill_test import done


class SharedWorkers(Workers):
    """Workers of several threads, which stand for processes: one computes at a time, and its end is seen later."""

    def __init__(self) -> None:
        super().__init__()
        self.one_at_a_time = threading.Lock()
        self.both_begin = threading.Barrier(2, timeout=600)
        self.ran_by: Counter[str] = Counter()

    def start(self, request: Path, target: Path, *inherited: int) -> Ended:
        process = threading.current_thread().name
        if process.startswith("process") and process not in self.ran_by:
            self.both_begin.wait()
        with self.one_at_a_time:
            self.ran_by[process] += 1
            return super().start(request, target)


@pytest.fixture
def shared_workers(monkeypatch: pytest.MonkeyPatch) -> SharedWorkers:
    workers = SharedWorkers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    monkeypatch.setattr(processes, "SHARED_POLL_SECONDS", 0.01)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.01)
    return workers


def on_devices(folder: Path, out: Path, devices: str, *options: str) -> list[str]:
    arguments = [word for word in command(folder, out, *options) if word != "--quiet"]  # quiet is of a whole process
    at = arguments.index("--device")
    return [*arguments[:at], "--devices", devices, *arguments[at + 2 :]]


def run_together(*commands: list[str]) -> None:
    """Run commands in threads; each must return 0."""
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda each=each: codes.append(run_command(each)), name=f"process {number}")
        for number, each in enumerate(commands)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * len(commands)


def test_two_processes_share_a_comparison(folder: Path, tmp_path: Path, shared_workers: SharedWorkers) -> None:
    assert run_command(command(folder, tmp_path / "alone")) == 0
    alone, shared_workers.ran = shared_workers.ran, []
    shared_workers.ran_by.clear()
    run_together(*(on_devices(folder, tmp_path / "shared", "cpu:2", "--share", f"{k}/2") for k in (0, 1)))
    assert sorted(shared_workers.ran) == sorted(alone)  # each once
    assert all("speed" in run for run in shared_workers.ran[-4:])  # once nothing else runs
    assert set(shared_workers.ran_by) == {"process 0", "process 1"}
    expected, report = read_report(tmp_path / "alone"), read_report(tmp_path / "shared")
    assert expected.pop("workers") == {"count": 1, "threads": 1}
    assert report.pop("workers") == {"count": 4, "threads": 1}
    assert without_timing(report) == without_timing(expected)
    assert {path.name for path in (tmp_path / "shared").glob(".*")} == {".lock"}
    assert not [path for path in (tmp_path / "shared" / "runs").glob(".*") if path.is_file()]


def test_those_who_share_keep_others_out(
    folder: Path, tmp_path: Path, shared_workers: SharedWorkers, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert run_command([*arguments]) == 2
        return capsys.readouterr().err

    with RunLock(tmp_path, shared=True):
        assert f"{tmp_path}:" in refusal(*command(folder, tmp_path))
    with RunLock(tmp_path):
        assert f"{tmp_path}:" in refusal(*on_devices(folder, tmp_path, "cpu:2", "--share", "0/2"))
    shared_workers.interrupts = {"full-seed0"}
    assert run_command(on_devices(folder, tmp_path, "cpu", "--share", "0/2")) == 143
    capsys.readouterr()
    with RunLock(tmp_path, shared=True):  # another process works on two seeds
        more = on_devices(folder, tmp_path, "cpu", "--share", "0/2", "--seeds", "3")
        assert f"{tmp_path}:" in refusal(*more)
    assert shared_workers.ran == []


@pytest.mark.soak
def test_a_job_of_a_slurm_array_is_killed(folder: Path, tmp_path: Path, shared_workers: SharedWorkers) -> None:
    """Two jobs as processes; the other one takes over the run of the one that is killed, from its checkpoint."""
    runs, options = tmp_path / "shared" / "runs", ["--tokens", "30000"]

    def start(index: int) -> subprocess.Popen[bytes]:
        array = {"SLURM_ARRAY_TASK_ID": f"{index + 5}", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "5"}
        arguments = command(folder, tmp_path / "shared", *options, designs=("full",))
        return subprocess.Popen([sys.executable, "-m", "heddle", *arguments], env=os.environ | array)

    jobs = [start(0), start(1)]
    while done(runs / "full-seed0") < 2:
        assert [job.poll() for job in jobs] == [None, None]
        time.sleep(0.01)
    owner = int((runs / ".full-seed0.json.lock").read_text())
    [killed] = [job for job in jobs if job.pid == owner]
    [other] = [job for job in jobs if job.pid != owner]
    killed.kill()
    killed.wait()
    assert not (runs / "full-seed0.json").exists()
    assert other.wait() == 0
    assert run_command(command(folder, tmp_path / "alone", *options, designs=("full",))) == 0
    expected, report = read_report(tmp_path / "alone"), read_report(tmp_path / "shared")
    assert (expected.pop("workers")["count"], report.pop("workers")["count"]) == (1, 2)
    for training_run in report["designs"][0]["runs"]:
        del training_run["wall_seconds"]  # of a process
    assert without_timing(report) == without_timing(expected)
