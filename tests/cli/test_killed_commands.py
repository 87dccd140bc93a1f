"""A killed command, given again, leaves what it leaves undisturbed; a signal is answered in a sentence."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.exchange.gguf import export as gguf_export
from heddle.lab.workers import start_worker
from heddle.storage import file_io
from heddle.storage import folder as folder_module
from tests.killed_commands import COMMANDS, STOP_SIGNALS, Ended, KilledCommand, Process, ending, write_workspace

# Where a process dies, in the middle of what it writes.
DIES = f"""
import os, signal
from pathlib import Path
import {gguf_export.__name__} as export
import {folder_module.__name__} as folder
def die(*arguments, **named):
    if type(arguments[0]).__name__ == "GGUFWriter":
        Path(arguments[0].path).write_bytes(b"GGUF")
    os.kill(os.getpid(), signal.SIGKILL)
export._write_contents = folder.finish_folder = die
"""
# A writer that gives the new file its own name at once.
PLAIN = f"""
from contextlib import contextmanager
import {file_io.__name__} as atomic
@contextmanager
def plain(path, remedy=None):
    yield path
atomic.replace_file = plain
"""


class InThisProcess(KilledCommand):
    """Undisturbed here; only what is killed is another process."""

    def done(self) -> tuple[Ended, dict[str, Any]]:
        return Ended(run_command(self.arguments), "", ""), ending(self.out)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")

    def give(arguments: Sequence[str]) -> None:
        assert run_command(list(arguments)) == 0

    return write_workspace(folder, give)


def differences(name: str, workspace: Path, folder: Path, plant: str = "") -> list[str]:
    """Run it undisturbed, then kill it in the middle and give it again: how its ending differs."""
    command = InThisProcess(name, workspace, folder)
    command.clear()
    ended, whole = command.done()
    assert ended.code == 0
    command.clear()
    process = command.begin(plant + DIES)
    assert process.ended().code == -signal.SIGKILL
    assert any(command.out.iterdir())  # it had begun to write
    return [*command.halves(whole), *command.differences(whole)]


@pytest.mark.parametrize("name", ["export", "gguf"])
def test_a_kill_in_the_middle_of_writing(name: str, workspace: Path, tmp_path: Path) -> None:
    assert differences(name, workspace, tmp_path) == []


def test_a_plain_write_is_noticed(workspace: Path, tmp_path: Path) -> None:
    assert differences("gguf", workspace, tmp_path, PLAIN)[0] == "out.gguf is not whole"  # and stands in the way then


def test_a_file_left_behind_is_noticed(workspace: Path, tmp_path: Path) -> None:
    command = InThisProcess("export", workspace, tmp_path)
    command.clear()
    (command.out / ".out.tmp-1-0").touch()
    ended, now = command.done()
    assert ended.code == 0
    command.clear()
    (command.out / ".out.tmp-1-0").touch()
    whole = {path: content for path, content in now.items() if "tmp" not in path}
    assert list(command.differences(whole)) == [".out.tmp-1-0 was left behind"]


@pytest.mark.usefixtures("real_starts")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_a_worker_is_imported(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python would answer SIGINT with a traceback of imports, and SIGTERM with nothing."""
    request = tmp_path / "request.json"
    request.write_text(
        f'{{"parent_pid": {os.getpid()}, "label": "w", "quiet": false, "devices": ["cpu"], "task": "speed"}}'
    )
    worker = start_worker(request, tmp_path / "result.json")
    worker.send_signal(number)
    assert worker.wait() == 128 + number
    assert capfd.readouterr().err == "w: stopped before it was done; the same command continues\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


# The end of a process: its threads end, then what is registered, then Python itself.
IN_THREAD = """
import os, signal, threading
def after_work():
    threading.main_thread().join()
    while True:
        os.kill(os.getpid(), signal.{})
        threading.Event().wait(0.05)
threading.Thread(target=after_work).start()
"""
AT_EXIT = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.{}))"
CASES = [(IN_THREAD, number) for number in STOP_SIGNALS] + [(AT_EXIT, number) for number in STOP_SIGNALS]


@pytest.mark.usefixtures("real_starts")
@pytest.mark.parametrize(("plant", "number"), CASES)
def test_a_signal_while_a_process_ends(plant: str, number: signal.Signals) -> None:
    """Python would answer SIGINT with a traceback of its own end, and the others with nothing."""
    code = f"{plant.format(number.name)}\nfrom heddle.__main__ import main\nmain()"
    ended = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    if plant == AT_EXIT:
        assert (ended.returncode, ended.stderr) == (0, "")
    else:
        assert ended.returncode == 128 + number
        assert ended.stderr == f"heddle: ended by {number.name}; what was saved before remains\n"


@pytest.mark.soak
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_and_signals_at_random_moments(name: str, workspace: Path, tmp_path: Path) -> None:
    trials = KilledCommand(name, workspace, tmp_path).tried(10, seed=1)
    assert trials.failures == []
    assert min(trials.kills, trials.signals) >= 10


def test_a_command_that_had_ended_worked_no_longer(workspace: Path, tmp_path: Path) -> None:
    """Its processor time is gone with it, and must not count as spent after the signal."""
    process = Process(COMMANDS["export"], ["--help"], tmp_path / "cache", tmp_path / "output")
    while process.process.poll() is None:
        time.sleep(0.01)
    assert process.end(signal.SIGINT) == 0.0
