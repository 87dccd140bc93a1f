"""`heddle runs --prune`: delete old checkpoints of runs, after asking."""

import sys
from collections.abc import Sequence
from pathlib import Path

from heddle.errors import ConfigError
from heddle.progress import format_amount, print_status, print_text, print_warning, printable


def prune_runs(runs: Sequence[Path], keep: int, is_confirmed: bool) -> None:
    """Delete all but the `keep` newest intact checkpoints of each run that no process holds.

    Raises ConfigError where nobody can be asked.
    """
    from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps, prune_checkpoints
    from heddle.storage.lock import InUseError, RunLock, is_locked

    if keep < 1:
        raise ConfigError(f"--prune {keep}: the newest checkpoint of a run stays; give at least 1")
    old = {run: [checkpoint_folder(run, step) for step in checkpoint_steps(run)[:-keep]] for run in runs}
    for run in runs:
        if old[run] and is_locked(run):
            print_status(f"{run}: is training; its checkpoints stay")
            del old[run]
    count, size = sum(map(len, old.values())), sum(_bytes(path) for paths in old.values() for path in paths)
    if not count:
        print_status(f"runs: none has more than {keep} checkpoint{'s' if keep > 1 else ''} that could be deleted")
        return
    question = f"delete up to {count} checkpoints of {len([run for run in old if old[run]])} runs, "
    if not is_confirmed and not _is_agreed(f"{question}{format_amount(size, 'bytes')}?"):
        print_status("runs: nothing was deleted")
        return
    for run in filter(old.get, old):
        try:
            with RunLock(run):
                for path in prune_checkpoints(run, keep):
                    print_text(str(path))
        except InUseError as error:  # it began meanwhile
            print_warning(str(error))


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--prune: asks before it deletes, and nobody can answer here; give --yes")
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
