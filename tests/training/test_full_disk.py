"""A disk that fills up after a checkpoint: one sentence, the checkpoint is whole, the same command goes on later."""

import re
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.lab.verify import OK, verify_files
from heddle.storage import file_io
from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps
from heddle.storage.folder import tensors_sha256
from tests import small
from tests.storage.shared import FullDisk, standing_in

STEPS = 6
CAUSE = r"\S+: cannot be written \(No space left on device\); free (?:some )?space [a-z ]+\n"
# The thread of an asynchronous save and the log may both meet the full disk: the save is then named in a warning.
SENTENCES = {False: f"heddle: {CAUSE}", True: f"(?:warning: {CAUSE})?heddle: {CAUSE}"}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("source")
    design, text = small.design_file(root / "design.yaml"), small.folder(root / "text")
    size = ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu", "--threads", "1"]
    return ["train", str(design), "--data", str(text), *size, "--steps", str(STEPS), "--save-every", "2", "--quiet"]


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_command([*command, "--out", str(run)]) == 0
    return run


def faults_of_full_disk(
    command: list[str], whole: Path, run: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What is wrong after a training on a disk with room for `share` checkpoints (at least 1), and after it goes on."""
    one = sum(path.stat().st_size for path in checkpoint_folder(whole, STEPS).iterdir())
    others = sum(path.stat().st_size for path in (whole / "run.json", whole / "log.jsonl"))
    capsys.readouterr()
    with standing_in(FullDisk(int(share * one) + others)):
        code = run_command([*command, "--out", str(run)])
    wrong = [] if code == 1 else [f"exit code {code}"]
    said = capsys.readouterr().err
    if re.fullmatch(SENTENCES["--async-save" in command], said) is None:
        wrong.append(f"no one sentence: {said}")
    if len(checkpoint_steps(run)) != min(int(share), 2):
        wrong.append(f"checkpoints of the steps {checkpoint_steps(run)}")
    wrong += [f"{result.path} is {result.status}" for result in verify_files(run) if result.status != OK]
    if run_command([*command, "--out", str(run)]) != 0:
        return [*wrong, "does not go on"]
    ends = [tensors_sha256(checkpoint_folder(folder, STEPS)) for folder in (run, whole)]
    return wrong if ends[0] == ends[1] else [*wrong, "another ending"]


@pytest.mark.parametrize("options", [[], ["--async-save"]])
@pytest.mark.parametrize("share", [1.001, 1.5, 1.99, 2.4])
def test_a_disk_that_fills_up_loses_nothing(
    command: list[str],
    whole: Path,
    tmp_path: Path,
    share: float,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert faults_of_full_disk([*command, *options], whole, tmp_path / "run", share, capsys) == []


def test_a_save_under_its_own_name_is_caught(
    command: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted: files are written under their own names, so that a cut save stays."""
    monkeypatch.setattr(file_io, "leftover_path", lambda path, role: path)
    assert faults_of_full_disk(command, whole, tmp_path / "run", 1.5, capsys) != []
