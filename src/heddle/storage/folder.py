"""A folder of tensor files and text documents: written whole or not at all, verified on every read, never code."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from heddle.distributed.ranks import ONE_PROCESS, Ranks
from heddle.errors import CheckpointError, describe_path
from heddle.storage import file_io
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
from heddle.storage.tensor_file import (
    INDEX_SUFFIX,
    MAX_SHARD_BYTES,
    SHARD_PATTERN,
    check_index,
    check_tensors,
    find_slices,
    find_tensor_sets,
    index_name,
    index_text,
    read_tensor_file,
    read_tensors,
    split_into_shards,
    write_tensor_file,
)

# A folder is written under a temporary name and renamed once all of it is on the disk; the manifest comes last.


MAX_DOCUMENT_BYTES = 256 * 2**20


@contextmanager
def staged_folder(folder: Path, lock: bool) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` as a whole after the block; if the block raises, it is removed.

    lock: exclude other writers of this folder. Raises as `write_folder` does.
    """
    try:
        file_io.make_folder(folder.parent)
        with lock_output(folder) if lock else nullcontext():
            file_io.remove_leftovers(folder.parent, folder.name)
            _refuse_unlisted_content(folder)
            staged = file_io.leftover_path(folder, "tmp")
            try:
                file_io.system.mkdir(staged)
                yield staged
                file_io.sync_folder(staged)
                file_io.replace_folder(staged, folder)
            except BaseException:
                file_io.remove_folder(staged)
                raise
    except OSError as error:
        raise file_io.folder_error(folder, error) from error


def finish_folder(staged: Path, documents: Mapping[str, bytes], manifest: Manifest) -> None:
    """Write the documents, and then the manifest, which must already list the tensor files."""
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
    """Return the documents in UTF-8. Raises CheckpointError for invalid file names, kinds and texts."""
    if folder.name in ("", ".."):
        raise CheckpointError(f"{folder}: cannot be replaced as a whole; name a folder inside it")
    if NAME_PATTERN.fullmatch(kind) is None:
        raise CheckpointError(f"{folder}: the kind {kind!r} needs 1 to 200 letters, digits, '_', '-' or '.'")
    encoded = {}
    for name in (*tensors, *documents):
        is_shard = SHARD_PATTERN.fullmatch(name) is not None or name.endswith(INDEX_SUFFIX)
        if not is_file_name(name) or (name in tensors) != name.endswith(".safetensors") or is_shard:
            raise CheckpointError(
                f"{folder}: {name!r} cannot be a file here; tensor files, and only they, end in .safetensors,"
                " and the writer chooses the names of shards and their indexes"
            )
    for name, text in documents.items():
        try:
            encoded[name] = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{folder / name}: its text is not valid Unicode ({error.reason})") from error
        if len(encoded[name]) > MAX_DOCUMENT_BYTES:
            raise CheckpointError(
                f"{folder / name}: has {len(encoded[name])} bytes, more than {MAX_DOCUMENT_BYTES}; shorten it"
            )
    return encoded


def _refuse_unlisted_content(folder: Path) -> None:
    """Refuse to replace a folder with files that are not in its manifest, because replacing would delete them."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a symbolic link; name the folder it points to")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: {describe_path(folder)}, not a folder; choose another name")
    if not file_io.list_names(folder):
        return
    try:
        unlisted = unlisted_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: holds files that are damaged, of another format or that heddle did not write,"
            " and is left unchanged;"
            " choose another folder or move it away"
        ) from error
    if unlisted:
        raise CheckpointError(
            f"{folder}: also holds {unlisted[0]!r}, which heddle did not write, and is left unchanged;"
            " move that file away or choose another folder"
        )


def unlisted_files(folder: Path) -> list[str]:
    """Return the names in a folder that its manifest does not list, sorted."""
    return sorted(set(file_io.list_names(folder)) - set(read_manifest(folder).files) - {MANIFEST_FILE})


@dataclass(frozen=True)
class FolderContents:
    """A folder with verified manifest and documents. Tensors are verified when they are read.

    folder: where the files are. kind: of the content, as given to the writer. documents: file name to text, without the
    indexes of shards. records: file name to its manifest entry. tensor_sets: name of each set of tensors, such as
    model.safetensors, to its files: that file, or its shards. log: the position in the run's log, for a checkpoint.
    """

    folder: Path
    kind: str
    documents: dict[str, str]
    records: Mapping[str, FileRecord]
    tensor_sets: Mapping[str, tuple[str, ...]]
    log: LogPosition | None = None
    flags: int = field(default=file_io.READ_FLAGS, repr=False)

    @cached_property
    def _pieces(self) -> dict[str, dict[str, list[tuple[str, TensorRecord]]]]:
        """The files of each tensor of each set, with their manifest entries, in the order of rows."""
        return {name: find_slices(self.folder, files, self.records) for name, files in self.tensor_sets.items()}

    def _pieces_of(self, set_name: str) -> dict[str, list[tuple[str, TensorRecord]]]:
        if set_name not in self.tensor_sets:
            names = ", ".join(sorted(self.tensor_sets)) or "none"
            raise CheckpointError(f"{self.folder}: has no tensor file {set_name!r}; it has {names}")
        return self._pieces[set_name]

    def tensor_records(self, set_name: str) -> dict[str, TensorRecord]:
        """Return the manifest entry of each tensor of a set, by name; sliced tensors are described as a whole."""
        records = {}
        for name, pieces in self._pieces_of(set_name).items():
            _, first = pieces[0]
            blocks = tuple(block for _, piece in pieces for block in piece.blocks)
            records[name] = TensorRecord(first.dtype, first.whole_shape, first.row_block, blocks)
        return records

    def tensors(self, set_name: str, device: str | torch.device = "cpu") -> dict[str, Tensor]:
        """Read all tensors of a set, by name, into new memory. Raises CheckpointError if one was altered."""
        pieces, slices, tensors = self._pieces_of(set_name), dict[str, dict[str, Tensor]](), dict[str, Tensor]()
        for file in self.tensor_sets[set_name]:
            for name, tensor in read_tensor_file(self.folder / file, self.records[file], self.flags):
                if len(pieces[name]) == 1:
                    tensors[name] = tensor.to(device)
                    continue
                slices.setdefault(name, {})[file] = tensor
                if len(slices[name]) == len(pieces[name]):
                    tensors[name] = torch.cat([slices[name][piece] for piece, _ in pieces[name]]).to(device)
                    del slices[name]
        return tensors

    def tensor(self, set_name: str, name: str) -> Tensor:
        """Read one tensor of a set into new memory on the CPU. Raises CheckpointError if it was altered."""
        return self.read_slices(set_name, {name: None})[name]

    def read_rows(self, set_name: str, tensor: str, start: int, stop: int) -> Tensor:
        """Read rows (indices of the first dim) of one tensor into new memory on the CPU, as `read_slices` does."""
        return self.read_slices(set_name, {tensor: range(start, stop)})[tensor]

    def read_slices(self, set_name: str, rows: Mapping[str, range | None]) -> dict[str, Tensor]:
        """Read rows of tensors of a set, by name, into new memory on the CPU; None for all rows.

        Only the headers and the blocks of rows that overlap are read and verified. Raises CheckpointError if one was
        altered, or if there are no such tensors or rows.
        """
        pieces, slices = self._pieces_of(set_name), dict[str, dict[int, Tensor]]()
        rows_in_file: dict[str, dict[str, range | None]] = {}
        for name, wanted_rows in rows.items():
            if name not in pieces:
                raise CheckpointError(f"{self.folder}: {set_name} has no tensor {name!r}; name one that it has")
            shape = pieces[name][0][1].whole_shape
            if wanted_rows is not None and not (shape and 0 <= wanted_rows.start <= wanted_rows.stop <= shape[0]):
                raise CheckpointError(
                    f"{self.folder / pieces[name][0][0]}: tensor {name!r} of shape {list(shape)} has no rows"
                    f" {wanted_rows.start} to {wanted_rows.stop}; ask for rows that it has"
                )
            for file, piece in pieces[name]:
                local = None if wanted_rows is None else piece.overlap(wanted_rows)
                if not wanted_rows or local:  # an empty selection has a dtype, too
                    rows_in_file.setdefault(file, {})[name] = local
        for file in sorted(rows_in_file):
            for name, tensor in read_tensors(self.folder / file, rows_in_file[file], self.records[file], self.flags):
                offset = (self.records[file].tensors or {})[name].row_offset
                slices.setdefault(name, {})[offset] = tensor
        joined = {}
        for name in rows:
            parts = [part for _, part in sorted(slices.pop(name).items())]
            joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined


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
    """Write a folder atomically: at every instant it holds the whole old content or the whole new one.

    tensors: file name ending in .safetensors to {name: tensor}, with any strides and device; storage that two names
    share is written twice. Sets larger than `max_shard_bytes` (None: MAX_SHARD_BYTES) become shards with an index.
    documents: file name to text. kind, log: stored for the reader. lock: False if the caller holds the lock of an
    enclosing folder. A folder that heddle wrote, or an empty one, is replaced. Raises CheckpointError for any other
    existing folder, which stays untouched, and if another process is writing it; MachineError for a full or read-only
    disk.
    """
    folder = Path(folder)
    encoded = check_documents(folder, tensors, documents, kind)
    files: dict[str, tuple[str, list[str]]] = {}  # each file's set, and the names of its tensors
    for set_name, named in tensors.items():
        sizes = check_tensors(folder / set_name, named)
        shards = split_into_shards(set_name, sizes, MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
        files |= {file: (set_name, names) for file, names in shards.items()}
        if len(shards) > 1:
            encoded[index_name(set_name)] = index_text(shards, sum(sizes.values())).encode("ascii")
    with staged_folder(folder, lock) as staged:
        records = {
            file: write_tensor_file(staged / file, tensors[set_name], names)
            for file, (set_name, names) in sorted(files.items())
        }
        finish_folder(staged, encoded, Manifest(kind, records, log))


def read_folder(folder: Path, kind: str | None = None, flags: int = file_io.READ_FLAGS) -> FolderContents:
    """Open a folder that write_folder wrote.

    kind: if given, the folder must be of this kind. flags: for opening the files. Manifest, sizes and documents are
    verified here, each tensor when it is read. Files that the manifest does not list are ignored.
    Raises CheckpointError for every defect, MachineError for a failing disk.
    """
    folder = file_io.find_folder(Path(folder))
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
        file_io.read_exactly(descriptor, memoryview(raw), path)
    if hashlib.sha256(raw).hexdigest() != record.sha256:
        raise CheckpointError(
            f"{path}: was altered (its SHA-256 differs from the manifest);"
            " restore the file or go back to an earlier checkpoint"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not text in UTF-8; restore the file") from error


def verify_folder(folder: Path, kind: str | None = None, ranks: Ranks = ONE_PROCESS) -> FolderContents:
    """Open a folder as read_folder does, and verify every tensor, one at a time in memory; each rank its share."""
    contents = read_folder(folder, kind)
    names = [name for files in contents.tensor_sets.values() for name in files]
    for name in names[ranks.rank :: ranks.count]:
        for _ in read_tensor_file(contents.folder / name, contents.records[name]):
            pass
    return contents


def verify_file(path: Path, record: FileRecord) -> None:
    """Verify every byte of one file of a folder, in a few MB of memory. Raises CheckpointError, naming the defect."""
    digest = hashlib.sha256()
    with file_io.open_regular_file(path) as (descriptor, _):
        file_io.hash_rest(descriptor, digest)
    if digest.hexdigest() == record.sha256:
        return
    if record.tensors is None:
        _read_document(path, record, file_io.READ_FLAGS)
        return
    for _ in read_tensor_file(path, record):
        pass
    raise CheckpointError(f"{path}: was altered while it was read; verify it again")


def tensors_sha256(source: FolderContents | Path, set_name: str | None = None) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of all tensors or of one set, independent of shards.

    source: a path is verified first; for FolderContents, the hashes in the manifest are used.
    """
    contents = source if isinstance(source, FolderContents) else verify_folder(source)
    lines = [
        f"{name}:{tensor} {record.dtype} {list(record.shape)} {record.sha256}\n"
        for name in (sorted(contents.tensor_sets) if set_name is None else [set_name])
        for tensor, record in sorted(contents.tensor_records(name).items())
    ]
    return hashlib.sha256("".join(lines).encode("ascii")).hexdigest()
