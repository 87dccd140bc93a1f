"""Read and write safetensors files: 8 bytes of length, a JSON header, the tensors' bytes; all of it is checked.

Written by hand, because the `safetensors` library hashes nothing, syncs nothing to the disk, and reads a tensor before
its size is compared with a manifest (docs/decisions/034-format-2.md has the measurements). Tests compare with it.
"""

import hashlib
import json
import math
import os
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
from heddle.storage.manifest import MAX_TENSORS, NAME_PATTERN, FileRecord, TensorRecord, row_layout, rows_per_block
from heddle.storage.shards import natural_order
from heddle.storage.tensor_header import (
    DTYPE_NAMES,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    HeaderEntry,
    block_ranges,
    read_header,
)

SLICES_FORMAT = "heddle"  # of files that hold slices of tensors
HASH_THREADS = 2  # hashing then keeps up with a fast disk, and each thread adds little memory


class LazyTensors(Mapping[str, Tensor], ABC):
    """Tensors that are expensive to make, each of which is made once, when it is written."""

    @property
    @abstractmethod
    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of every tensor, by name, known before it is made."""


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
    """Return the bytes of each tensor. Raises CheckpointError, naming the tensor, for what the format cannot hold."""
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
    """Where a slice of a tensor lies in it: its first row and the tensor's number of rows."""

    row_offset: int
    total_rows: int


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    names: Iterable[str] | None = None,
    slices: Mapping[str, RowSlice] | None = None,
) -> FileRecord:
    """Write tensors of any strides and device to a new file and return its hashes. Equal input gives equal bytes.

    names: only these tensors; None writes all. A mapping that makes a tensor when it is looked up holds one at a time.
    slices: those that are slices of tensors; they begin and end where blocks of the tensor do.
    """
    slices = slices or {}
    specs = tensor_specs(tensors, names)
    # The widest dtypes first, so that every tensor stays aligned. Tensors that are made are made layer by layer.
    name_key = natural_order if isinstance(tensors, LazyTensors) else str
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name_key(name)))
    # Other programs must not take a slice for a tensor: transformers reads no file of another format than its own.
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
    rules of the format hold. flags: for opening the file. Raises CheckpointError, naming file and tensor.
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

    rows: by name, indices of the first dim, counted in this file; None for all. Of a file with a record, only the
    header and the blocks that the rows lie in are read, and their hashes are checked. Raises CheckpointError.
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
    """Read the dtype and shape of every tensor of a file, from its header alone."""
    with open_regular_file(path, flags) as (descriptor, size):
        entries = read_header(descriptor, path, size, record).entries
    return {entry.name: (entry.dtype, entry.shape) for entry in entries}


def _read_entry(
    descriptor: int, path: Path, entry: HeaderEntry, record: FileRecord | None, hash_threads: ThreadPoolExecutor
) -> Tensor:
    """Read the tensor that an open file stands at."""
    if record is None or record.tensors is None:
        buffer = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        read_exactly(descriptor, buffer.numpy().data, path)
    else:
        tensor = record.tensors[entry.name]
        buffer = _BlockReader(descriptor, path, hash_threads).read(entry, tensor, range(len(tensor.blocks)))
    return buffer.view(entry.dtype).reshape(entry.shape)


@dataclass(frozen=True)
class _BlockReader:
    """Reads blocks of rows from where an open file stands. One thread reads, others hash what was read."""

    descriptor: int
    path: Path
    hash_threads: ThreadPoolExecutor

    def read_rows(self, entry: HeaderEntry, header_size: int, record: TensorRecord, rows: range) -> Tensor:
        """Return rows of a tensor. Only the blocks that they lie in are read."""
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
        """Return the bytes of the blocks, uint8. Raises CheckpointError if one does not have its hash."""
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
