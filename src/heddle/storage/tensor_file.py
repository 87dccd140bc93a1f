"""Read and write the safetensors format: 8 bytes of length, a JSON header, the tensors' bytes; all of it is checked."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.storage.file_io import READ_FLAGS, NewFile, open_regular_file, read_exactly
from heddle.storage.manifest import MAX_TENSORS, NAME_PATTERN, FileRecord, parse_json_object

MAX_HEADER_BYTES = 8 * 2**20
MAX_DIMENSIONS = 64  # torch's limit
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
class TensorRecord:
    """Where one tensor is in a file: `start` and `end` count bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming the tensor, for what the format cannot hold."""
    if len(tensors) > MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(tensors)} tensors are more than the {MAX_TENSORS} a file may hold")
    for name, tensor in tensors.items():
        if NAME_PATTERN.fullmatch(name) is None or name == METADATA_KEY:
            raise CheckpointError(f"{path}: tensor {name!r} needs a name of 1 to 200 letters, digits, '_', '-' or '.'")
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{path}: tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) has no plain"
                " values to save; make it a dense tensor of a common type"
            )


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors of any strides and device to a new file and return its hashes. Equal input gives equal bytes."""
    # The widest dtypes first, so that every tensor stays aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: the header of {len(text)} bytes is over {MAX_HEADER_BYTES}; save fewer tensors")
    head = len(text).to_bytes(8, "little") + text
    hashes = {}
    with NewFile(path) as file:
        file.write(head)
        for name in order:
            digest = hashlib.sha256()
            file.write(_tensor_bytes(tensors[name]), digest)
            hashes[name] = digest.hexdigest()
    return FileRecord(file.size, file.digest.hexdigest(), hashlib.sha256(head).hexdigest(), hashes)


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
    with open_regular_file(path, flags) as (descriptor, size), ThreadPoolExecutor(1) as hash_thread:
        head = _read_head(descriptor, path, size, record)
        tensor_records = parse_header(path, head[8:], size - len(head))
        hashes = None if record is None else record.tensors
        if hashes is not None and {entry.name for entry in tensor_records} != set(hashes):
            raise CheckpointError(f"{path}: holds other tensors than the manifest lists; restore the file")
        for entry in tensor_records:
            buffer = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            digest = None if hashes is None else hashlib.sha256()
            read_exactly(descriptor, buffer.numpy().data, path, digest, hash_thread)
            if hashes is not None and digest is not None and digest.hexdigest() != hashes[entry.name]:
                raise CheckpointError(
                    f"{path}: tensor {entry.name!r} was altered (its SHA-256 differs from the manifest);"
                    " restore the file or go back to an earlier checkpoint"
                )
            yield entry.name, buffer.view(entry.dtype).reshape(entry.shape)


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


def parse_header(path: Path, header: bytes, data_size: int) -> list[TensorRecord]:
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
    records = [_tensor_record(path, name, description) for name, description in content.items()]
    records.sort(key=lambda entry: (entry.start, entry.end))
    covered = 0
    for entry in records:
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
    return records


def _tensor_record(path: Path, name: str, description: Any) -> TensorRecord:
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
    return TensorRecord(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
