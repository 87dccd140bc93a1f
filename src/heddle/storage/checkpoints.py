"""The checkpoints of a run, RUN/checkpoints/step-00000100: write one, find the newest intact one, prune old ones."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from heddle.distributed.ranks import ONE_PROCESS, Ranks, call_on_all
from heddle.errors import CheckpointError, HeddleError
from heddle.storage import file_io
from heddle.storage.folder import unlisted_files, verify_folder, write_folder
from heddle.storage.manifest import LogPosition, parse_json_object
from heddle.storage.rank_folder import write_rank_folder
from heddle.storage.run_log import CHECKPOINTS_FOLDER, run_hash

PROGRESS_FILE = "training.json"  # counts of the training: its step, and the run's hash
STEP_PATTERN = re.compile(r"step-(\d{8,18})")
QUARANTINE_PATTERN = re.compile(STEP_PATTERN.pattern + r"\.damaged-\d+")  # a renamed damaged checkpoint


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest intact checkpoint, or None; `damaged` has one sentence for each newer damaged one, newest first."""

    path: Path | None
    step: int | None
    damaged: list[str] = field(default_factory=list)


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    if not 0 <= step < 10**18:
        raise CheckpointError(f"{run}: a checkpoint's step must be at least 0 and below 10^18, not {step}")
    return Path(run) / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def write_checkpoint(
    run: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, str],
    kind: str = "training",
    log: LogPosition | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Path:
    """Write one step's checkpoint with write_folder, or with write_rank_folder on ranks, and return its folder.

    Leftovers of dead processes among the checkpoints are removed first. A damaged folder of the same step is renamed to
    step-….damaged-N: a run that fell back to an earlier checkpoint can continue, and nothing is lost. The caller (on
    rank 0) holds the run's lock.
    """
    path = checkpoint_folder(run, step)
    call_on_all(ranks, lambda: _make_room(path) if ranks.rank == 0 else "")
    if ranks.count == 1:
        write_folder(path, tensors=tensors, documents=documents, kind=kind, log=log, lock=False)
    else:
        write_rank_folder(path, tensors=tensors, documents=documents, kind=kind, ranks=ranks, log=log, lock=False)
    return path


def _make_room(path: Path) -> str:
    """Remove leftovers of dead processes beside a new checkpoint, and rename a damaged one of the same step."""
    try:
        file_io.make_folder(path.parent)
        file_io.remove_leftovers(path.parent)
        if os.path.lexists(path) and find_damage(path) is not None:
            number = 1
            while os.path.lexists(quarantine := path.with_name(f"{path.name}.damaged-{number}")):
                number += 1
            file_io.system.rename(path, quarantine)
    except OSError as error:
        raise file_io.folder_error(path, error) from error
    return ""


def find_damage(path: Path, ranks: Ranks = ONE_PROCESS) -> str | None:
    """Return what is wrong with a checkpoint, as one sentence; None if it is intact.

    ranks: collective; each verifies a share of the files.
    """
    try:
        call_on_all(ranks, lambda: verify_folder(path, ranks=ranks).kind)
    except HeddleError as error:
        return str(error)
    return None


def checkpoint_steps(run: Path, ranks: Ranks = ONE_PROCESS) -> list[int]:
    """Return the steps that have a folder, intact or not, ascending. An 'old' folder of an interrupted save counts.

    ranks: collective; all return what rank 0 sees.
    """
    texts = call_on_all(ranks, lambda: json.dumps(_steps_in(run) if ranks.rank == 0 else []))
    return [int(step) for step in json.loads(texts[0])]


def _steps_in(run: Path) -> list[int]:
    parent = Path(run) / CHECKPOINTS_FOLDER
    try:
        if not parent.is_dir():
            return []
        names = {
            *file_io.system.listdir(parent),
            *(name for _, name, role, _ in file_io.leftovers(parent) if role == "old"),
        }
    except OSError as error:
        raise file_io.read_error(parent, error) from error
    matching_steps = {int(match[1]) for name in names if (match := STEP_PATTERN.fullmatch(name))}
    return sorted(step for step in matching_steps if checkpoint_folder(run, step).name in names)


def latest_checkpoint(run: Path, kind: str | None = None, ranks: Ranks = ONE_PROCESS) -> LatestCheckpoint:
    """Return the newest checkpoint of a run that is its own and in which every byte verifies; None if there is none.

    Newer ones that do not verify, or lie in the wrong place, are skipped and described in `damaged`. The caller must
    report them. ranks: collective; each verifies a share of the files.
    """

    def read(path: Path) -> None:
        check_place(path, verify_folder(path, kind, ranks).documents.get(PROGRESS_FILE))

    return find_latest(run, read, ranks)


def check_place(path: Path, progress: str | None) -> None:
    """Raise CheckpointError for a checkpoint under another step's name, or in the folder of another run.

    progress: the text of its PROGRESS_FILE; None: unknown. Earlier versions did not write the run's hash into it.
    """
    path = path.absolute()
    if progress is None or (match := STEP_PATTERN.fullmatch(path.name)) is None:
        return
    run = None
    with suppress(HeddleError):  # a damaged run.json is named by what reads it
        run = run_hash(path.parent.parent) if path.parent.name == CHECKPOINTS_FOLDER else None
    try:
        fields = parse_json_object(progress.encode())
    except ValueError as error:
        raise CheckpointError(f"{path / PROGRESS_FILE}: is not valid ({error}); restore it") from error
    step = int(match[1])
    if (own := fields.get("step", step)) != step:
        raise CheckpointError(f"{path}: is the checkpoint of step {own!s:.20}, not of step {step}; restore its name")
    if run is not None and fields.get("run", run) != run:
        raise CheckpointError(f"{path}: is a checkpoint of another run; restore this run's own")


def find_latest(run: Path, read: Callable[[Path], object], ranks: Ranks = ONE_PROCESS) -> LatestCheckpoint:
    """Return the newest checkpoint that `read` can read on all ranks; a HeddleError means that it is damaged."""
    damaged: list[str] = []
    for step in reversed(checkpoint_steps(run, ranks)):
        path = checkpoint_folder(run, step)
        try:
            call_on_all(ranks, lambda path=path: str(read(path))[:0])  # type: ignore[misc]
        except HeddleError as error:
            damaged.append(str(error))
        else:
            return LatestCheckpoint(path, step, damaged)
    return LatestCheckpoint(None, None, damaged)


def prune_checkpoints(run: Path, keep: int, ranks: Ranks = ONE_PROCESS) -> list[Path]:
    """Delete all but the `keep` newest intact checkpoints, and return the deleted folders.

    Damaged checkpoints are neither counted nor deleted, so the newest intact one always stays. Folders with files
    that heddle did not write are not deleted either. ranks: collective; all verify, and rank 0 deletes.
    """
    if keep < 1:
        raise CheckpointError(f"{run}: keep must be at least 1, not {keep}")
    paths = [checkpoint_folder(run, step) for step in reversed(checkpoint_steps(run, ranks))]
    superfluous = [path for path in paths if find_damage(path, ranks=ranks) is None][keep:]
    texts = call_on_all(ranks, lambda: json.dumps(_delete(superfluous) if ranks.rank == 0 else []))
    return [Path(path) for path in json.loads(texts[0])]


def _delete(paths: list[Path]) -> list[str]:
    """Delete checkpoints that hold only their own files; return the deleted ones."""
    deleted = []
    for path in paths:
        if not path.is_dir() or unlisted_files(path):
            continue
        try:  # rename first: an interrupted deletion must not look like a damaged checkpoint
            discarded = file_io.leftover_path(path, "tmp")
            file_io.system.rename(path, discarded)
        except OSError as error:
            raise file_io.folder_error(path, error) from error
        file_io.remove_folder(discarded)
        deleted.append(str(path))
    return deleted
