"""Read and write safetensors files: 8 bytes of length, a JSON header, the tensors' bytes; all of it is checked.

Our own implementation, because the `safetensors` library does not hash or fsync, and reads a tensor before its size is
compared with a manifest (docs/decisions/034-format-2.md has the measurements). Tests compare with it.
"""

import hashlib
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.distributed.ranks import as_sharded
from heddle.errors import CheckpointError
from heddle.storage.file_io import MIN_PARALLEL_BYTES, READ_FLAGS, NewFile, open_regular_file, read_exactly
from heddle.storage.manifest import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    NAME_PATTERN,
    FileRecord,
    TensorRecord,
    parse_json_object,
    row_layout,
    rows_per_block,
)

# The header of a safetensors file: names, dtypes, shapes and offsets of its tensors; all of it is checked.


MAX_HEADER_BYTES = 8 * 2**20
METADATA_KEY = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Zip archives (torch.save), pickles of protocols 2 to 5, gzip, and text pickles begin with these.
PICKLE_PREFIXES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b", b"(", b"]q", b"}q", b"c")


@dataclass(frozen=True)
class HeaderEntry:
    """Where one tensor is in a file: `start` and `end` count bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorFileHeader:
    """The checked header of a file. size: bytes, with the 8 bytes of length. entries: in the order of their bytes."""

    size: int
    entries: tuple[HeaderEntry, ...]


def block_ranges(shape: tuple[int, ...], itemsize: int, row_block: int | None = None) -> list[tuple[int, int]]:
    """Return (start, end) in bytes of each block of rows of a tensor; a tensor without bytes has one empty block.

    row_block: rows per block of the whole tensor, if `shape` is a slice of it; None for a whole tensor.
    """
    rows, row_bytes = row_layout(shape, itemsize)
    step = (rows_per_block(shape, itemsize) if row_block is None else row_block) * row_bytes
    return [(start, min(start + step, rows * row_bytes)) for start in range(0, rows * row_bytes, step or 1)] or [(0, 0)]


def read_header(descriptor: int, path: Path, size: int, record: FileRecord | None) -> TensorFileHeader:
    """Read and check the header of an open file, which must hold the tensors that `record` lists."""
    head = _read_head(descriptor, path, size, record)
    header = TensorFileHeader(len(head), tuple(parse_header(path, head[8:], size - len(head))))
    if record is None or record.tensors is None:
        return header
    if {entry.name for entry in header.entries} != set(record.tensors):
        raise CheckpointError(f"{path}: its tensors differ from the manifest; restore the file")
    for entry in header.entries:
        tensor = record.tensors[entry.name]
        itemsize = entry.dtype.itemsize
        whole_shape = (tensor.total_rows, *entry.shape[1:]) if tensor.total_rows else entry.shape
        row_block = rows_per_block(whole_shape, itemsize)
        blocks = len(block_ranges(entry.shape, itemsize, row_block))
        expected = (DTYPE_NAMES[entry.dtype], entry.shape, row_block, blocks)
        if (tensor.dtype, tensor.shape, tensor.row_block, len(tensor.blocks)) != expected:
            raise CheckpointError(
                f"{path}: the type, shape or number of blocks of tensor {entry.name!r} differs from the manifest;"
                " restore the file"
            )
        rows = tensor.rows
        if tensor.total_rows and (rows.start % row_block or (rows.stop % row_block and rows.stop != tensor.total_rows)):
            raise CheckpointError(
                f"{path}: the rows {rows.start} to {rows.stop} of tensor {entry.name!r} are not whole blocks of"
                f" {row_block} rows; restore the file"
            )
    return header


def _read_head(descriptor: int, path: Path, size: int, record: FileRecord | None) -> bytes:
    """Read the 8 bytes of length and the header. Its size is checked before memory is allocated for it."""
    prefix = bytearray(min(8, size))
    read_exactly(descriptor, memoryview(prefix), path)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES and prefix.startswith(PICKLE_PREFIXES):
        raise CheckpointError(
            f"{path}: is a pickle or an archive, which can run code and is never read;"
            " have its author convert it to safetensors"
        )
    if record is not None and size != record.size:
        raise CheckpointError(
            f"{path}: has {size} bytes where the manifest says {record.size};"
            " restore the file or go back to an earlier checkpoint"
        )
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: is not a safetensors file (its {size} bytes cannot hold a header of {length}, or the"
            f" header is over {MAX_HEADER_BYTES}); restore the file"
        )
    header = bytearray(length)
    read_exactly(descriptor, memoryview(header), path)
    head = bytes(prefix + header)
    if record is not None and hashlib.sha256(head).hexdigest() != record.header_sha256:
        raise CheckpointError(
            f"{path}: its header was altered (its SHA-256 differs from the manifest);"
            " restore the file or go back to an earlier checkpoint"
        )
    return head


def parse_header(path: Path, header: bytes, data_size: int) -> list[HeaderEntry]:
    """Return the tensors in a header, in the order of their bytes, which must cover `data_size` exactly."""
    try:
        content = parse_json_object(header)
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is not valid ({error}); restore the file") from error
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: its {METADATA_KEY} is not a table of strings; restore the file")
    if len(content) > MAX_TENSORS:
        raise CheckpointError(f"{path}: lists {len(content)} tensors, more than {MAX_TENSORS}; split the file")
    entries = [_header_entry(path, name, description) for name, description in content.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    covered = 0
    for entry in entries:
        if entry.start != covered:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.start} where {covered} is next"
                " (a gap or an overlap); restore the file"
            )
        covered = entry.end
    if covered != data_size:
        raise CheckpointError(
            f"{path}: its tensors cover {covered} bytes of {data_size}: it was truncated or extended; restore it"
        )
    return entries


def _header_entry(path: Path, name: str, description: Any) -> HeaderEntry:
    """Check one tensor's description in a header. Integers of any size are safe here: nothing is allocated."""

    def wrong(defect: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name[:200]!r} {defect}; restore the file")

    if NAME_PATTERN.fullmatch(name) is None:
        raise wrong("has a name that is not 1 to 200 letters, digits, '_', '-' or '.'")
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        raise wrong("is not described by exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(description["dtype"]) if isinstance(description["dtype"], str) else None
    if dtype is None:
        raise wrong(f"has the unknown type {str(description['dtype'])[:40]!r}")
    shape, offsets = description["shape"], description["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) >= 2**62:
        raise wrong("has a shape that is not a short list of whole numbers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise wrong("has offsets that are not two whole numbers")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise wrong(f"of shape {shape} and type {description['dtype']} does not fill its bytes")
    return HeaderEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


# Tensor sets: `model.safetensors` is one file, or shards `model-00001-of-00003.safetensors` and an index beside them.
#
# The index, `model.safetensors.index.json`, has Hugging Face's format. The manifest lists the same; both must agree.
# Shards of ranks may hold slices of a tensor: the index lists these separately, so that no reader mistakes a slice for
# a tensor.


MAX_SHARD_BYTES = 5 * 10**9  # huggingface_hub's default ("5GB")
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SHARD_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `layers.2` before `layers.10`, so that a shard holds neighboring layers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def split_into_shards(set_name: str, sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Return the files of a tensor set, each with its tensors' names. Equal sizes give equal shards.

    sizes: bytes of each tensor. A file has at most `max_bytes` of tensors, or a single larger tensor. A set that fits
    into one file is not sharded.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in sorted(sizes, key=natural_order):
        if shards[-1] and shard_bytes + sizes[name] > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += sizes[name]
    if len(shards) == 1:
        return {set_name: shards[0]}
    stem = set_name.removesuffix(SUFFIX)
    return {shard_name(stem, number, len(shards)): names for number, names in enumerate(shards, start=1)}


def shard_name(stem: str, number: int, count: int) -> str:
    """Return the name of a shard, counted from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"


def index_name(set_name: str) -> str:
    """Return the name of a tensor set's index."""
    return set_name.removesuffix(SUFFIX) + INDEX_SUFFIX


def index_text(
    shards: Mapping[str, Iterable[str]], total_bytes: int, slices: Mapping[str, Mapping[str, range]] | None = None
) -> str:
    """Return the index of a tensor set. shards: file to the names of its tensors. slices: tensor to file to rows."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    content: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    if slices:
        content["slices"] = {
            name: {file: [rows.start, rows.stop] for file, rows in files.items()} for name, files in slices.items()
        }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def index_of(records: Mapping[str, FileRecord]) -> str:
    """Return the index of a tensor set. records: the manifest's entries of its files."""
    shards, slices = _contents(records)
    return index_text(shards, sum(map(_bytes_of_tensors, records.values())), slices)


def _contents(records: Mapping[str, FileRecord]) -> tuple[dict[str, list[str]], dict[str, dict[str, range]]]:
    """Return the whole tensors of each file, and the rows in each file of each sliced tensor."""
    shards: dict[str, list[str]] = {file: [] for file in records}
    slices: dict[str, dict[str, range]] = {}
    for file, record in records.items():
        for name, tensor in (record.tensors or {}).items():
            if tensor.total_rows is None:
                shards[file].append(name)
            else:
                slices.setdefault(name, {})[file] = tensor.rows
    return shards, slices


def find_tensor_sets(folder: Path, records: Mapping[str, FileRecord]) -> dict[str, tuple[str, ...]]:
    """Return the files of each tensor set in a manifest. Raises CheckpointError if shards are not complete."""
    numbers: dict[str, dict[int, str]] = {}
    sets: dict[str, tuple[str, ...]] = {}
    for name, record in sorted(records.items()):
        if record.tensors is None:
            continue
        match = SHARD_PATTERN.fullmatch(name)
        if match is None:
            sets[name] = (name,)
            find_slices(folder, sets[name], records)
            continue
        stem, number, count = match["stem"], int(match["number"]), int(match["count"])
        shards = numbers.setdefault(stem, {})
        first_number, first_file = next(iter(shards.items()), (number, name))
        if not 1 <= number <= count or shard_name(stem, first_number, count) != first_file:
            raise CheckpointError(f"{folder / name}: does not belong to the shards beside it; save the folder again")
        shards[number] = name
    for stem, shards in numbers.items():
        count = int(next(iter(shards.values()))[: -len(SUFFIX)][-5:])
        files = tuple(shard_name(stem, number, count) for number in range(1, count + 1))
        present = set(shards.values())
        missing = next((file for file in files if file not in present), None)
        if missing is not None:
            raise CheckpointError(
                f"{folder / missing}: is a shard that is missing from the manifest; save the folder again"
            )
        if stem + SUFFIX in sets:
            raise CheckpointError(f"{folder / stem}{SUFFIX}: exists as one file and as shards; save the folder again")
        find_slices(folder, files, records)
        sets[stem + SUFFIX] = files
    return sets


def find_slices(
    folder: Path, files: Iterable[str], records: Mapping[str, FileRecord]
) -> dict[str, list[tuple[str, TensorRecord]]]:
    """Return the files of each tensor of a set, each with its manifest entry, in the order of rows.

    Raises CheckpointError for a duplicate tensor, and for slices that leave a hole, overlap or do not fit.
    """
    pieces: dict[str, list[tuple[str, TensorRecord]]] = {}
    for file in files:
        for name, tensor in (records[file].tensors or {}).items():
            pieces.setdefault(name, []).append((file, tensor))
    for name, slices in pieces.items():
        if slices[0][1].total_rows is None and len(slices) == 1:
            continue
        if any(tensor.total_rows is None for _, tensor in slices):
            (first_file, _), (file, _) = slices[:2]
            where = f"which is also in {first_file}"
            raise CheckpointError(f"{folder / file}: holds tensor {name!r}, {where}; save it again")
        slices.sort(key=lambda piece: piece[1].row_offset)
        first_file, first = slices[0]
        next_row, kind_of_first = 0, (first.dtype, first.row_block, first.whole_shape)
        for file, tensor in slices:
            if (tensor.dtype, tensor.row_block, tensor.whole_shape) != kind_of_first:
                raise CheckpointError(
                    f"{folder / file}: its slice of tensor {name!r} has another type or shape than its slice in"
                    f" {first_file}; save the folder again"
                )
            if tensor.row_offset != next_row:
                defect = "an overlap" if tensor.row_offset < next_row else "a hole"
                raise CheckpointError(
                    f"{folder / file}: its slice of tensor {name!r} starts at row {tensor.row_offset} where {next_row}"
                    f" is next ({defect}); save the folder again"
                )
            next_row = tensor.rows.stop
        if next_row != first.total_rows:
            raise CheckpointError(
                f"{folder / slices[-1][0]}: tensor {name!r} ends at row {next_row} of {first.total_rows} (a hole);"
                " save the folder again"
            )
    return pieces


def check_index(folder: Path, set_name: str, records: Mapping[str, FileRecord], documents: Mapping[str, str]) -> None:
    """Raise CheckpointError if the index of a tensor set does not match the manifest.

    records: the manifest's entries of the set's shards. documents: the folder's text files, including the index.
    """
    path = folder / index_name(set_name)
    if path.name not in documents:
        raise CheckpointError(f"{path}: is not in the manifest, which lists shards; save the folder again")
    try:
        content = parse_json_object(documents[path.name].encode())
    except ValueError as error:
        raise CheckpointError(f"{path}: is not an index of shards ({error}); save the folder again") from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: has no table 'weight_map'; save the folder again")
    shards, slices = _contents(records)
    expected = {tensor: file for file, names in shards.items() for tensor in names}
    for tensor in sorted(expected.keys() | weight_map.keys()):
        listed, actual = weight_map.get(tensor), expected.get(tensor)
        if listed != actual:
            raise CheckpointError(
                f"{path}: says that tensor {tensor!r} is in {listed or 'no file'}, but the manifest says"
                f" {actual or 'in none'}; save the folder again"
            )
    if content.get("slices", {}) != json.loads(index_text({}, 0, slices)).get("slices", {}):
        raise CheckpointError(f"{path}: its slices differ from the manifest; save the folder again")
    metadata: Any = content.get("metadata")
    total = sum(map(_bytes_of_tensors, records.values()))
    if not isinstance(metadata, dict) or metadata.get("total_size") != total:
        raise CheckpointError(f"{path}: its total_size is not the {total} bytes of the tensors; save the folder again")


def _bytes_of_tensors(record: FileRecord) -> int:
    """Return the bytes of a file's tensors, without its header."""
    itemsizes = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    tensors = (record.tensors or {}).values()
    return sum(math.prod(tensor.shape) * itemsizes.get(tensor.dtype, 0) for tensor in tensors)


SLICES_FORMAT = "heddle"  # of files with slices of tensors
HASH_THREADS = 2  # enough to keep up with a fast disk; each thread adds little memory


class LazyTensors(Mapping[str, Tensor], ABC):
    """Tensors that are expensive to make; each is made once, when it is written."""

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of every tensor, by name, before it is made."""


def tensor_specs(
    tensors: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of tensors. names: only these; None takes all."""
    chosen = tensors if names is None else names
    if isinstance(tensors, LazyTensors):
        return {name: tensors.specs[name] for name in chosen}
    described = ((name, tensors[name]) for name in chosen)
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in described}


def check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of each tensor. Raises CheckpointError, naming a tensor that the format cannot hold."""
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(tensors)} tensors are more than the {MAX_TENSORS} a file may hold")
    if isinstance(tensors, LazyTensors):
        return {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.specs.items()}
    sizes = {}
    for name, tensor in tensors.items():
        if NAME_PATTERN.fullmatch(name) is None or name == METADATA_KEY:
            raise CheckpointError(f"{path}: tensor {name!r} needs a name of 1 to 200 letters, digits, '_', '-' or '.'")
        if as_sharded(tensor) is not None:
            raise CheckpointError(
                f"{path}: tensor {name!r} is sharded over ranks; give `ranks`, and save on all of them"
            )
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{path}: tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) has no plain"
                " values to save; make it a dense tensor of a common type"
            )
        sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


class RowSlice(NamedTuple):
    """The position of a slice in its tensor: the slice's first row and the tensor's number of rows."""

    row_offset: int
    total_rows: int


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    names: Iterable[str] | None = None,
    slices: Mapping[str, RowSlice] | None = None,
) -> FileRecord:
    """Write tensors of any strides and device to a new file and return its hashes. Equal input gives equal bytes.

    names: only these tensors; None writes all. A mapping that makes tensors on lookup keeps one at a time in memory.
    slices: position of each tensor that is a slice; slices begin and end at block boundaries of the whole tensor.
    """
    slices = slices or {}
    specs = tensor_specs(tensors, names)
    # The widest dtypes first, so that every tensor stays aligned. Lazy tensors are made layer by layer.
    name_key = natural_order if isinstance(tensors, LazyTensors) else str
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name_key(name)))
    # Other programs must not mistake a slice for a tensor: transformers refuses files with another format.
    header: dict[str, Any] = {METADATA_KEY: {"format": SLICES_FORMAT if slices else "pt"}}
    end = 0
    for name in order:
        dtype, shape = specs[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: the header of {len(text)} bytes is over {MAX_HEADER_BYTES}; save fewer tensors")
    head = len(text).to_bytes(8, "little") + text
    records = {}
    with NewFile(path) as file:
        file.write(head)
        for name in order:
            records[name] = _write_tensor(file, tensors[name], slices.get(name))
    return FileRecord(file.size, file.digest.hexdigest(), hashlib.sha256(head).hexdigest(), records)


def _write_tensor(file: NewFile, tensor: Tensor, tensor_slice: RowSlice | None) -> TensorRecord:
    shape, data = tuple(tensor.shape), _tensor_bytes(tensor)
    whole_shape = shape if tensor_slice is None else (tensor_slice.total_rows, *shape[1:])
    row_block = rows_per_block(whole_shape, tensor.element_size())
    block_hashes = []
    for start, end in block_ranges(shape, tensor.element_size(), row_block):
        digest = hashlib.sha256()
        file.write(data[start:end], digest)
        block_hashes.append(digest.hexdigest())
    return TensorRecord(DTYPE_NAMES[tensor.dtype], shape, row_block, tuple(block_hashes), *(tensor_slice or ()))


def _tensor_bytes(tensor: Tensor) -> memoryview:
    dense = tensor.detach().resolve_neg().cpu().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a dense tensor of one element may have any stride
    return flat.view(torch.uint8).numpy().data


def read_tensor_file(
    path: Path, record: FileRecord | None = None, flags: int = READ_FLAGS
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the CPU in new memory) in the file's order, each checked first.

    record: from a manifest; size, header and every tensor must match it. None, for files of other programs: only the
    rules of the format are checked. flags: for opening the file. Raises CheckpointError, naming file and tensor.
    """
    with open_regular_file(path, flags) as (descriptor, size), ThreadPoolExecutor(HASH_THREADS) as hash_threads:
        for entry in read_header(descriptor, path, size, record).entries:
            yield entry.name, _read_entry(descriptor, path, entry, record, hash_threads)


def read_tensor(path: Path, name: str, record: FileRecord | None = None, flags: int = READ_FLAGS) -> Tensor:
    """Read one tensor of a file into new memory on the CPU, checked as in `read_tensor_file`."""
    return next(read_tensors(path, {name: None}, record, flags))[1]


def read_tensors(
    path: Path, rows: Mapping[str, range | None], record: FileRecord | None = None, flags: int = READ_FLAGS
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, rows of the tensor, on the CPU in new memory), in the file's order.

    rows: by name, indices of the first dim, counted in this file; None for all. With a record, only the header and the
    blocks that contain these rows are read, and their hashes are checked. Raises CheckpointError.
    """
    with open_regular_file(path, flags) as (descriptor, size), ThreadPoolExecutor(HASH_THREADS) as hash_threads:
        header = read_header(descriptor, path, size, record)
        entries = {entry.name: entry for entry in header.entries}
        for name in rows.keys() - entries.keys():
            raise CheckpointError(f"{path}: holds no tensor {name!r}; restore the file")
        for name in (name for name in entries if name in rows):
            entry, wanted_rows = entries[name], rows[name]
            if wanted_rows is not None and record is not None:
                reader = _BlockReader(descriptor, path, hash_threads)
                yield name, reader.read_rows(entry, header.size, (record.tensors or {})[name], wanted_rows)
                continue
            os.lseek(descriptor, header.size + entry.start, os.SEEK_SET)
            tensor = _read_entry(descriptor, path, entry, record, hash_threads)
            yield name, tensor if wanted_rows is None else tensor[wanted_rows.start : wanted_rows.stop].clone()


def read_tensor_specs(
    path: Path, record: FileRecord | None = None, flags: int = READ_FLAGS
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Read the dtype and shape of every tensor in a file, from its header."""
    with open_regular_file(path, flags) as (descriptor, size):
        entries = read_header(descriptor, path, size, record).entries
    return {entry.name: (entry.dtype, entry.shape) for entry in entries}


def _read_entry(
    descriptor: int, path: Path, entry: HeaderEntry, record: FileRecord | None, hash_threads: ThreadPoolExecutor
) -> Tensor:
    """Read the tensor at the current position of an open file."""
    if record is None or record.tensors is None:
        buffer = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        read_exactly(descriptor, buffer.numpy().data, path)
    else:
        tensor = record.tensors[entry.name]
        buffer = _BlockReader(descriptor, path, hash_threads).read(entry, tensor, range(len(tensor.blocks)))
    return buffer.view(entry.dtype).reshape(entry.shape)


@dataclass(frozen=True)
class _BlockReader:
    """Reads blocks of rows from the current position of an open file. One thread reads, others hash."""

    descriptor: int
    path: Path
    hash_threads: ThreadPoolExecutor

    def read_rows(self, entry: HeaderEntry, header_size: int, record: TensorRecord, rows: range) -> Tensor:
        """Return rows of a tensor. Only the blocks that contain them are read."""
        row_bytes = row_layout(entry.shape, entry.dtype.itemsize)[1]
        blocks = range(rows.start // record.row_block, -(-rows.stop // record.row_block) if rows else 0)
        start = blocks.start * record.row_block * row_bytes
        os.lseek(self.descriptor, header_size + entry.start + start, os.SEEK_SET)
        buffer = self.read(entry, record, blocks)
        offset = rows.start * row_bytes - start
        if len(buffer) > len(rows) * row_bytes:  # free the memory of other rows
            buffer = buffer[offset : offset + len(rows) * row_bytes].clone()
        return buffer.view(entry.dtype).reshape(len(rows), *entry.shape[1:])

    def read(self, entry: HeaderEntry, record: TensorRecord, blocks: range) -> Tensor:
        """Return the bytes of the blocks, uint8. Raises CheckpointError if a block's hash differs."""
        ranges = block_ranges(entry.shape, entry.dtype.itemsize, record.row_block)[blocks.start : blocks.stop]
        first_byte, last_byte = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        buffer = torch.empty(last_byte - first_byte, dtype=torch.uint8)
        data = buffer.numpy().data
        pending: list[Future[str] | str] = []
        for start, end in ranges:
            block = data[start - first_byte : end - first_byte]
            read_exactly(self.descriptor, block, self.path)
            parallel = len(block) >= MIN_PARALLEL_BYTES
            pending.append(self.hash_threads.submit(_sha256, block) if parallel else _sha256(block))
        hashes = record.blocks
        for number, digest in zip(blocks, pending, strict=True):
            if (digest if isinstance(digest, str) else digest.result()) != hashes[number]:
                where = f" in block {number} of {len(hashes)}" if len(hashes) > 1 else ""
                raise CheckpointError(
                    f"{self.path}: tensor {entry.name!r} was altered{where} (its SHA-256 differs from the manifest);"
                    " restore the file or go back to an earlier checkpoint"
                )
        return buffer


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
