"""manifest.json: size and SHA-256 of every file, tensor and block of rows in a folder, and of the manifest itself.

The format is specified in docs/decisions/034-format-2.md.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from heddle.errors import CheckpointError, no_folder_reason, parse_error_reason
from heddle.storage.file_io import READ_FLAGS, open_regular_file, read_exactly

MANIFEST_FILE = "manifest.json"
FORMAT_NAME = "heddle"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 256 * 2**20  # about 3 TB of tensors
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 64  # torch's limit
BLOCK_BYTES = 2**20
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,200}")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
CHAIN_PATTERN = re.compile(r"[0-9a-f]{16}")
EMPTY_CHAIN = "0" * 16


def rows_per_block(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows (indices of the first dim) of a tensor are hashed together. The rule is part of the format.

    It is the largest power of two of rows that fit into BLOCK_BYTES, but at least 1 row and at most all rows. With a
    power of two, ranks' slices begin where blocks begin. A scalar has 1 row; a tensor without bytes is one block.
    """
    rows, row_bytes = row_layout(shape, itemsize)
    if rows * row_bytes == 0:
        return max(1, rows)
    fitting_rows = max(1, BLOCK_BYTES // row_bytes)
    return min(rows, 1 << (fitting_rows.bit_length() - 1))


def row_layout(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return (rows, bytes of a row); a scalar has one row."""
    return (shape[0] if shape else 1), math.prod(shape[1:]) * itemsize


def combined_sha256(block_hashes: Iterable[str]) -> str:
    """Return a tensor's SHA-256: the hash of its blocks' digests (32 bytes each), concatenated."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, block_hashes))).hexdigest()


@dataclass(frozen=True)
class TensorRecord:
    """Dtype and shape of a tensor as in the safetensors header, and the SHA-256 of each block of rows, in order.

    A slice of a tensor, as written by ranks, has the blocks within it. row_offset: its first row. total_rows: rows of
    the whole tensor; None if this is the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    row_block: int
    blocks: tuple[str, ...]
    row_offset: int = 0
    total_rows: int | None = None

    @property
    def sha256(self) -> str:
        """Return the tensor's SHA-256. Ranks with whole blocks can compute it together."""
        return combined_sha256(self.blocks)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which this may be a slice."""
        return self.shape if self.total_rows is None else (self.total_rows, *self.shape[1:])

    @property
    def rows(self) -> range:
        """Return the rows of the whole tensor that this record covers; a scalar has one."""
        return range(self.row_offset, self.row_offset + (self.shape[0] if self.shape else 1))

    def overlap(self, rows: range) -> range:
        """Return which of these rows of the whole tensor this record covers, counted from its first row."""
        start, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        return range(start - self.row_offset, max(start, stop) - self.row_offset)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "row_block": self.row_block}
        if self.total_rows is not None:
            fields |= {"row_offset": self.row_offset, "total_rows": self.total_rows}
        return fields | {"sha256": self.sha256, "blocks": list(self.blocks)}


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file. Tensor files also have `header_sha256` and `tensors` (by name)."""

    size: int
    sha256: str
    header_sha256: str | None = None
    tensors: Mapping[str, TensorRecord] | None = None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"size": self.size, "sha256": self.sha256}
        if self.tensors is not None:
            tensors = {name: tensor.to_json() for name, tensor in self.tensors.items()}
            record |= {"header_sha256": self.header_sha256, "tensors": tensors}
        return record


@dataclass(frozen=True)
class LogPosition:
    """How many lines a run's log has, and the chain field of the last one (see storage/run_log.py)."""

    lines: int = 0
    head: str = EMPTY_CHAIN


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the folder's kind and files. log: position in a run's log at a checkpoint."""

    kind: str
    files: Mapping[str, FileRecord]
    log: LogPosition | None = None

    def encode(self) -> bytes:
        """Return the manifest as JSON: keys sorted, with the SHA-256 of the JSON without that key."""
        body: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "files": {name: record.to_json() for name, record in self.files.items()},
        }
        if self.log is not None:
            body["log"] = vars(self.log)
        text = _text(body)
        before, last_key, after = text.partition(b'\n "version": ')
        return before + _hash_line(hashlib.sha256(text).hexdigest()) + last_key + after


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode("ascii")


def _hash_line(sha256: object) -> bytes:
    """The line of a manifest's own hash, which stands before its version. No line within the files begins like it."""
    return f'\n "sha256": {json.dumps(sha256)},'.encode("ascii")


def is_file_name(name: str) -> bool:
    """Whether a file of a folder may have this name: plain characters, not hidden, not the manifest."""
    return NAME_PATTERN.fullmatch(name) is not None and not name.startswith(".") and name != MANIFEST_FILE


def parse_json_object(raw: bytes, infinity: Any = None) -> dict[str, Any]:
    """Parse a JSON object (UTF-8). Raises ValueError for anything else, including duplicate keys and NaN.

    infinity: replaces the word Infinity; None: it is also refused.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("it has a duplicate key")
        return result

    def refuse(constant: str) -> Any:
        if infinity is not None and constant == "Infinity":
            return infinity
        raise ValueError(f"{constant} is not a JSON number")

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(parse_error_reason(error)) from None
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def _is_design(config: Path) -> bool:
    """Whether a config.json is a design, and not a config of transformers."""
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads(config.read_bytes()) if config.is_file() else None
        return isinstance(data, dict) and "layers" in data and "model_type" not in data
    return False


def read_manifest(folder: Path, flags: int = READ_FLAGS) -> Manifest:
    """Read and check a folder's manifest. Raises CheckpointError, naming the defect.

    Unknown fields are accepted, because later versions of heddle only add fields.
    """
    path = folder / MANIFEST_FILE
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: {no_folder_reason(folder)}; name a folder that heddle saved")
    if not os.path.lexists(path):
        if _is_design(config := folder / "config.json"):
            raise CheckpointError(f"{path}: is missing; restore it, or name an earlier checkpoint")
        remedy = "name another folder, or import this one"
        if config.is_file():
            remedy += f" (`heddle import {folder} NAME`, or in Python heddle.exchange.transformers.load)"
        raise CheckpointError(f"{folder}: has no {MANIFEST_FILE}, so heddle did not save it; {remedy}")
    with open_regular_file(path, flags) as (descriptor, size):
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path}: is larger than {MAX_MANIFEST_BYTES} bytes, so it is not a manifest of heddle"
            )
        raw = bytearray(size)
        read_exactly(descriptor, memoryview(raw), path)
    try:
        content = parse_json_object(bytes(raw))
        if content.get("format") != FORMAT_NAME:
            raise ValueError("it was not written by heddle")
        _check_version(folder, content.get("version"))
        sha256 = content.get("sha256")
        without = raw.replace(_hash_line(sha256), b"", 1)
        if sha256 != hashlib.sha256(without).hexdigest() or _text(content) != raw:
            raise ValueError("it was altered")
        return _from_json(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not a valid manifest ({error}); restore the file or use another checkpoint"
        ) from error


def _check_version(folder: Path, version: Any) -> None:
    if type(version) is not int:
        raise ValueError("its version is not a whole number")
    if version < FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: was saved in format {version}, and this heddle reads only format {FORMAT_VERSION};"
            " train or save it again, or read it with the release that wrote it"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: was saved in format {version} by a newer heddle, and this one reads only format"
            f" {FORMAT_VERSION}; install the newer release"
        )


def _from_json(content: dict[str, Any]) -> Manifest:
    kind, files = content.get("kind"), content.get("files")
    if not isinstance(kind, str) or NAME_PATTERN.fullmatch(kind) is None or not isinstance(files, dict):
        raise ValueError("its kind or list of files is malformed")
    records = {}
    for name, record in files.items():
        if not is_file_name(name) or not isinstance(record, dict):
            raise ValueError("a file name is not allowed")
        records[name] = parse_file_record(name, record)
    log = content.get("log")
    return Manifest(kind, records, None if log is None else _log_position(log))


def _log_position(log: Any) -> LogPosition:
    lines, head = (log.get("lines"), log.get("head")) if isinstance(log, dict) else (None, None)
    if not _is_count(lines) or not isinstance(head, str) or CHAIN_PATTERN.fullmatch(head) is None:
        raise ValueError("its log has no count of lines and no head of 16 hexadecimal digits")
    return LogPosition(lines, head)


def parse_file_record(name: str, record: dict[str, Any]) -> FileRecord:
    """Return a file's entry, as `FileRecord.to_json` wrote it. Raises ValueError."""
    tensors = record.get("tensors")
    if (tensors is None) == name.endswith(".safetensors"):
        raise ValueError(f"its entry for {name} must list tensors if, and only if, it is a tensor file")
    if not _is_count(record.get("size")):
        raise ValueError(f"the size of {name} is not a whole number")
    hashes = [record.get("sha256")]
    if tensors is not None:
        if not isinstance(tensors, dict) or len(tensors) > MAX_TENSORS:
            raise ValueError(f"its entry for {name} lists no tensors, or too many")
        if not all(NAME_PATTERN.fullmatch(tensor) for tensor in tensors):
            raise ValueError(f"a tensor's name in its entry for {name} is not allowed")
        hashes.append(record.get("header_sha256"))
        tensors = {tensor: _tensor_record(tensor, fields) for tensor, fields in tensors.items()}
    if not all(map(_is_sha256, hashes)):
        raise ValueError(f"a SHA-256 in its entry for {name} is malformed")
    return FileRecord(record["size"], record["sha256"], record.get("header_sha256"), tensors)


def _tensor_record(name: str, fields: Any) -> TensorRecord:
    """Check one tensor's fields. The file's header later checks its dtype, and that its blocks cover it."""
    expected = ("dtype", "shape", "row_block", "sha256", "blocks")
    dtype, shape, row_block, sha256, blocks = (
        (fields.get(key) for key in expected) if isinstance(fields, dict) else (None,) * 5
    )
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the type or the shape of tensor {name} is malformed")
    if not all(_is_count(side) and side < 2**62 for side in shape):
        raise ValueError(f"the type or the shape of tensor {name} is malformed")
    if not _is_count(row_block) or row_block < 1:
        raise ValueError(f"the row_block of tensor {name} is not a whole number of at least 1")
    if not isinstance(blocks, list) or not all(map(_is_sha256, blocks)) or sha256 != combined_sha256(blocks):
        raise ValueError(f"the SHA-256 of tensor {name} does not match its blocks")
    record = TensorRecord(dtype, tuple(shape), row_block, tuple(blocks))
    if "row_offset" not in fields and "total_rows" not in fields:
        return record
    offset, total = fields.get("row_offset"), fields.get("total_rows")
    if not _is_count(offset) or not _is_count(total) or not shape or not 0 < shape[0] <= total - offset < 2**62:
        raise ValueError(f"the rows of the slice of tensor {name} are malformed")
    return replace(record, row_offset=offset, total_rows=total)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and SHA256_PATTERN.fullmatch(value) is not None
