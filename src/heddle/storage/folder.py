"""A folder of tensor files and text documents: written whole or not at all, verified on every read, never code."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage import atomic, file_io
from heddle.storage.manifest import MANIFEST_FILE, NAME_PATTERN, FileRecord, Manifest, is_file_name, read_manifest
from heddle.storage.tensor_file import check_tensors, read_tensor_file, write_tensor_file

MAX_DOCUMENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class FolderContents:
    """A folder whose manifest and documents are verified. Tensors are verified when they are read.

    folder: where the files are. kind: what the writer called the content. documents: file name to text.
    tensor_hashes: 'file:tensor' to the SHA-256 of the tensor's bytes. records: file name to its manifest entry.
    """

    folder: Path
    kind: str
    documents: dict[str, str]
    tensor_hashes: dict[str, str]
    records: Mapping[str, FileRecord]

    @property
    def tensor_files(self) -> list[str]:
        """Return the names of the tensor files, sorted."""
        return sorted(name for name, record in self.records.items() if record.tensors is not None)

    def tensors(self, file: str, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Read all tensors of one file, by name, into new memory. Raises CheckpointError if one was altered."""
        record = self.records.get(file)
        if record is None or record.tensors is None:
            raise CheckpointError(f"{self.folder}: has no tensor file {file!r}; it has {self.tensor_files}")
        return {name: tensor.to(device) for name, tensor in read_tensor_file(self.folder / file, record)}


def write_folder(
    folder: Path, *, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], kind: str
) -> None:
    """Write a folder so that at every instant its name holds the whole old content or the whole new one.

    tensors: file name ending in .safetensors to {name: tensor}, of any strides and device; a storage that two names
    share is written twice. documents: file name to text. kind: stored for the reader. A folder that heddle wrote, or
    an empty one, is replaced. Raises CheckpointError for any other existing folder, which stays untouched, and
    MachineError for a full or read-only disk. Only one process may write a folder at a time.
    """
    folder = Path(folder)
    encoded = _check_input(folder, tensors, documents, kind)
    try:
        atomic.make_folder(folder.parent)
        atomic.remove_leftovers(folder.parent, folder.name)
        _refuse_unlisted_content(folder)
        staged = atomic.leftover_path(folder, "tmp")
        try:
            _write_staged(staged, tensors, encoded, kind)
            atomic.replace_folder(staged, folder)
        except BaseException:
            atomic.remove_folder(staged)
            raise
    except OSError as error:
        raise file_io.folder_error(folder, error) from error


def _check_input(
    folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, str], kind: str
) -> dict[str, bytes]:
    if folder.name in ("", ".."):
        raise CheckpointError(f"{folder}: cannot be replaced as a whole; name a folder inside it")
    if NAME_PATTERN.fullmatch(kind) is None:
        raise CheckpointError(f"{folder}: the kind {kind!r} needs 1 to 200 letters, digits, '_', '-' or '.'")
    encoded = {}
    for name in (*tensors, *documents):
        if not is_file_name(name) or (name in tensors) != name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder}: {name!r} cannot be a file here; tensor files end in .safetensors, no others"
            )
    for name, named in tensors.items():
        check_tensors(folder / name, named)
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
        raise CheckpointError(f"{folder}: is a file, not a folder; choose another name")
    if not atomic.list_names(folder):
        return
    try:
        unlisted = unlisted_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: holds something that heddle did not write or that is damaged, and is left as it is;"
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


def _write_staged(
    staged: Path, tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, bytes], kind: str
) -> None:
    """Write every file to the temporary folder, the manifest last, and flush all of it to the disk."""
    file_io.system.mkdir(staged)
    records = {}
    for name in sorted(tensors):
        records[name] = write_tensor_file(staged / name, tensors[name])
    for name in sorted(documents):
        with file_io.NewFile(staged / name) as file:
            file.write(documents[name])
        records[name] = FileRecord(file.size, file.digest.hexdigest())
    with file_io.NewFile(staged / MANIFEST_FILE) as file:
        file.write(Manifest(kind, records).encode())
    atomic.sync_folder(staged)


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
    hashes: dict[str, str] = {}
    for name, record in sorted(manifest.files.items()):
        if record.tensors is None:
            documents[name] = _read_document(folder / name, record, flags)
            continue
        with file_io.open_regular_file(folder / name, flags):  # report a missing file now, not at the first read
            hashes |= {f"{name}:{tensor}": value for tensor, value in sorted(record.tensors.items())}
    return FolderContents(folder, manifest.kind, documents, hashes, manifest.files)


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
    for name in contents.tensor_files:
        for _ in read_tensor_file(contents.folder / name, contents.records[name]):
            pass
    return contents


def tensors_sha256(source: FolderContents | Path, file: str | None = None) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of all tensors, or of those of one file.

    source: a path is verified first; of FolderContents, the hashes in the manifest are used.
    """
    contents = source if isinstance(source, FolderContents) else verify_folder(source)
    files = contents.tensor_files if file is None else [file]
    lines = [f"{name} {value}\n" for name, value in contents.tensor_hashes.items() if name.split(":")[0] in files]
    lines += [f"{name} {contents.records[name].header_sha256}\n" for name in files]
    return hashlib.sha256("".join(sorted(lines)).encode("ascii")).hexdigest()
