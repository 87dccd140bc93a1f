"""JSON files that heddle reads again: each holds the SHA-256 of its own content and is verified on every read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError, parse_error_reason
from heddle.storage import file_io
from heddle.storage.atomic import write_file

HASH_KEY = "sha256"
MAX_JSON_BYTES = 256 * 2**20


def write_json_file(path: Path, content: Mapping[str, Any], remedy: str | None = None) -> None:
    """Write plain values as a JSON object with the SHA-256 of its content, whole or not at all. Raises MachineError."""
    plain = json.loads(json.dumps(content))  # as it will be read: lists for tuples, texts for keys
    write_file(path, _text(plain | {HASH_KEY: content_sha256(plain)}), remedy)


def read_json_file(path: Path) -> dict[str, Any]:
    """Read what `write_json_file` wrote, without its SHA-256.

    Raises CheckpointError if the file is missing, or if one byte is not as it was written.
    """
    with file_io.open_regular_file(path) as (descriptor, size):
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes; choose another folder")
        raw = bytearray(size)
        file_io.read_exactly(descriptor, memoryview(raw), path)
    try:
        content: dict[str, Any] = json.loads(raw.decode("utf-8"))
        saved_sha256 = content.get(HASH_KEY) if isinstance(content, dict) else None
        if isinstance(content, dict) and saved_sha256 is None:
            raise CheckpointError(
                f"{path}: has no {HASH_KEY}, so heddle did not write it or wrote it in format 1;"
                " choose another folder, or use the release that wrote it"
            )
        if saved_sha256 is None or _text(content).encode("ascii") != raw:
            raise ValueError("its text is not as heddle writes it")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: was altered ({parse_error_reason(error)}); restore the file or choose another folder"
        ) from error
    del content[HASH_KEY]
    if content_sha256(content) != saved_sha256:
        raise CheckpointError(
            f"{path}: was altered (its SHA-256 differs from its content); restore the file or choose another folder"
        )
    return content


def content_sha256(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object written without spaces, keys sorted, as ASCII."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
