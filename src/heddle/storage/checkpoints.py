"""The checkpoints of a run, RUN/checkpoints/step-00000100: which is the latest good one, and which may go."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from heddle.errors import CheckpointError, HeddleError
from heddle.storage import atomic as disk
from heddle.storage.folder import foreign_files, verify_folder, write_folder

FOLDER = "checkpoints"
STEP = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True)
class Latest:
    """The newest checkpoint that is whole, and one sentence for each newer one that is not, newest first."""

    path: Path | None
    step: int | None
    damaged: list[str] = field(default_factory=list)


def step_folder(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"{run}: a checkpoint's step must be a whole number from 0, not {step}")
    return Path(run) / FOLDER / f"step-{step:08d}"


def write_step(
    run: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, str],
    kind: str = "training",
) -> Path:
    """Write one step's checkpoint as write_folder does, and return its folder.

    What dead processes left among the checkpoints is cleared first. A damaged folder of the same step is kept
    under the name step-….damaged-N, so that a run that fell back past it can go on and nothing is lost.
    """
    path = step_folder(run, step)
    try:
        disk.make_folder(path.parent)
        disk.sweep(path.parent)
        if os.path.lexists(path) and problem(path) is not None:
            number = 1
            while os.path.lexists(quarantine := path.with_name(f"{path.name}.damaged-{number}")):
                number += 1
            disk.system.rename(path, quarantine)
    except OSError as error:
        raise disk.unwritable(path, error) from error
    write_folder(path, tensors=tensors, documents=documents, kind=kind)
    return path


def problem(path: Path, kind: str | None = None) -> str | None:
    """What is wrong with a checkpoint, as one sentence, or None if every byte of it is as it was written."""
    try:
        verify_folder(path, kind)
    except HeddleError as error:
        return str(error)
    return None


def steps(run: Path) -> list[int]:
    """The steps that have a folder, whole or not, ascending; one set aside by a save that died counts."""
    parent = Path(run) / FOLDER
    try:
        if not parent.is_dir():
            return []
        names = {
            *disk.system.listdir(parent),
            *(name for _, name, role, _ in disk.leftovers(parent) if role == "old"),
        }
    except OSError as error:
        raise disk.unreadable(parent, error) from error
    found = {int(match[1]) for name in names if (match := STEP.fullmatch(name))}
    return sorted(step for step in found if step_folder(run, step).name in names)


def latest(run: Path, kind: str | None = None) -> Latest:
    """The newest checkpoint of a run that verifies in every byte; `path` is None where there is none.

    Newer ones that do not verify are passed over and described in `damaged`: the caller must say so aloud.
    """
    damaged: list[str] = []
    for step in reversed(steps(run)):
        path = step_folder(run, step)
        wrong = problem(path, kind)
        if wrong is None:
            return Latest(path, step, damaged)
        damaged.append(wrong)
    return Latest(None, None, damaged)


def prune(run: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest checkpoints that verify, and return what was deleted.

    Damaged ones are neither counted nor deleted, so the last whole one always stays; nor is a folder deleted
    that holds files heddle did not write.
    """
    if keep < 1:
        raise CheckpointError(f"{run}: at least 1 checkpoint must be kept, not {keep}")
    whole = [path for step in reversed(steps(run)) if problem(path := step_folder(run, step)) is None]
    deleted = []
    for path in whole[keep:]:
        if not path.is_dir() or foreign_files(path):
            continue
        try:  # renamed first: a deletion cut short must not look like a damaged checkpoint
            doomed = disk.leftover_name(path, "tmp")
            disk.system.rename(path, doomed)
        except OSError as error:
            raise disk.unwritable(path, error) from error
        disk.remove_folder(doomed)
        deleted.append(path)
    return deleted
