"""Verify every file below a folder that heddle wrote: intact, damaged, or without a hash.

Folders of models, checkpoints, runs, comparisons, ladders, conversions and the cache. Nothing is written.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from heddle.data.token_file import TokenFile
from heddle.errors import CheckpointError, HeddleError, describe_path
from heddle.exchange.gguf.file import check_seal
from heddle.storage.checkpoints import PROGRESS_FILE, QUARANTINE_PATTERN, STEP_PATTERN, check_place
from heddle.storage.file_io import HASH_KEY, LEFTOVER_PATTERN, MAX_JSON_BYTES, is_gguf, list_names, read_json_file
from heddle.storage.folder import verify_file
from heddle.storage.lock import LOCK_FILE
from heddle.storage.manifest import MANIFEST_FILE, LogPosition, read_manifest
from heddle.storage.run_log import CHECKPOINTS_FOLDER, LOG_FILE, RUN_FILE, verify_log

OK, DAMAGED, NOT_COVERED = "ok", "damaged", "not covered"
COMPILED_FOLDER = "compiled"  # torch's own cache of kernels
REPORT_FILES = ("report.json", "report.html", "judge.html")  # made from the results, which are covered
JSON_FILES = (RUN_FILE, "plan.json", "data.json", "ladder.json")  # always with a hash
HASH_LENGTH = 64
LEDGER_FILE = "ledger.yaml"  # of a judge, whose log begins with the settings
JSON_SUFFIXES = (".json", ".density")
NO_HASH = "heddle wrote no hash of it"


class FileResult(NamedTuple):
    """path: below the verified folder. status: OK, DAMAGED or NOT_COVERED. reason: why it is not OK."""

    path: str
    status: str
    reason: str | None = None


def verify_files(folder: Path) -> Iterator[FileResult]:
    """Yield the result of each file below a folder, or of one file, as soon as it has been read.

    A folder of compiled kernels is one result; locks are left out. A file of a folder with a manifest or a log is
    verified by these. Raises CheckpointError if the path does not exist.
    """
    root = folder.absolute().parent if folder.is_file() else folder
    if not root.is_dir():
        raise CheckpointError(f"{folder}: {describe_path(folder)}, not a folder or file; name one that heddle wrote")
    only = folder.name if folder.is_file() else None
    for path, status, reason in _verify(root, only):
        result = FileResult(path.relative_to(root).as_posix(), status, reason)
        if only in (None, result.path):
            yield result


Outcome = tuple[Path, str, str | None]  # as `FileResult`


def _verify(folder: Path, only: str | None = None) -> Iterator[Outcome]:
    """only: the name of the one file that is read."""
    names = list_names(folder)
    if MANIFEST_FILE in names:
        yield from _verify_manifest_folder(folder, names, only)
        return
    log_position: LogPosition | None = None
    is_run = CHECKPOINTS_FOLDER in names or LOG_FILE in names
    if is_run:
        log_position = _newest_log_position(folder / CHECKPOINTS_FOLDER)
    expected = {RUN_FILE} if is_run and LEDGER_FILE not in names else set()
    if log_position is not None and log_position.lines:
        expected.add(LOG_FILE)
    for name in sorted(expected.union(names)):
        path = folder / name
        if name.endswith(LOCK_FILE) or only not in (None, name):
            continue
        if (reason := _uncovered_reason(path)) is not None:
            yield path, NOT_COVERED, reason
        elif path.is_dir():
            yield from _verify(path)
        elif name == LOG_FILE:
            yield _result(path, lambda: verify_log(folder, log_position))
        else:
            yield _verify_plain_file(path)


def _verify_manifest_folder(folder: Path, names: list[str], only: str | None = None) -> Iterator[Outcome]:
    """Verify the files that a manifest lists. Without an intact manifest, no other file can be verified."""
    try:
        records = read_manifest(folder).files
    except HeddleError as error:
        yield folder / MANIFEST_FILE, DAMAGED, str(error)
        for name in names:
            if name != MANIFEST_FILE:
                yield folder / name, NOT_COVERED, f"its {MANIFEST_FILE} is damaged"
        return
    yield folder / MANIFEST_FILE, OK, None
    for name in sorted({*records, *names} - {MANIFEST_FILE}):
        path = folder / name
        if only not in (None, name):
            continue
        if name in records:
            outcome = _result(path, lambda: verify_file(path, records[name]))  # noqa: B023 - called at once
            if name == PROGRESS_FILE and outcome[1] == OK:
                outcome = _result(path, lambda: check_place(folder, path.read_text("utf-8", "replace")))  # noqa: B023
            yield outcome
        elif not name.endswith(LOCK_FILE):
            yield path, NOT_COVERED, _uncovered_reason(path) or NO_HASH


def _newest_log_position(checkpoints: Path) -> LogPosition | None:
    """Return the log position at the latest checkpoint with an intact manifest."""
    names = list_names(checkpoints) if checkpoints.is_dir() else []
    for name in sorted((name for name in names if STEP_PATTERN.fullmatch(name)), reverse=True):
        try:
            return read_manifest(checkpoints / name).log
        except HeddleError:
            continue
    return None


def _uncovered_reason(path: Path) -> str | None:
    """Return why heddle has no hash of a file or folder; None if it may have one."""
    if path.is_symlink():
        return "it is a symbolic link, which is not followed"
    leftover = LEFTOVER_PATTERN.fullmatch(path.name)
    if leftover is not None and leftover["role"] == "tmp":
        return f"process {leftover['process']} did not finish it; the next save here removes it"
    if QUARANTINE_PATTERN.fullmatch(path.name):
        return "a run found it damaged and moved it aside; remove it"
    if path.name in REPORT_FILES:
        return "it is derived from the results; rerun the command to write it again"
    if path.name == COMPILED_FOLDER and path.is_dir():
        return "torch's own cache; torch rebuilds it"
    return None


def _verify_plain_file(path: Path) -> Outcome:
    """Verify a file without a manifest: JSON with its own SHA-256, or a token file."""
    if path.suffix in JSON_SUFFIXES:
        if path.name not in JSON_FILES and _is_foreign_json(path):
            return path, NOT_COVERED, NO_HASH
        return _result(path, lambda: read_json_file(path))
    if is_gguf(path):
        try:
            covered = check_seal(path)
        except HeddleError as error:
            return path, DAMAGED, str(error)
        return (path, OK, None) if covered else (path, NOT_COVERED, NO_HASH)
    if path.suffix == ".bin" and len(path.stem) == 32:
        return _result(path, lambda: TokenFile(path))
    return path, NOT_COVERED, NO_HASH


def _is_foreign_json(path: Path) -> bool:
    """Whether a file is valid JSON without a SHA-256, so that heddle does not read it again.

    A SHA-256 field that is damaged is recognized by its name or its length.
    """
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_JSON_BYTES else []
    except (OSError, ValueError, RecursionError):
        return False
    fields = content.items() if isinstance(content, dict) else ()
    return not any(name == HASH_KEY or (isinstance(value, str) and len(value) == HASH_LENGTH) for name, value in fields)


def _result(path: Path, verify: Callable[[], object]) -> Outcome:
    try:
        verify()
    except HeddleError as error:
        return path, DAMAGED, str(error)
    return path, OK, None
