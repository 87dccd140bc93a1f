"""The header of a safetensors file: names, types, shapes and places of its tensors; all of it is checked."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heddle.errors import CheckpointError
from heddle.storage.file_io import read_exactly
from heddle.storage.manifest import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    NAME_PATTERN,
    FileRecord,
    parse_json_object,
    row_layout,
    rows_per_block,
)

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
# Zip archives (torch.save), pickles of protocols 2 to 5, gzip, and pickles in text begin like this.
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
    """The checked header of a file. size: its bytes, with the 8 bytes of length. entries: in the order of the bytes."""

    size: int
    entries: tuple[HeaderEntry, ...]


def block_ranges(shape: tuple[int, ...], itemsize: int, row_block: int | None = None) -> list[tuple[int, int]]:
    """Return (start, end) in bytes of each block of rows of a tensor; a tensor without bytes has one empty block.

    row_block: rows in a block of the tensor of which `shape` is a slice; None for a whole tensor.
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
        raise CheckpointError(f"{path}: holds other tensors than the manifest lists; restore the file")
    for entry in header.entries:
        tensor = record.tensors[entry.name]
        itemsize = entry.dtype.itemsize
        whole_shape = (tensor.total_rows, *entry.shape[1:]) if tensor.total_rows else entry.shape
        row_block = rows_per_block(whole_shape, itemsize)
        blocks = len(block_ranges(entry.shape, itemsize, row_block))
        expected = (DTYPE_NAMES[entry.dtype], entry.shape, row_block, blocks)
        if (tensor.dtype, tensor.shape, tensor.row_block, len(tensor.blocks)) != expected:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} has another type, shape or number of blocks than the manifest says;"
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
            f"{path}: is not a safetensors file (its {size} bytes cannot hold a header of {length}, or it is"
            f" over {MAX_HEADER_BYTES}); restore the file"
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
        raise CheckpointError(f"{path}: its {METADATA_KEY} is not a table of texts; restore the file")
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
            f"{path}: its tensors cover {covered} bytes of {data_size}: it was cut or added to; restore it"
        )
    return entries


def _header_entry(path: Path, name: str, description: Any) -> HeaderEntry:
    """Check one tensor's description in a header. Whole numbers of any size are safe here: nothing is allocated."""

    def wrong(defect: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name[:200]!r} {defect}; restore the file")

    if NAME_PATTERN.fullmatch(name) is None:
        raise wrong("has a name that is not 1 to 200 letters, digits, '_', '-' or '.'")
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        raise wrong("is not described by dtype, shape and data_offsets alone")
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
