"""Write a folder under a temporary name and rename it when all of it is on the disk; the manifest is written last."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from heddle.errors import CheckpointError, describe_path
from heddle.storage import atomic, file_io
from heddle.storage.lock import lock_output
from heddle.storage.manifest import MANIFEST_FILE, NAME_PATTERN, FileRecord, Manifest, is_file_name, read_manifest
from heddle.storage.shards import INDEX_SUFFIX, SHARD_PATTERN

MAX_DOCUMENT_BYTES = 256 * 2**20


@contextmanager
def staged_folder(folder: Path, lock: bool) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` after the block, whole; if the block raises, it is removed.

    lock: against other writers of this folder. Raises as `write_folder` does.
    """
    try:
        atomic.make_folder(folder.parent)
        with lock_output(folder) if lock else nullcontext():
            atomic.remove_leftovers(folder.parent, folder.name)
            _refuse_unlisted_content(folder)
            staged = atomic.leftover_path(folder, "tmp")
            try:
                file_io.system.mkdir(staged)
                yield staged
                atomic.sync_folder(staged)
                atomic.replace_folder(staged, folder)
            except BaseException:
                atomic.remove_folder(staged)
                raise
    except OSError as error:
        raise file_io.folder_error(folder, error) from error


def finish_folder(staged: Path, documents: Mapping[str, bytes], manifest: Manifest) -> None:
    """Write the documents, and then the manifest, which is to list the tensor files."""
    records = dict(manifest.files)
    for name in sorted(documents):
        with file_io.NewFile(staged / name) as file:
            file.write(documents[name])
        records[name] = FileRecord(file.size, file.digest.hexdigest())
    with file_io.NewFile(staged / MANIFEST_FILE) as file:
        file.write(replace(manifest, files=records).encode())


def check_documents(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], kind: str
) -> dict[str, bytes]:
    """Return the documents in UTF-8. Raises CheckpointError for names and texts that a folder cannot hold."""
    if folder.name in ("", ".."):
        raise CheckpointError(f"{folder}: cannot be replaced as a whole; name a folder inside it")
    if NAME_PATTERN.fullmatch(kind) is None:
        raise CheckpointError(f"{folder}: the kind {kind!r} needs 1 to 200 letters, digits, '_', '-' or '.'")
    encoded = {}
    for name in (*tensors, *documents):
        is_shard = SHARD_PATTERN.fullmatch(name) is not None or name.endswith(INDEX_SUFFIX)
        if not is_file_name(name) or (name in tensors) != name.endswith(".safetensors") or is_shard:
            raise CheckpointError(
                f"{folder}: {name!r} cannot be a file here; tensor files end in .safetensors, no others,"
                " and names of shards and their indexes are given by the writer"
            )
    for name, text in documents.items():
        try:
            encoded[name] = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{folder / name}: its text is not valid Unicode ({error.reason})") from error
        if len(encoded[name]) > MAX_DOCUMENT_BYTES:
            raise CheckpointError(f"{folder / name}: {len(encoded[name])} bytes are over {MAX_DOCUMENT_BYTES}")
    return encoded


def _refuse_unlisted_content(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but the files of its manifest, since replacing deletes them."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a symbolic link; name the folder it points to")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: {describe_path(folder)}, not a folder; choose another name")
    if not atomic.list_names(folder):
        return
    try:
        unlisted = unlisted_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: holds something that heddle did not write, wrote in another format or that is damaged,"
            " and is left as it is;"
            " choose another folder or move it away"
        ) from error
    if unlisted:
        raise CheckpointError(
            f"{folder}: also holds {unlisted[0]!r}, which heddle did not write, and is left as it is;"
            " move that file away or choose another folder"
        )


def unlisted_files(folder: Path) -> list[str]:
    """Return the names in a heddle folder that its manifest does not list, sorted."""
    return sorted(set(atomic.list_names(folder)) - set(read_manifest(folder).files) - {MANIFEST_FILE})
