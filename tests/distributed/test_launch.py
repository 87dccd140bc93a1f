"""`heddle train --nproc`: ranks that are killed go on bit-equal, stop together, and fail with one sentence."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.storage.checkpoints import checkpoint_steps
from tests import small
from tools.kill_test import children, done, ending, finish, killed, moments, start, undisturbed

STEPS = 24


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("asked")
    design = small.design_file(folder / "design.yaml", small.dropping())
    data = small.folder(folder / "text")
    size = ["--sequence-length", "32", "--batch-size", "4", "--threads", "1", "--device", "cpu", "--nproc", "2"]
    return [str(design), "--data", str(data), *size, "--steps", str(STEPS), "--save-every", "4", "--quiet"]


def wait_for(process: subprocess.Popen[str], out: Path, lines: int) -> None:
    while process.poll() is None and done(out) < lines:
        time.sleep(0.005)


def test_a_rank_is_killed_and_a_signal_saves_once(options: list[str], tmp_path: Path) -> None:
    """A rank dies and all start again; SIGTERM to the launcher saves on all ranks; the same command ends bit-equal."""
    out = tmp_path / "cut"
    undisturbed(options, tmp_path / "whole")
    command = [sys.executable, "-m", "heddle", "train", *options[:-1], "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, out, 6)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    while process.poll() is None and victim in children(process.pid):
        time.sleep(0.01)
    wait_for(process, out, 13)
    process.terminate()
    printed, told = process.communicate()
    assert process.returncode == 143, told
    assert printed == ""
    saved = re.findall(r"heddle: saved at step (\d+); the same command continues", told)
    assert len(saved) == 1, told
    assert checkpoint_steps(out)[-1] == int(saved[0]) >= 13
    assert told.count("was killed; restarting all ranks (1 of 3)") == 1
    assert "Traceback" not in told
    finish(start(options, out))
    assert ending(out, STEPS) == ending(tmp_path / "whole", STEPS)


@pytest.mark.usefixtures("real_starts")
def test_all_ranks_fail_with_one_sentence(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("holds something else")
    command = [sys.executable, "-m", "heddle", "train", *options, "--out", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 2, failed.stderr
    assert failed.stdout == ""
    assert failed.stderr == f"heddle: {tmp_path}: holds something else (file.txt); choose an empty or new folder\n"


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_of_ranks_and_launchers(options: list[str], tmp_path: Path, seed: int) -> None:
    starting = undisturbed(options, tmp_path / "whole")
    restarting = [*options, "--max-restarts", "20"]
    killed(restarting, tmp_path / "cut", moments(10, STEPS, starting, seed, ranks=2))
    assert ending(tmp_path / "cut", STEPS) == ending(tmp_path / "whole", STEPS)


@pytest.mark.soak
def test_a_rank_that_hangs_is_named(options: list[str], tmp_path: Path) -> None:
    once = ["--max-restarts", "0", "--rank-timeout", "5"]
    command = [sys.executable, "-m", "heddle", "train", *options, *once, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, tmp_path / "run", 6)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGSTOP)
    while process.poll() is None and len(children(process.pid)) == 2:
        time.sleep(0.05)
    os.kill(victim, signal.SIGCONT)  # the launcher waits for it, to let it save
    _, told = process.communicate()
    assert process.returncode == 75, told
    assert re.search(
        rf"rank \d \(process {victim} on \S+\) of 2 hangs: the others waited too long in \w+ of \[.*number \d+; ", told
    ), told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nproc", "0"], "--nproc 0:"),
        (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts -1:"),
        (["--rank-timeout", "0"], "--rank-timeout 0:"),
        (["--tensor-parallel-degree", "2"], "tensor_parallel_degree 2:"),
        (["--data-parallel-shard-degree", "2"], "data_parallel_shard_degree 2:"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    design = small.design_file(tmp_path / "design.yaml")
    assert run_command(["train", str(design), *arguments, "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err


def test_only_train_runs_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(["compare", "preset:gqa-tiny"]) == 2
    assert "WORLD_SIZE 2:" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_command(["train", "preset:gqa-tiny", "--nproc", "4"]) == 2
    assert "--nproc 4: torchrun" in capsys.readouterr().err
