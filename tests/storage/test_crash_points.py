"""A save that dies, fails or loses unsynced data at any call: a load reads the complete old or new content."""

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.errors import CheckpointError, MachineError
from heddle.storage import file_io
from heddle.storage.folder import write_folder
from heddle.storage.manifest import MANIFEST_FILE, LogPosition
from tests.storage.shared import Save, State, System, calls, content, crashes, die, standing_in, state, written

SHARD_BYTES = 100


def save(path: Path) -> None:
    write_folder(path, **content(2))


def save_shards(path: Path) -> None:
    """The same content: three shards, their index, and a log in the manifest."""
    write_folder(path, **content(2), max_shard_bytes=SHARD_BYTES, log=LogPosition(3, "0123456789abcdef"))


class TrialFolder:
    """A folder `run/last` in three versions: absent, old content and new content, restored before each trial."""

    def __init__(self, root: Path):
        with standing_in(System()):
            self.old_copy = root / "copies" / "old"
            self.old = written(self.old_copy, 1)
            self.new = written(root / "copies" / "new", 2)
        self.run = root / "run"
        self.path = self.run / "last"

    def reset(self, replacing: bool) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir()
        if replacing:
            shutil.copytree(self.old_copy, self.path)

    def allowed(self, replacing: bool) -> tuple[State | None, State]:
        return (self.old if replacing else None, self.new)


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path)


def fault_after_crash(trial: TrialFolder, replacing: bool) -> str | None:
    """The fault that a load or the next save has after a crash; None if both work."""
    try:
        current = state(trial.path)
    except CheckpointError as error:
        return str(error)
    if current not in trial.allowed(replacing):
        return f"{current} is neither old nor new"
    with standing_in(System()):
        save(trial.path)
    if state(trial.path) != trial.new or os.listdir(trial.run) != ["last"]:
        return f"the next save left {os.listdir(trial.run)}"
    return None


def crash_faults(trial: TrialFolder, save: Save, replacing: bool) -> Iterator[str]:
    """A message for every crash point with a fault: the call, when it died, and what was lost."""
    for crash in crashes(trial.path, save, lambda: trial.reset(replacing), trial.run):
        fault = fault_after_crash(trial, replacing)
        if fault is not None:
            yield f"{crash}: {fault}"


@pytest.mark.parametrize(
    ("save", "replacing"),
    [
        (save, True),
        pytest.param(save, False, marks=pytest.mark.nightly),
        pytest.param(save_shards, False, marks=pytest.mark.nightly),
        pytest.param(save_shards, True, marks=pytest.mark.nightly),
    ],
)
def test_dying_at_any_call_leaves_old_or_new(trial: TrialFolder, save: Save, replacing: bool) -> None:
    assert list(crash_faults(trial, save, replacing)) == []


def test_dying_again_while_recovering_leaves_old_or_new(trial: TrialFolder) -> None:
    trial.reset(True)
    trace = calls(trial.path, save)
    renames = [at for at, name in enumerate(trace, start=1) if name == "rename"]
    for first in (*renames, len(trace) - 2):
        trial.reset(True)
        die(trial.path, save, first, "after")
        with standing_in(System()) as system:
            save(trial.path)
        for second in range(1, len(system.trace) + 1):
            trial.reset(True)
            die(trial.path, save, first, "after")
            die(trial.path, save, second, "after")
            assert fault_after_crash(trial, True) is None, (first, second)


def in_place(path: Path) -> None:
    """Planted: the files are written directly into the target folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io, "replace_folder", lambda staged, folder: None)
        patch.setattr(file_io, "leftover_path", lambda path, role: path)
        patch.setattr(file_io, "CREATE_FLAGS", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        patch.setattr(System, "mkdir", lambda self, path: path.mkdir(exist_ok=True), raising=False)
        save(path)


def unsynced_files(path: Path) -> None:
    """Planted: bytes are not synced before the rename."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io.NewFile, "__exit__", lambda self, *error: os.close(self.descriptor))
        save(path)


def unsynced_files_of_the_folder(path: Path) -> None:
    """Planted: the names of the files are not synced before the rename, only that of the folder after it."""
    sync = file_io.sync_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io, "sync_folder", lambda folder: None if ".tmp-" in folder.name else sync(folder))
        save(path)


def unsynced_names(path: Path) -> None:
    """Planted: names are never synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io, "sync_folder", lambda folder: None)
        save(path)


def old_removed_first(path: Path) -> None:
    """Planted: the old folder is deleted before the rename."""
    install = file_io.replace_folder

    def remove_and_install(staged: Path, folder: Path) -> None:
        file_io.remove_folder(folder)
        install(staged, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io, "replace_folder", remove_and_install)
        save(path)


@pytest.mark.parametrize(
    "planted", [in_place, unsynced_files, unsynced_files_of_the_folder, unsynced_names, old_removed_first]
)
def test_planted_writers_are_caught(trial: TrialFolder, planted: Save) -> None:
    assert next(crash_faults(trial, planted, True), None) is not None


def test_a_loader_that_ignores_the_displaced_folder_is_caught(
    trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "find_folder", lambda folder: folder)
    assert next(crash_faults(trial, save, True), None) is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_failing_call_raises_machine_error_and_loses_nothing(
    trial: TrialFolder, replacing: bool, persistent: bool, code: int
) -> None:
    messages = []
    trial.reset(replacing)
    for at, name in enumerate(calls(trial.path, save), start=1):
        trial.reset(replacing)
        allowed: tuple[State | None, ...] = (trial.new,)
        with standing_in(System(at, OSError(code, os.strerror(code)), persistent)):
            try:
                save(trial.path)
            except MachineError as error:
                messages.append(str(error))
                allowed = trial.allowed(replacing) if persistent else trial.allowed(replacing)[:1]
        assert state(trial.path) in allowed, (at, name)
        if not persistent and name not in ("unlink", "rmdir", "listdir"):  # a failed removal leaves a file
            assert set(os.listdir(trial.run)) <= {"last"}, (at, name)
        assert fault_after_crash(trial, replacing) is None, (at, name)
    assert len(messages) > 15
    assert all(str(trial.run) in message and os.strerror(code) in message for message in messages)


def test_a_real_limit_on_file_size(trial: TrialFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    messages = []
    for limit in range(0, 3000, 150):
        trial.reset(True)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            save(trial.path)
        except MachineError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(trial.run) == ["last"]
        assert state(trial.path) in trial.allowed(True)
    assert 3 < len(messages) < 20
    assert all("free some space" in message for message in messages)


def test_an_interrupt_restores_the_old_folder(trial: TrialFolder) -> None:
    trial.reset(True)
    for at in range(1, len(calls(trial.path, save)) + 1):
        trial.reset(True)
        with standing_in(System(at, KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            save(trial.path)
        assert state(trial.path) in trial.allowed(True)
        assert fault_after_crash(trial, True) is None


def test_unknown_content_is_refused_and_stays(tmp_path: Path) -> None:
    own = tmp_path / "own"
    written(own, 1)
    (own / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save(own)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"other:.*did not write"):
        save(other)
    link = tmp_path / "link"
    link.symlink_to(own)
    with pytest.raises(CheckpointError, match="symbolic link"):
        save(link)
    with pytest.raises(CheckpointError, match="is a file"):
        save(other / "thesis.txt")
    with pytest.raises(CheckpointError, match="cannot be created as a folder"):
        save(other / "thesis.txt" / "model")
    with pytest.raises(CheckpointError, match="name a folder inside it"):
        save(Path("."))
    assert sorted(os.listdir(tmp_path)) == ["link", "other", "own"]
    assert sorted(os.listdir(own)) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "notes.txt",
        "training.safetensors",
    ]
    assert (other / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    assert state(tmp_path / "empty") is not None


def test_temporary_files_of_a_live_process_stay(tmp_path: Path) -> None:
    living = tmp_path / f".model.tmp-{os.getppid()}-00000000"
    living.mkdir()
    dead = tmp_path / ".model.tmp-4194305-00000000"  # above the largest process number of Linux
    dead.mkdir()
    another = tmp_path / ".other.tmp-4194305-00000000"
    another.mkdir()
    save(tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, another.name, "model"])


@pytest.mark.parametrize(("save", "files"), [(save, 4), (save_shards, 7)])
def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, files: int) -> None:
    order = []
    original = file_io.NewFile.__init__

    def noting(self: file_io.NewFile, path: Path) -> None:
        order.append(path.name)
        original(self, path)

    monkeypatch.setattr(file_io.NewFile, "__init__", noting)
    save(tmp_path / "model")
    assert order[-1] == MANIFEST_FILE
    assert len(order) == files
