"""Token files: a header, token ids and document offsets, written as a stream and read through memory mapping.

Layout, little-endian: 4096 bytes of header (the line `heddle-tokens`, then JSON, padded with spaces), the
ids as uint16 (a vocabulary up to 65,536) or uint32, zeros up to a multiple of 8, then the offset of each
document as uint64.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from heddle.data.cache import replacing
from heddle.errors import DataError

MAGIC = b"heddle-tokens\n"
VERSION = 1
HEADER_BYTES = 4096
_BLOCK_BYTES = 8 * 1024 * 1024
_COUNTS = ("vocabulary", "end", "tokens", "documents", "bytes")


class TokenWriter:
    """Receives documents one by one; see `write_token_file`."""

    def __init__(self, file: BinaryIO, vocabulary: int, end: int) -> None:
        self._file = file
        self._type = np.dtype("<u2" if vocabulary <= 65536 else "<u4")
        self._vocabulary, self._end = vocabulary, end
        self._check = hashlib.sha256()
        self._offsets = array("Q")
        self._parts: list[int] = []
        self.tokens = 0
        self.bytes = 0
        file.write(b"\0" * HEADER_BYTES)

    def add(self, documents: Sequence[Sequence[int]], text_bytes: int) -> None:
        """Append documents, each opened by the end token; `text_bytes` is the UTF-8 they stand for."""
        ids: list[int] = []
        for document in documents:
            self._offsets.append(self.tokens + len(ids))
            ids.append(self._end)
            ids.extend(document)
        tokens = np.array(ids, dtype=np.int64)
        assert tokens.size == 0 or tokens.max() < self._vocabulary
        self._write(tokens.astype(self._type).tobytes())
        self.tokens += len(ids)
        self.bytes += text_bytes

    def end_part(self) -> None:
        """Note that what follows comes from the next source."""
        self._parts.append(self.tokens - sum(self._parts))

    def close(self, tokenizer: str) -> None:
        """Write the offsets and the header."""
        self._write(b"\0" * _padding(self.tokens * self._type.itemsize))
        self._write(np.array(self._offsets, dtype="<u8").tobytes())
        header = {
            "version": VERSION,
            "dtype": self._type.name,
            "vocabulary": self._vocabulary,
            "end": self._end,
            "tokenizer": tokenizer,
            "tokens": self.tokens,
            "documents": len(self._offsets),
            "bytes": self.bytes,
            "parts": self._parts,
        }
        self._check.update(_plain(header))
        text = MAGIC + _plain(header | {"sha256": self._check.hexdigest()})
        assert len(text) < HEADER_BYTES
        self._file.seek(0)
        self._file.write(text.ljust(HEADER_BYTES - 1) + b"\n")

    def _write(self, data: bytes) -> None:
        self._check.update(data)
        self._file.write(data)


@contextlib.contextmanager
def write_token_file(path: Path, *, vocabulary: int, end: int, tokenizer: str) -> Iterator[TokenWriter]:
    """Write a token file; it takes the name `path` only when the block ends well.

    `tokenizer` is the tokenizer's hash. Raises MachineError where the disk is full or the folder read-only.
    """
    with replacing(path) as file:
        writer = TokenWriter(file, vocabulary, end)
        yield writer
        writer.close(tokenizer)


class TokenFile:
    """A token file opened for reading: ids stay on the disk until a range of them is asked for.

    `len(file)` is the number of tokens; `vocabulary`, `end`, `documents`, `bytes` (of text), `tokenizer`
    (hash) and `parts` (tokens of each source in a file of several) are the header's.
    """

    def __init__(self, path: Path) -> None:
        """Open and check every byte against the header. Raises DataError, naming the file."""
        self.path = path
        header = self._header()
        self.vocabulary, self.end = int(header["vocabulary"]), int(header["end"])
        self.documents, self.bytes = int(header["documents"]), int(header["bytes"])
        self.tokenizer = str(header["tokenizer"])
        self.parts = tuple(int(part) for part in header["parts"])
        self.dtype = np.dtype(header["dtype"]).newbyteorder("<")
        self._length = int(header["tokens"])
        size = self._length * self.dtype.itemsize
        start = HEADER_BYTES + size + _padding(size)
        if path.stat().st_size != start + 8 * self.documents or self._content_hash(header) != header["sha256"]:
            raise DataError(f"token file {path} is truncated or damaged: delete it, and it is made again.")
        self._tokens = self._map(self.dtype, HEADER_BYTES, self._length)
        self.offsets = self._map(np.dtype("<u8"), start, self.documents)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` as int64 [stop - start]. Raises IndexError outside the file."""
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"tokens {start} to {stop} of {self._length}")
        return self._tokens[start:stop].astype(np.int64)

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, its end token first, int64 [n]. Raises IndexError."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        stop = int(self.offsets[index + 1]) if index + 1 < self.documents else self._length
        return self.read(int(self.offsets[index]), stop)

    def _map(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        if count == 0:  # an empty range cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    def _header(self) -> dict[str, Any]:
        foreign = DataError(f"{self.path} is not a heddle token file of version {VERSION}: delete or move it.")
        try:
            with open(self.path, "rb") as file:
                text = file.read(HEADER_BYTES)
        except OSError as error:
            raise DataError(f"token file {self.path} cannot be read ({error.strerror}): delete it.") from error
        if not text.startswith(MAGIC) or len(text) != HEADER_BYTES:
            raise foreign
        try:
            header = json.loads(text[len(MAGIC) :].decode())
        except (ValueError, RecursionError) as error:
            raise foreign from error
        if not _is_valid(header):
            raise foreign
        return header

    def _content_hash(self, header: dict[str, Any]) -> str:
        check = hashlib.sha256()
        with open(self.path, "rb") as file:
            file.seek(HEADER_BYTES)
            while block := file.read(_BLOCK_BYTES):
                check.update(block)
        check.update(_plain({name: value for name, value in header.items() if name != "sha256"}))
        return check.hexdigest()


def _plain(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def _padding(size: int) -> int:
    return -size % 8


def _is_valid(header: Any) -> bool:
    if not isinstance(header, dict) or header.get("version") != VERSION:
        return False
    if header.get("dtype") not in ("uint16", "uint32") or not isinstance(header.get("parts"), list):
        return False
    counts = [header.get(name) for name in _COUNTS] + header["parts"]
    if not all(type(count) is int and 0 <= count < 2**48 for count in counts):
        return False
    return header["end"] < header["vocabulary"] and all(isinstance(header.get(k), str) for k in ("tokenizer", "sha256"))
