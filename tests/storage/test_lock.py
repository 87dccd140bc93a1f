"""One holder at a time, a clear refusal for the second, and nothing to clean up after a killed one."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heddle.errors import CheckpointError, MachineError
from heddle.storage.folder import write_folder
from heddle.storage.lock import RunLock, lock_output
from tests.storage.shared import System, content, standing_in, state

HOLD = f"""
import sys
from {RunLock.__module__} import RunLock
from heddle.errors import CheckpointError
sys.stdin.readline()
try:
    with RunLock(sys.argv[1]):
        print("holds", flush=True)
        sys.stdin.readline()
except CheckpointError as error:
    print(error, flush=True)
    sys.stdin.readline()
"""


def contender(folder: Path) -> "subprocess.Popen[str]":
    """A process that tries the lock at the first line it gets and ends at the second."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_racers_and_a_killed_holder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with contender(folder) as first_process, contender(folder) as second_process:
        for process in (first_process, second_process):
            go_on(process)
        answers = {first_process.pid: answer(first_process), second_process.pid: answer(second_process)}
        winners = [process for process in (first_process, second_process) if answers[process.pid] == "holds"]
        assert len(winners) == 1
        loser = second_process if winners[0] is first_process else first_process
        assert answers[loser.pid] == (
            f"{folder}: is in use by process {winners[0].pid}; wait until it has ended or choose another folder"
        )
        with pytest.raises(CheckpointError, match=f"process {winners[0].pid}"), RunLock(folder):
            pass
        winners[0].send_signal(signal.SIGKILL)
        winners[0].wait()
        with RunLock(folder):
            assert (folder / ".lock").read_text() == f"{os.getpid()}\n"
        go_on(loser)


def test_twenty_rounds_in_one_process(tmp_path: Path) -> None:
    for _ in range(20):
        with RunLock(tmp_path):
            with pytest.raises(CheckpointError, match=f"process {os.getpid()}"), RunLock(tmp_path):
                pass
            with pytest.raises(CheckpointError, match="in use"), RunLock(tmp_path):  # a refusal frees nothing
                pass


def test_a_shorter_number_replaces_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("99999999999999\n")
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_an_error_inside_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    for at in range(1, 6):
        folder = tmp_path / str(at)
        with (
            standing_in(System(at, error)),
            pytest.raises(MachineError, match="cannot be written"),
            RunLock(folder),
        ):
            raise AssertionError("the lock was given")
        with RunLock(folder):
            pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious")
    for lock in (RunLock(tmp_path / "run"), lock_output(tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"\.lock:.*symbolic link"), lock:
            pass
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"run:.*folder"), RunLock(tmp_path / "run"):
        pass


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, **content(1))
    with lock_output(folder):
        assert (tmp_path / ".model.lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(CheckpointError) as caught:
            write_folder(folder, **content(2))
        assert str(caught.value) == (
            f"{folder}: is being written by process {os.getpid()}; wait until it has ended or choose another name"
        )
        write_folder(tmp_path / "other", **content(2))
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]
    before = state(folder)
    write_folder(folder, **content(2))
    assert state(folder) != before
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


def test_a_lock_that_its_holder_removes_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between the second process's opening and locking of the file."""
    first = lock_output(tmp_path / "model")
    first.__enter__()
    right = fcntl.flock
    waits: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not waits:
            waits.append(descriptor)
            first.__exit__(None, None, None)
        right(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_output(tmp_path / "model"):
        assert len(waits) == 1
        with pytest.raises(CheckpointError, match="is being written by process"), lock_output(tmp_path / "model"):
            pass
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".model.lock").write_text("4194305\n")
    staged = tmp_path / ".model.tmp-4194305-00000000"
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"half")
    write_folder(tmp_path / "model", **content(1))
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_system_without_locks_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", flock)
    write_folder(tmp_path / "model", **content(1))
    assert os.listdir(tmp_path) == ["model"]
