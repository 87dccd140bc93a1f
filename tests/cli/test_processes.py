"""The command as a process: broken pipes, full disks, and terminals of every kind."""

import io
import os
import pty
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import main, run_command
from heddle.storage import run_log
from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps
from heddle.storage.folder import tensors_sha256
from heddle.storage.lock import RunLock

HEDDLE = [sys.executable, "-W", "error", "-m", "heddle"]
SIZE = ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu", "--threads", "1"]


def train(workspace: Path, out: Path, *options: str) -> list[str]:
    return ["train", f"{workspace}/good.yaml", "--data", f"{workspace}/text", "--out", str(out), *SIZE, *options]


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_space(workspace: Path, tmp_path: Path) -> None:
    options = ("--steps", "4", "--save-every", "2", "--quiet")
    assert run_command(train(workspace, tmp_path / "whole", *options)) == 0  # it also leaves the tokens in the cache

    def little_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    command = [*HEDDLE, *train(workspace, tmp_path / "run", *options)]
    failed = subprocess.run(command, capture_output=True, text=True, preexec_fn=little_space, check=False)
    assert failed.returncode == 1
    assert failed.stdout == ""
    named = re.escape(str(checkpoint_folder(tmp_path / "run", 2)))
    assert re.fullmatch(rf"heddle: {named}\S*: cannot be written \(File too large\).*\n", failed.stderr)
    assert checkpoint_steps(tmp_path / "run") == []
    assert run_command(train(workspace, tmp_path / "run", *options)) == 0
    assert tensors_sha256(checkpoint_folder(tmp_path / "run", 4)) == tensors_sha256(
        checkpoint_folder(tmp_path / "whole", 4)
    )


def test_a_machine_without_a_compiler_is_said_in_a_sentence(workspace: Path, tmp_path: Path) -> None:
    environment = os.environ | {"CXX": str(tmp_path / "none/g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    command = train(workspace, tmp_path / "run", "--steps", "2", "--compile", "--quiet")
    program = [sys.executable, "-m", "heddle"]  # torch's compiler warns of itself
    failed = subprocess.run([*program, *command], capture_output=True, text=True, env=environment, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "heddle: --compile: no C++ compiler works here; install one" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_garbage_is_not_looked_for_while_modules_are_imported_and_as_python_ends() -> None:
    program = """
import gc
from heddle.__main__ import main
try:
    main()
except SystemExit:
    print(gc.get_freeze_count() > 1000, gc.get_threshold()[0], gc.collect(), gc.get_threshold()[0], len(gc.callbacks))
"""
    command = [sys.executable, "-c", program, "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split()
    assert [*ended[:2], *ended[3:]] == ["True", "400000", "5000", "0"]


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"]])
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        failed = subprocess.run([*HEDDLE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert failed.returncode == 1
    message = "heddle: No space left on device; check the disk, its space and your permissions\n"
    assert failed.stderr == message


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--schema"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([*HEDDLE, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_stderr_does_not_change_the_exit_code() -> None:
    ended = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *HEDDLE, "frob"], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == 2


def test_an_ascii_terminal(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as caught:
        main(["show", f"{workspace}/good.yaml", "--device", "cpu"])
    assert caught.value.code == 0
    assert "mixer and feed-forward" in written.getvalue().decode("ascii")


def test_text_is_utf_8_in_the_locale_c(workspace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["generate", f"{workspace}/run", "--prompt", "日本", "--max-new-tokens", "2", "--json", "--device", "cpu"]
    assert run_command(command) == 0
    expected = capfd.readouterr().out
    assert '"prompt": "日本"' in expected
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    assert subprocess.check_output([*HEDDLE, *command], env=environment).decode() == expected


def in_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """Run with a terminal of 80 columns as stderr and stdout; returns the exit code and all that it wrote."""
    parent, child = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "80"} | environment
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=variables)
    os.close(child)
    written = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the last holder of the other end has gone
            break
        written += piece
        if not piece:
            break
    os.close(parent)
    return process.wait(), written.decode()


COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38;\d+;\d+|9[0-7])(?:;\d+)*m")


def test_on_a_terminal_there_is_a_bar_and_no_color_with_no_color_set(workspace: Path, tmp_path: Path) -> None:
    code, written = in_terminal([*HEDDLE, *train(workspace, tmp_path / "a", "--steps", "20")], NO_COLOR="1")
    assert code == 0, written
    assert "bits per byte on held-out text after 20 steps" in written
    assert "\x1b[" in written  # a bar that moves
    assert "training" in written
    assert not COLOR.search(written)


def test_the_module_is_the_command(workspace: Path) -> None:
    shown: Any = subprocess.run([*HEDDLE, "--help"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Usage: heddle [OPTIONS] COMMAND")


def test_a_damaged_line_of_a_log_is_named_and_no_other_line_is_lost(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    shorter = train(workspace, run, "--steps", "60", "--save-every", "20", "--quiet")
    assert run_command(shorter) == 0
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 60
    for number, damaged in (
        (1, b"\n"),
        (3, lines[2][:-9] + b"\n"),
        (3, lines[2][:-1]),
        (59, b"{}\n"),
        (60, lines[59][:-1]),
    ):
        log.write_bytes(b"".join([*lines[: number - 1], damaged, *lines[number:]]))
        before = log.read_bytes()
        capsys.readouterr()
        assert run_command(shorter) == 2
        assert capsys.readouterr().err.startswith(f"heddle: {log}: line {number}")
        assert log.read_bytes() == before
    log.write_bytes(whole)
    assert run_command(shorter) == 0
    assert log.read_bytes() == whole

    monkeypatch.setattr(run_log, "_verify_lines", lambda *arguments: None)  # planted: a resume that checks no line
    log.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"step": 3', b'"step": 4'), *lines[3:]]))
    assert log.read_bytes() != whole
    assert run_command(shorter) == 0


@pytest.mark.parametrize("command", ["export @/run ?", "export @/run ?.gguf --format gguf", "import @/exported ?"])
def test_two_processes_cannot_write_one_output(
    command: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word.replace("@/", f"{workspace}/").replace("?", f"{tmp_path}/out") for word in command.split()]
    out = Path(next(word for word in arguments if word.startswith(str(tmp_path))))
    holding = f"import sys, {RunLock.__module__} as lock\nwith lock.lock_output(lock.Path({str(out)!r})):\n"
    holding += "    print('holds', flush=True)\n    sys.stdin.readline()\n"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", holding], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        capsys.readouterr()
        assert run_command(arguments) == 2
        refused = (
            f"heddle: {out}: is being written by process {other.pid}; wait until it has ended or choose another name\n"
        )
        assert capsys.readouterr().err == refused
        other.kill()
    assert [path.name for path in tmp_path.iterdir()] == [f".{out.name}.lock"]  # of a killed process: it locks nothing
    assert run_command(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_two_comparisons_cannot_share_a_folder(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLock(tmp_path / "out"):
        capsys.readouterr()
        arguments = ["compare", f"{workspace}/good.yaml", "--data", f"{workspace}/text", "--out", f"{tmp_path}/out"]
        assert run_command(arguments) == 2
        assert f"{tmp_path}/out:" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
