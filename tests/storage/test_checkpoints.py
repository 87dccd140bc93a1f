"""A run's checkpoints: the latest whole one is found past damage, and is never deleted."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from heddle.errors import CheckpointError, MachineError
from heddle.storage import checkpoints as steps
from heddle.storage import file_io
from heddle.storage.checkpoints import checkpoint_folder, latest_checkpoint, prune_checkpoints, write_checkpoint
from tests.storage.shared import Died, System, content, standing_in, state


def write(run: Path, step: int) -> Path:
    return write_checkpoint(run, step, **content(step % 50))


def damage(path: Path, name: str = "model.safetensors") -> None:
    """Flip the last bit of a file."""
    raw = bytearray((path / name).read_bytes())
    raw[-1] ^= 1
    with open(path / name, "r+b") as file:
        file.write(raw)


def test_steps_are_named_and_found_by_number(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) == steps.LatestCheckpoint(None, None, [])
    for step in (0, 100, 20, 99_999_999, 123_456_789):
        assert write(tmp_path, step).name == f"step-{step:08d}"
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "step-000000009").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert steps.checkpoint_steps(tmp_path) == [0, 20, 100, 99_999_999, 123_456_789]
    assert latest_checkpoint(tmp_path).path == tmp_path / "checkpoints" / "step-123456789"
    assert latest_checkpoint(tmp_path).step == 123_456_789
    for step in (-1, 10**18):
        with pytest.raises(CheckpointError, match=f"not {step}"):
            write(tmp_path, step)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors", "training.safetensors"])
def test_damaged_ones_are_passed_over_aloud(tmp_path: Path, name: str) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 3)]
    damage(paths[2], name)
    shutil.rmtree(paths[1])
    paths[1].mkdir()
    latest = latest_checkpoint(tmp_path, "training")
    assert (latest.path, latest.step) == (paths[0], 1)
    assert len(latest.damaged) == 2
    assert latest.damaged[0].startswith(f"{paths[2] / name}: ")
    assert latest.damaged[1].startswith(f"{paths[1]}: has no manifest.json")
    damage(paths[0], name)
    assert latest_checkpoint(tmp_path).path is None
    assert len(latest_checkpoint(tmp_path).damaged) == 3


def test_another_kind_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write_checkpoint(tmp_path, 2, **(content(2) | {"kind": "model"}))
    assert latest_checkpoint(tmp_path, "training").step == 1
    assert "holds 'model'" in latest_checkpoint(tmp_path, "training").damaged[0]
    assert latest_checkpoint(tmp_path).step == 2


def test_a_disk_that_cannot_read_the_newest_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    broken = write(tmp_path, 2)
    original = os.open

    def failing(path: Path, *arguments: int) -> int:
        if Path(path).parent == broken:
            raise OSError(5, "Input/output error")
        return original(path, *arguments)

    monkeypatch.setattr(os, "open", failing)
    assert latest_checkpoint(tmp_path).step == 1
    assert "Input/output error" in latest_checkpoint(tmp_path).damaged[0]


def test_one_set_aside_by_a_save_that_died_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    before = state(path)
    with standing_in(System()) as counting:
        write(tmp_path, 2)
    with standing_in(System(counting.trace.index("rename") + 1, "after")), pytest.raises(Died):
        write(tmp_path, 2)
    assert not path.exists()
    assert latest_checkpoint(tmp_path).path == path
    assert state(path) == before
    write(tmp_path, 3)  # clears what any save left, not only one of its own step
    assert path.exists()
    assert sorted(os.listdir(path.parent)) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_damaged_step_that_is_reached_again_is_kept_aside(tmp_path: Path) -> None:
    path = write(tmp_path, 5)
    for number in (1, 2):
        damage(path, "manifest.json")
        assert latest_checkpoint(tmp_path).path is None
        write(tmp_path, 5)
        assert latest_checkpoint(tmp_path) == steps.LatestCheckpoint(path, 5, [])
        assert path.with_name(f"step-00000005.damaged-{number}").is_dir()


def test_pruning_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in range(6)]
    damage(paths[5])
    damage(paths[1])
    (paths[2] / "notes.txt").write_text("mine")
    assert prune_checkpoints(tmp_path, 2) == [paths[0]]
    assert steps.checkpoint_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert prune_checkpoints(tmp_path, 1) == [paths[3]]
    damage(paths[4])
    assert prune_checkpoints(tmp_path, 1) == []
    assert latest_checkpoint(tmp_path).path == paths[2]
    with pytest.raises(CheckpointError, match="at least 1"):
        prune_checkpoints(tmp_path, 0)


def test_a_deletion_cut_short_is_no_damage(tmp_path: Path) -> None:
    def reset() -> None:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        for step in (1, 2):
            write(tmp_path, step)

    reset()
    with standing_in(System()) as counting:
        prune_checkpoints(tmp_path, 1)
    start = counting.trace.index("rename") + 1
    assert len(counting.trace) > start + 3
    for at in range(start, len(counting.trace) + 1):
        reset()
        with standing_in(System(at, "after")), pytest.raises(Died):
            prune_checkpoints(tmp_path, 1)
        assert latest_checkpoint(tmp_path).damaged == []
        write(tmp_path, 3)
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000003"]


def test_a_disk_that_cannot_delete_is_the_machines_fault(tmp_path: Path) -> None:
    for run in (tmp_path / "tried", tmp_path / "failing"):
        for step in (1, 2):
            write(run, step)
    with standing_in(System()) as counting:
        prune_checkpoints(tmp_path / "tried", 1)
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    at = counting.trace.index("rename") + 1
    with standing_in(System(at, error)), pytest.raises(MachineError, match="Read-only"):
        prune_checkpoints(tmp_path / "failing", 1)
    assert steps.checkpoint_steps(tmp_path / "failing") == [1, 2]


def history(run: Path, seed: int) -> list[str]:
    """A random history of saves, damage, crashes and pruning; whatever broke a promise."""
    draw = random.Random(seed)
    broken: list[str] = []
    whole: set[int] = set()
    for step in range(1, 9):
        at = draw.choice([0, 0, draw.randrange(1, 40)])
        try:
            with standing_in(System(at, draw.choice(["before", "after", "half"]))):
                write(run, step)
        except Died:
            pass
        whole = {
            number
            for number in steps.checkpoint_steps(run)
            if steps.find_damage(checkpoint_folder(run, number)) is None
        }
        for number in sorted(whole):
            if draw.random() < 0.25:
                damage(checkpoint_folder(run, number), draw.choice(["manifest.json", "training.safetensors"]))
                whole.discard(number)
        present = set(steps.checkpoint_steps(run))
        keep = draw.choice([1, 2, 3])
        with standing_in(System()):
            steps.prune_checkpoints(run, keep)
        expected = (present - whole) | set(sorted(whole)[-keep:])
        if set(steps.checkpoint_steps(run)) != expected:
            broken.append(f"kept {steps.checkpoint_steps(run)} instead of {sorted(expected)}")
        if latest_checkpoint(run).step != max(whole, default=None):
            broken.append(f"the latest is {latest_checkpoint(run).step} instead of {max(whole, default=None)}")
    return broken


def test_random_histories_never_lose_the_last_whole_one(tmp_path: Path) -> None:
    for seed in range(25):
        assert history(tmp_path / str(seed), seed) == [], seed


def test_pruning_by_number_alone_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(run: Path, keep: int) -> list[Path]:
        doomed = [checkpoint_folder(run, step) for step in steps.checkpoint_steps(run)[:-keep]]
        for path in doomed:
            file_io.remove_folder(path)
        return doomed

    monkeypatch.setattr(steps, "prune_checkpoints", careless)
    assert any(history(tmp_path / str(seed), seed) for seed in range(5))
