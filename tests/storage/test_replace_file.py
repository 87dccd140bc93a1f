"""A file that is replaced: old or new is read, whole, wherever the process dies, fails or loses what was not synced."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heddle.errors import CheckpointError, MachineError
from heddle.storage import file_io
from heddle.storage.file_io import replace_file, write_file
from tests.storage.shared import Save, System, calls, crashes, standing_in

OLD, NEW = b"old" * 100, b"new content" * 100
NO_PROCESS = 4194305  # above the largest process id of Linux


def save(path: Path) -> None:
    write_file(path, NEW)


def reset(path: Path) -> None:
    """Put the old file there, alone in its folder."""
    path.parent.mkdir(exist_ok=True)
    for other in path.parent.iterdir():
        other.unlink()
    path.write_bytes(OLD)


def crash_faults(path: Path, save: Save) -> Iterator[str]:
    """Every crash point after which the file is neither old nor new."""
    for crash in crashes(path, save, lambda: reset(path), path.parent.parent):
        # An undone rename gives the old file back; the stand-in only takes the new one away.
        content = path.read_bytes() if path.exists() else OLD
        if content not in (OLD, NEW):
            yield crash


def test_dying_at_any_call_leaves_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "run" / "file"
    reset(path)
    assert {"write", "fsync", "rename"} <= set(calls(path, save))
    assert list(crash_faults(path, save)) == []


def in_place(path: Path) -> None:
    """Planted: the file is written under its own name at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io, "leftover_path", lambda path, role: path)
        patch.setattr(file_io, "CREATE_FLAGS", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        save(path)


def unsynced(path: Path) -> None:
    """Planted: the bytes are not synced before the rename."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_io.NewFile, "__exit__", lambda self, *error: os.close(self.descriptor))
        patch.setattr(file_io, "_sync_file", lambda path: None)
        save(path)


@pytest.mark.parametrize("planted", [in_place, unsynced])
def test_careless_writers_are_caught(planted: Callable[[Path], None], tmp_path: Path) -> None:
    assert next(crash_faults(tmp_path / "run" / "file", planted), None) is not None


def test_a_writer_that_does_not_sync_is_synced(tmp_path: Path) -> None:
    def save_without_sync(path: Path) -> None:
        with replace_file(path) as temporary:
            descriptor = file_io.system.open(temporary, file_io.CREATE_FLAGS, 0o666)
            try:
                file_io.system.write(descriptor, NEW)
            finally:
                os.close(descriptor)

    assert list(crash_faults(tmp_path / "run" / "file", save_without_sync)) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failing_call_is_one_sentence_and_leaves_the_old_file(code: int, tmp_path: Path) -> None:
    path = tmp_path / "run" / "file"
    messages = []
    reset(path)
    for at in range(1, len(calls(path, save)) + 1):
        reset(path)
        with standing_in(System(at, OSError(code, os.strerror(code)))):
            try:
                save(path)
            except MachineError as error:
                messages.append(str(error))
                assert path.read_bytes() in (OLD, NEW), at
            else:
                assert path.read_bytes() == NEW, at
        assert os.listdir(path.parent) == ["file"]
    assert len(messages) > 4
    assert all(os.strerror(code) in message and "\n" not in message for message in messages)


def test_an_error_in_the_block_leaves_the_old_file_and_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "run" / "file"
    reset(path)

    def fail(path: Path) -> None:
        with replace_file(path) as temporary:
            temporary.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail(path)
    assert path.read_bytes() == OLD
    assert os.listdir(path.parent) == ["file"]


def test_the_remedy_ends_the_message(tmp_path: Path) -> None:
    read_only = OSError(errno.EROFS, "Read-only file system")
    message = r"^.*/new:.*Read-only file system"
    with standing_in(System(2, read_only)), pytest.raises(MachineError, match=message):
        write_file(tmp_path / "new", "text", "choose another name")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file:.*folder"):
        write_file(tmp_path / "file" / "below", "text")


def test_only_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    modes = {path: path.lstat().st_mode for path in (*tmp_path.iterdir(), Path(os.devnull))}
    for path, words in {
        tmp_path / "pipe": "is a named pipe",
        tmp_path / "link": "is a named pipe",
        tmp_path / "circle": "is a symbolic link that leads back to itself",
        tmp_path / "folder": "is a folder",
        Path(os.devnull): "is a device",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{path}: {words}"):
            write_file(path, "text")
    assert {path: path.lstat().st_mode for path in modes} == modes
    assert len(os.listdir(tmp_path)) == 4


def test_missing_folders_are_made_and_text_is_utf8(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b" / "file", "βῆτα\r\n")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == "βῆτα\r\n".encode()


def test_old_leftovers_of_dead_processes_alone_are_removed(tmp_path: Path) -> None:
    leftovers = {
        "dead and old": (f".file.tmp-{NO_PROCESS}-00000000", 2 * 3600),
        "dead and recent": (f".file.tmp-{NO_PROCESS}-00000001", 60),  # of a process on another machine, perhaps
        "alive": (f".file.tmp-{os.getppid()}-00000002", 2 * 3600),
        "of this process": (f".file.tmp-{os.getpid()}-00000003", 2 * 3600),
        "of another file": (f".other.tmp-{NO_PROCESS}-00000004", 2 * 3600),
    }
    for name, age in leftovers.values():
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_file(tmp_path / "file", "whole")
    left = {name for name, _ in leftovers.values()} - {leftovers["dead and old"][0]}
    assert set(os.listdir(tmp_path)) == left | {"file"}


def test_leftovers_of_a_dead_process_of_this_machine_are_removed_at_once(tmp_path: Path) -> None:
    """Its start tells it from a later process with its number."""
    own = file_io.leftover_path(tmp_path / "own", "tmp")
    start = file_io._start_time(os.getpid())
    assert f"-t{start}-" in own.name
    reused = own.with_name(own.name.replace(f"-t{start}-", f"-t{(start or 0) - 1}-"))
    dead = own.with_name(own.name.replace(f"-{os.getpid()}-", f"-{NO_PROCESS}-"))
    for path in (own, reused, dead):
        path.write_text("half")
    file_io.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [own.name]


def test_leftovers_of_another_container_stay_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have numbers of their own, under the same name of the host."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: NO_PROCESS)
        patch.setattr(os, "readlink", lambda path: "pid:[1]")
        young = file_io.leftover_path(tmp_path / "young", "tmp")
    young.write_text("half")
    file_io.remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [young.name]


def test_leftovers_of_another_machine_stay_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process cannot be asked: a number that is free here may be a writer there."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: NO_PROCESS)
        dead_here = file_io.leftover_path(tmp_path / "here", "tmp")
        patch.setattr("socket.gethostname", lambda: "another")
        young, old = (file_io.leftover_path(tmp_path / name, "tmp") for name in ("young", "old"))
    for folder in (dead_here, young, old):
        folder.mkdir()
        (folder / "file").write_text("text")
    for path in (old / "file", old, young):  # the file in `young` was just written
        os.utime(path, (0, 0))
    file_io.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [young.name]
