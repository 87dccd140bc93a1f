"""A folder of tensor files and text documents: written whole or not at all, verified on every read, never code."""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError, describe_path
from heddle.storage import atomic, file_io
from heddle.storage.lock import lock_output
from heddle.storage.manifest import (
    MANIFEST_FILE,
    NAME_PATTERN,
    FileRecord,
    LogPosition,
    Manifest,
    TensorRecord,
    is_file_name,
    read_manifest,
)
from heddle.storage.shards import (
    INDEX_SUFFIX,
    MAX_SHARD_BYTES,
    SHARD_PATTERN,
    check_index,
    find_tensor_sets,
    index_name,
    index_text,
    split_into_shards,
)
from heddle.storage.tensor_file import (
    check_tensors,
    read_tensor,
    read_tensor_file,
    read_tensor_rows,
    write_tensor_file,
)

MAX_DOCUMENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class FolderContents:
    """A folder whose manifest and documents are verified. Tensors are verified when they are read.

    folder: where the files are. kind: what the writer called the content. documents: file name to text, without the
    indexes of shards. records: file name to its manifest entry. tensor_sets: name of each set of tensors, such as
    model.safetensors, to its files: that file, or its shards. log: where the run's log was, for a run's checkpoint.
    """

    folder: Path
    kind: str
    documents: dict[str, str]
    records: Mapping[str, FileRecord]
    tensor_sets: Mapping[str, tuple[str, ...]]
    log: LogPosition | None = None
    flags: int = field(default=file_io.READ_FLAGS, repr=False)

    def tensor_records(self, set_name: str) -> dict[str, tuple[str, TensorRecord]]:
        """Return (file, manifest entry) of each tensor of a set, by name."""
        if set_name not in self.tensor_sets:
            names = ", ".join(sorted(self.tensor_sets)) or "none"
            raise CheckpointError(f"{self.folder}: has no tensor file {set_name!r}; it has {names}")
        files = self.tensor_sets[set_name]
        return {name: (file, tensor) for file in files for name, tensor in (self.records[file].tensors or {}).items()}

    def tensors(self, set_name: str, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Read all tensors of a set, by name, into new memory. Raises CheckpointError if one was altered."""
        self.tensor_records(set_name)
        return {
            name: tensor.to(device)
            for file in self.tensor_sets[set_name]
            for name, tensor in read_tensor_file(self.folder / file, self.records[file], self.flags)
        }

    def tensor(self, set_name: str, name: str) -> Tensor:
        """Read one tensor of a set into new memory on the CPU. Raises CheckpointError if it was altered."""
        file = self._file_of(set_name, name)
        return read_tensor(self.folder / file, name, self.records[file], self.flags)

    def _file_of(self, set_name: str, tensor: str) -> str:
        files = self.tensor_records(set_name)
        if tensor not in files:
            raise CheckpointError(f"{self.folder}: {set_name} has no tensor {tensor!r}; name one that it has")
        return files[tensor][0]

    def read_rows(self, set_name: str, tensor: str, start: int, stop: int) -> Tensor:
        """Read rows (indices of the first dim) of one tensor into new memory on the CPU.

        Only the header and the blocks of rows that overlap are read and verified. Raises CheckpointError if one was
        altered, or if the tensor has no such rows.
        """
        file = self._file_of(set_name, tensor)
        return read_tensor_rows(self.folder / file, self.records[file], tensor, range(start, stop), self.flags)


def write_folder(
    folder: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, str],
    kind: str,
    log: LogPosition | None = None,
    max_shard_bytes: int | None = None,
    lock: bool = True,
) -> None:
    """Write a folder so that at every instant its name holds the whole old content or the whole new one.

    tensors: file name ending in .safetensors to {name: tensor}, of any strides and device; a storage that two names
    share is written twice. Sets larger than `max_shard_bytes` (None: MAX_SHARD_BYTES) become shards with an index.
    documents: file name to text. kind, log: stored for the reader. lock: False for a caller that has locked a folder
    around it. A folder that heddle wrote, or an empty one, is replaced. Raises CheckpointError for any other existing
    folder, which stays untouched, and for one that another process is writing; MachineError for a full or read-only
    disk.
    """
    folder = Path(folder)
    encoded = _check_documents(folder, tensors, documents, kind)
    files: dict[str, tuple[str, list[str]]] = {}  # each file's set, and the names of its tensors
    for set_name, named in tensors.items():
        sizes = check_tensors(folder / set_name, named)
        shards = split_into_shards(set_name, sizes, MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
        files |= {file: (set_name, names) for file, names in shards.items()}
        if len(shards) > 1:
            encoded[index_name(set_name)] = index_text(shards, sum(sizes.values())).encode("ascii")
    try:
        atomic.make_folder(folder.parent)
        with lock_output(folder) if lock else nullcontext():
            atomic.remove_leftovers(folder.parent, folder.name)
            _refuse_unlisted_content(folder)
            staged = atomic.leftover_path(folder, "tmp")
            try:
                file_io.system.mkdir(staged)
                records = {
                    file: write_tensor_file(staged / file, tensors[set_name], names)
                    for file, (set_name, names) in sorted(files.items())
                }
                _write_documents(staged, records, encoded)
                with file_io.NewFile(staged / MANIFEST_FILE) as file:
                    file.write(Manifest(kind, records, log).encode())
                atomic.sync_folder(staged)
                atomic.replace_folder(staged, folder)
            except BaseException:
                atomic.remove_folder(staged)
                raise
    except OSError as error:
        raise file_io.folder_error(folder, error) from error


def _check_documents(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], kind: str
) -> dict[str, bytes]:
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
                " and names of shards and their indexes are given by this function"
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


def _write_documents(staged: Path, records: dict[str, FileRecord], documents: Mapping[str, bytes]) -> None:
    for name in sorted(documents):
        with file_io.NewFile(staged / name) as file:
            file.write(documents[name])
        records[name] = FileRecord(file.size, file.digest.hexdigest())


def unlisted_files(folder: Path) -> list[str]:
    """Return the names in a heddle folder that its manifest does not list, sorted."""
    return sorted(set(atomic.list_names(folder)) - set(read_manifest(folder).files) - {MANIFEST_FILE})


def read_folder(folder: Path, kind: str | None = None, flags: int = file_io.READ_FLAGS) -> FolderContents:
    """Open a folder that write_folder wrote.

    kind: if given, it must be the one that the folder was written with. flags: for opening the files. Manifest, sizes
    and documents are verified here, each tensor when it is read. Files that the manifest does not list are ignored.
    Raises CheckpointError for every defect, MachineError for a failing disk.
    """
    folder = atomic.find_folder(Path(folder))
    manifest = read_manifest(folder, flags)
    if kind is not None and manifest.kind != kind:
        raise CheckpointError(f"{folder}: holds {manifest.kind!r} where {kind!r} is needed; name another folder")
    documents: dict[str, str] = {}
    tensor_sets = find_tensor_sets(folder, manifest.files)
    for name, record in sorted(manifest.files.items()):
        if record.tensors is None:
            documents[name] = _read_document(folder / name, record, flags)
            continue
        with file_io.open_regular_file(folder / name, flags):  # report a missing file now, not at the first read
            pass
    for set_name, files in tensor_sets.items():
        if files != (set_name,):
            check_index(folder, set_name, {file: manifest.files[file] for file in files}, documents)
    documents = {name: text for name, text in documents.items() if not name.endswith(INDEX_SUFFIX)}
    return FolderContents(folder, manifest.kind, documents, manifest.files, tensor_sets, manifest.log, flags)


def _read_document(path: Path, record: FileRecord, flags: int) -> str:
    with file_io.open_regular_file(path, flags) as (descriptor, size):
        if size != record.size or size > MAX_DOCUMENT_BYTES:
            raise CheckpointError(
                f"{path}: has {size} bytes where the manifest says {record.size} (at most {MAX_DOCUMENT_BYTES});"
                " restore the file or go back to an earlier checkpoint"
            )
        raw = bytearray(size)
        digest = hashlib.sha256()
        file_io.read_exactly(descriptor, memoryview(raw), path, digest)
    if digest.hexdigest() != record.sha256:
        raise CheckpointError(
            f"{path}: was altered (its SHA-256 differs from the manifest);"
            " restore the file or go back to an earlier checkpoint"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not text in UTF-8; restore the file") from error


def verify_folder(folder: Path, kind: str | None = None) -> FolderContents:
    """Open a folder as read_folder does, and verify every tensor, one at a time in memory."""
    contents = read_folder(folder, kind)
    for files in contents.tensor_sets.values():
        for name in files:
            for _ in read_tensor_file(contents.folder / name, contents.records[name]):
                pass
    return contents


def tensors_sha256(source: FolderContents | Path, set_name: str | None = None) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all tensors, or of those of one set, however it is sharded.

    source: a path is verified first; of FolderContents, the hashes in the manifest are used.
    """
    contents = source if isinstance(source, FolderContents) else verify_folder(source)
    lines = [
        f"{name}:{tensor} {record.dtype} {list(record.shape)} {record.sha256}\n"
        for name in (sorted(contents.tensor_sets) if set_name is None else [set_name])
        for tensor, (_, record) in sorted(contents.tensor_records(name).items())
    ]
    return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()
