"""Real processes, really killed: `heddle train` ends as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.storage.checkpoints import checkpoint_steps as steps_saved
from tests import forked, small
from tools.kill_test import done, ending, finish, killed, moments, start, undisturbed

STEPS = 30


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("asked")
    design = small.design_file(folder / "design.yaml", small.dropping())
    data = small.folder(folder / "text")
    size = ["--sequence-length", "32", "--batch-size", "4", "--threads", "1"]
    return [str(design), "--data", str(data), *size, "--steps", str(STEPS), "--save-every", "4", "--quiet"]


@pytest.fixture(scope="module")
def starting(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nothing disturbs, and how long it took to its first step."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    forked.ready()
    return out, undisturbed(options, out)


def test_two_kills(options: list[str], starting: tuple[Path, float], tmp_path: Path) -> None:
    fallen = killed(options, tmp_path, [(0, starting[1] * 0.3), (9, 0.01)])
    assert len(fallen) == 2
    assert ending(tmp_path, STEPS) == ending(starting[0], STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills(options: list[str], starting: tuple[Path, float], tmp_path: Path, seed: int) -> None:
    killed(options, tmp_path, moments(10, STEPS, starting[1], seed))
    assert ending(tmp_path, STEPS) == ending(starting[0], STEPS)


def wait_for(out: Path, lines: int) -> None:
    while done(out) < lines:
        time.sleep(0.005)


def test_signals_are_answered_with_a_save(
    options: list[str], starting: tuple[Path, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "heddle", "train", *options[:-1], "--out", str(tmp_path)]
    for number, at in ((signal.SIGINT, 2), (signal.SIGTERM, 14)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(tmp_path, at)
        os.kill(process.pid, signal.SIGSTOP)
        assert run_command(command[3:]) == 2  # a second trainer
        assert f"process {process.pid}" in capsys.readouterr().err
        os.kill(process.pid, number)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate()
        assert process.returncode == 128 + number
        assert out == ""
        said = re.fullmatch(r"heddle: saved at step (\d+); the same command continues", err.splitlines()[-1])
        assert said is not None
        assert steps_saved(tmp_path)[-1] == int(said[1]) >= at
        assert "Traceback" not in err
    finish(start(options, tmp_path))
    assert ending(tmp_path, STEPS) == ending(starting[0], STEPS)
