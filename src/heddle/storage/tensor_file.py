"""Read and write safetensors files: 8 bytes of length, a JSON header, the tensors' bytes; all of it is checked.

Written by hand, because the `safetensors` library hashes nothing, syncs nothing to the disk, and reads a tensor before
its size is compared with a manifest (docs/decisions/034-format-2.md has the measurements). Tests compare with it.
"""

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{path}: tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) has no plain"
                " values to save; make it a dense tensor of a common type"
            )
        sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> FileRecord:
    """Write tensors of any strides and device to a new file and return its hashes. Equal input gives equal bytes.

    names: only these tensors; None writes all. A mapping that makes a tensor when it is looked up holds one at a time.
    """
    specs = tensor_specs(tensors, names)
    # The widest dtypes first, so that every tensor stays aligned. Tensors that are made are made layer by layer.
    name_key = natural_order if isinstance(tensors, LazyTensors) else str
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, name_key(name)))
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
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
            records[name] = _write_tensor(file, tensors[name])
    return FileRecord(file.size, file.digest.hexdigest(), hashlib.sha256(head).hexdigest(), records)


def _write_tensor(file: NewFile, tensor: Tensor) -> TensorRecord:
    shape, data = tuple(tensor.shape), _tensor_bytes(tensor)
    row_block = rows_per_block(shape, tensor.element_size())
    block_hashes = []
    for start, end in block_ranges(shape, tensor.element_size()):
        digest = hashlib.sha256()
        file.write(data[start:end], digest)
        block_hashes.append(digest.hexdigest())
    return TensorRecord(DTYPE_NAMES[tensor.dtype], shape, row_block, tuple(block_hashes))


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
    with open_regular_file(path, flags) as (descriptor, size), ThreadPoolExecutor(HASH_THREADS) as hash_threads:
        header = read_header(descriptor, path, size, record)
        entry = next((entry for entry in header.entries if entry.name == name), None)
        if entry is None:
            raise CheckpointError(f"{path}: holds no tensor {name!r}; restore the file")
        os.lseek(descriptor, header.size + entry.start, os.SEEK_SET)
        return _read_entry(descriptor, path, entry, record, hash_threads)


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
        hashes = record.tensors[entry.name].blocks
        buffer = _BlockReader(descriptor, path, hash_threads).read(entry, hashes, range(len(hashes)))
    return buffer.view(entry.dtype).reshape(entry.shape)


def read_tensor_rows(path: Path, record: FileRecord, name: str, rows: range, flags: int = READ_FLAGS) -> Tensor:
    """Read rows (indices of the first dim) of one tensor into new memory on the CPU.

    Only the header and the blocks that the rows lie in are read, and their hashes are checked. Raises CheckpointError.
    """
    with open_regular_file(path, flags) as (descriptor, size), ThreadPoolExecutor(HASH_THREADS) as hash_threads:
        header = read_header(descriptor, path, size, record)
        entry = next(entry for entry in header.entries if entry.name == name)
        row_count, row_bytes = row_layout(entry.shape, entry.dtype.itemsize)
        if not entry.shape or not 0 <= rows.start <= rows.stop <= row_count:
            raise CheckpointError(
                f"{path}: tensor {name!r} of shape {list(entry.shape)} has no rows {rows.start} to {rows.stop};"
                " ask for rows that it has"
            )
        tensor = (record.tensors or {})[name]
        blocks = range(rows.start // tensor.row_block, -(-rows.stop // tensor.row_block) if rows else 0)
        start = blocks.start * tensor.row_block * row_bytes
        os.lseek(descriptor, header.size + entry.start + start, os.SEEK_SET)
        buffer = _BlockReader(descriptor, path, hash_threads).read(entry, tensor.blocks, blocks)
    offset = rows.start * row_bytes - start
    row_bytes_only = buffer[offset : offset + len(rows) * row_bytes].clone()
    return row_bytes_only.view(entry.dtype).reshape(len(rows), *entry.shape[1:])


@dataclass(frozen=True)
class _BlockReader:
    """Reads blocks of rows from where an open file stands. One thread reads, others hash what was read."""

    descriptor: int
    path: Path
    hash_threads: ThreadPoolExecutor

    def read(self, entry: HeaderEntry, hashes: Sequence[str], blocks: range) -> Tensor:
        """Return the bytes of the blocks, uint8. Raises CheckpointError if one does not have its hash."""
        ranges = block_ranges(entry.shape, entry.dtype.itemsize)[blocks.start : blocks.stop]
        first_byte, last_byte = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        buffer = torch.empty(last_byte - first_byte, dtype=torch.uint8)
        data = buffer.numpy().data
        pending: list[Future[str] | str] = []
        for start, end in ranges:
            block = data[start - first_byte : end - first_byte]
            read_exactly(self.descriptor, block, self.path)
            parallel = len(block) >= MIN_PARALLEL_BYTES
            pending.append(self.hash_threads.submit(_sha256, block) if parallel else _sha256(block))
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
