"""manifest.json: the size and SHA-256 of every file and tensor of a folder, and a SHA-256 of the manifest itself."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError
from heddle.storage.file_io import READ_FLAGS, open_regular_file, read_exactly

MANIFEST_FILE = "manifest.json"
FORMAT_NAME = "heddle"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_TENSORS = 100_000
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,200}")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file. Tensor files also have `header_sha256` and `tensors` (name to SHA-256 of its bytes)."""

    size: int
    sha256: str
    header_sha256: str | None = None
    tensors: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"size": self.size, "sha256": self.sha256}
        if self.tensors is not None:
            record |= {"header_sha256": self.header_sha256, "tensors": dict(self.tensors)}
        return record


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the folder's kind and its files."""

    kind: str
    files: Mapping[str, FileRecord]

    def encode(self) -> bytes:
        """Return the manifest as JSON: keys sorted, with the SHA-256 of the JSON without that key."""
        body = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "kind": self.kind,
            "files": {name: record.to_json() for name, record in self.files.items()},
        }
        return _text(body | {"sha256": hashlib.sha256(_text(body)).hexdigest()})


def _text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode("ascii")


def is_file_name(name: str) -> bool:
    """Whether a file of a folder may have this name: plain characters, not hidden, not the manifest."""
    return NAME_PATTERN.fullmatch(name) is not None and not name.startswith(".") and name != MANIFEST_FILE


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object (UTF-8). Raises ValueError for anything else, also for duplicate keys and NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content


def read_manifest(folder: Path, flags: int = READ_FLAGS) -> Manifest:
    """Read and check a folder's manifest. Raises CheckpointError that says what is wrong with it."""
    path = folder / MANIFEST_FILE
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: there is no such folder; name a folder that heddle saved")
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{folder}: has no {MANIFEST_FILE}, so heddle did not save it; name another folder, or import this one"
        )
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
        if content.get("version") != FORMAT_VERSION:
            raise ValueError(f"it has version {content.get('version')!r}, and this heddle reads {FORMAT_VERSION}")
        manifest = _from_json(content)
        if manifest.encode() != raw:
            raise ValueError("it was altered")
    except ValueError as error:
        raise CheckpointError(
            f"{path}: is not a valid manifest ({error}); restore the file or use another checkpoint"
        ) from error
    return manifest


def _from_json(content: dict[str, Any]) -> Manifest:
    if set(content) != {"format", "version", "kind", "files", "sha256"} or type(content["version"]) is not int:
        raise ValueError("its fields are not format, version, kind, files and sha256")
    kind, files = content["kind"], content["files"]
    if not isinstance(kind, str) or NAME_PATTERN.fullmatch(kind) is None or not isinstance(files, dict):
        raise ValueError("its kind or its list of files is malformed")
    records = {}
    for name, record in files.items():
        if not is_file_name(name) or not isinstance(record, dict):
            raise ValueError("the name of a file is not allowed")
        records[name] = _record(name, record)
    return Manifest(kind, records)


def _record(name: str, record: dict[str, Any]) -> FileRecord:
    tensors = record.get("tensors")
    expected = {"size", "sha256"} if tensors is None else {"size", "sha256", "header_sha256", "tensors"}
    if set(record) != expected or (tensors is None) == name.endswith(".safetensors"):
        raise ValueError(f"its entry for {name} has the wrong fields")
    hashes = [record["sha256"]]
    if tensors is not None:
        if not isinstance(tensors, dict) or len(tensors) > MAX_TENSORS:
            raise ValueError(f"its entry for {name} lists no tensors, or too many")
        if not all(NAME_PATTERN.fullmatch(tensor) for tensor in tensors):
            raise ValueError(f"a tensor's name in its entry for {name} is not allowed")
        hashes += [record["header_sha256"], *tensors.values()]
    if type(record["size"]) is not int or record["size"] < 0:
        raise ValueError(f"the size of {name} is not a whole number")
    if not all(isinstance(value, str) and SHA256_PATTERN.fullmatch(value) for value in hashes):
        raise ValueError(f"a SHA-256 in its entry for {name} is malformed")
    return FileRecord(record["size"], record["sha256"], record.get("header_sha256"), tensors)
