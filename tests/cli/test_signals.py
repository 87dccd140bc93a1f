"""A signal during any command: one sentence, an exit code of 128 and its number, and nothing half-written."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heddle import __main__ as entry
from heddle import laws
from heddle.cli import main as command_line
from heddle.cli.main import run_command
from heddle.data import corpus
from heddle.exchange.gguf import export as gguf_export
from heddle.lab import verify
from heddle.lab.pages import report as report_file
from heddle.model import size
from heddle.storage import file_io, folder
from heddle.storage import model as model_folder

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


# Each command, and the function during which the signal arrives. Training answers with a save: test_kills.py.
COMMANDS = [
    ("show @/good.yaml", size, "materialize"),
    ("check @/good.yaml", laws, "shrink"),
    ("train @/good.yaml --data @/text --out ~/out", corpus, "split_source"),
    ("compare @/good.yaml --data @/text --out ~/out", corpus, "split_source"),
    ("compare @/good.yaml --data @/text --out ~/out", report_file, "report_page"),
    ("generate @/run", model_folder, "restore_model"),
    ("inspect @/run --text x --out ~/out.html", file_io, "_sync_file"),
    ("import @/exported ~/out", folder, "write_tensor_file"),
    ("export @/run ~/out", folder, "write_tensor_file"),
    ("export @/run ~/out", folder, "finish_folder"),
    ("convert @/run ~/out --to kv_heads=2 --report-tokens 0", folder, "write_tensor_file"),
    ("verify @/run --json", verify, "verify_file"),
    ("export @/run ~/out.gguf --format gguf", gguf_export, "_write_contents"),
]


def after_the_signal(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, during which a signal arrives once its work is done."""

    def interrupted(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        signal.raise_signal(number)
        return result

    return interrupted


@pytest.mark.parametrize(("command", "module", "name"), COMMANDS, ids=[f"{row[0]} at {row[2]}" for row in COMMANDS])
def test_a_signal_ends_a_command_in_one_sentence(
    command: str,
    module: ModuleType,
    name: str,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = NUMBERS[len(command + name) % len(NUMBERS)]
    monkeypatch.setattr(module, name, after_the_signal(getattr(module, name), number))
    arguments = [word.replace("@/", f"{workspace}/").replace("~/", f"{tmp_path}/") for word in command.split()]
    before = {number: signal.getsignal(number) for number in NUMBERS}
    capsys.readouterr()
    assert run_command(arguments) == 128 + number
    assert {number: signal.getsignal(number) for number in NUMBERS} == before
    out, err = capsys.readouterr()
    assert out == "" or (command.startswith("compare") and out.startswith("report so far: "))
    assert err.splitlines()[-1] == f"heddle: ended by {signal.Signals(number).name} before it was done"
    assert "Traceback" not in err
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    names, reports = {path.name for path in written}, {"report.html", "report.json"}
    assert names <= {"machine.json", "plan.json", *reports}, written
    assert names & reports in (set(), reports)


def test_a_signal_while_text_is_streamed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from heddle.cli import generate

    monkeypatch.setattr(generate, "_print_piece", after_the_signal(generate._print_piece, signal.SIGTERM))
    capsys.readouterr()
    assert run_command(["generate", f"{workspace}/run", "--prompt", "the", "--device", "cpu"]) == 143
    assert capsys.readouterr().err == "heddle: ended by SIGTERM before it was done\n"


def test_one_request_that_arrives_twice_does_not_stop_the_cleaning(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal and a program that forwards its signals both send one."""
    from heddle.storage import tensor_file

    monkeypatch.setattr(folder, "write_tensor_file", after_the_signal(tensor_file.write_tensor_file, signal.SIGINT))
    monkeypatch.setattr(file_io, "remove_folder", after_the_signal(file_io.remove_folder, signal.SIGINT))
    assert run_command(["export", f"{workspace}/run", f"{tmp_path}/out"]) == 130
    assert list(tmp_path.iterdir()) == []


WAITING_PART = """
import signal
from pathlib import Path
Path(__file__).with_name("ready").touch()
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_process_ends_in_one_sentence(number: signal.Signals, tmp_path: Path) -> None:
    with waiting(tmp_path) as process:
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number
    assert (out, err) == ("", f"heddle: ended by {number.name} before it was done\n")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under nohup the end of the terminal ends nothing; a job in the background does not hear Ctrl-C."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with waiting(tmp_path, ignore) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[1] == "heddle: ended by SIGTERM before it was done\n"
    assert process.returncode == 143


def waiting(root: Path, at_start: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
    """A command that waits for a signal."""
    (root / "part.py").write_text(WAITING_PART)
    command = [sys.executable, "-m", "heddle", "show", "preset:gqa-tiny", "--part", f"{root}/part.py"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=at_start)  # noqa: PLW1509
    while not (root / "ready").exists():
        assert process.poll() is None
        os.sched_yield()
    return process


@pytest.mark.parametrize(
    ("closed", "words"),
    [("<&-", ["--version"]), (">&-", ["show", "--schema"]), ("2>&-", ["--version"]), ("<&- >&- 2>&-", ["--version"])],
)
def test_closed_streams_are_no_error(closed: str, words: list[str]) -> None:
    command = [sys.executable, "-m", "heddle", *words]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], capture_output=True, check=False)
    assert ended.returncode == 0
    assert ended.stderr == b""
    assert bool(ended.stdout) is (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_while_the_command_line_is_imported(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *arguments: object) -> None:
            if name == command_line.__name__:
                signal.raise_signal(number)

    monkeypatch.setattr(entry, "end_on_stop_signals", lambda: None)  # this process goes on
    monkeypatch.delitem(sys.modules, command_line.__name__)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert caught.value.code == 128 + number
    assert capsys.readouterr() == ("", f"heddle: ended by {number.name} before it was done\n")
