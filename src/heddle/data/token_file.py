"""Token files: a header, token ids and document offsets, written as a stream and read by memory mapping.

Layout, little-endian: a header of 4096 bytes (the line `heddle-tokens`, then JSON, padded with spaces), the ids as
uint16 (for a vocabulary up to 65,536) or uint32, zeros up to a multiple of 8, then the offset of each document as
uint64.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from heddle.data.cache import CACHE_REMEDY
from heddle.errors import DataError, describe_path
from heddle.progress import printable
from heddle.storage.file_io import hash_rest, replace_file

MAGIC = b"heddle-tokens\n"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
_COUNT_FIELDS = ("vocabulary", "end", "tokens", "documents", "bytes")


class TokenFileWriter:
    """Writes documents to a token file; see `write_token_file`."""

    def __init__(self, file: BinaryIO, vocab_size: int, eod_id: int) -> None:
        self._file = file
        self._dtype = np.dtype("<u2" if vocab_size <= 65536 else "<u4")
        self._vocab_size, self._eod_id = vocab_size, eod_id
        self._hasher = hashlib.sha256()
        self._offsets = array("Q")
        self._source_token_counts: list[int] = []
        self.token_count = 0
        self.text_bytes = 0
        file.write(b"\0" * HEADER_BYTES)

    def add(self, documents: Sequence[ArrayLike], text_bytes: int) -> None:
        """Append documents of ids [n], each after an end-of-document token; `text_bytes`: their size in UTF-8."""
        for document in documents:
            tokens = np.asarray(document, dtype=np.int64)
            assert tokens.size == 0 or tokens.max() < self._vocab_size
            self._offsets.append(self.token_count)
            self._write(np.concatenate([[self._eod_id], tokens]).astype(self._dtype).tobytes())
            self.token_count += len(tokens) + 1
        self.text_bytes += text_bytes

    def end_source(self) -> None:
        """Mark the end of a source: the next documents come from the next source."""
        self._source_token_counts.append(self.token_count - sum(self._source_token_counts))

    def close(self, tokenizer_hash: str, name: str) -> None:
        """Write the offsets and the header. name: the file's, which identifies the text."""
        self._write(b"\0" * _padding(self.token_count * self._dtype.itemsize))
        self._write(np.array(self._offsets, dtype="<u8").tobytes())
        header = {
            "version": FORMAT_VERSION,
            "dtype": self._dtype.name,
            "vocabulary": self._vocab_size,
            "end": self._eod_id,
            "tokenizer": tokenizer_hash,
            "tokens": self.token_count,
            "documents": len(self._offsets),
            "bytes": self.text_bytes,
            "parts": self._source_token_counts,
            "name": name,
        }
        self._hasher.update(_header_json(header))
        text = _header_text(header | {"sha256": self._hasher.hexdigest()})
        assert len(text) == HEADER_BYTES
        self._file.seek(0)
        self._file.write(text)

    def _write(self, data: bytes) -> None:
        self._hasher.update(data)
        self._file.write(data)


@contextlib.contextmanager
def write_token_file(path: Path, *, vocab_size: int, eod_id: int, tokenizer_hash: str) -> Iterator[TokenFileWriter]:
    """Write a token file; the file appears at `path` only when the block ends without an exception.

    Raises MachineError if the disk is full or the folder is read-only.
    """
    with replace_file(path, CACHE_REMEDY) as temporary, temporary.open("xb") as file:
        writer = TokenFileWriter(file, vocab_size, eod_id)
        yield writer
        writer.close(tokenizer_hash, path.name)


class TokenFile:
    """A token file opened for reading, memory-mapped. `len(file)` is the number of tokens.

    From the header: `vocab_size`, `eod_id`, `document_count`, `text_bytes` (bytes of UTF-8 text), `tokenizer_hash`, and
    `source_token_counts` (tokens of each source, in a file of several).
    """

    def __init__(self, path: Path) -> None:
        """Open the file and check every byte against the header's hash. Raises DataError, naming the file."""
        self.path = path
        header = self._header()
        self.vocab_size, self.eod_id = int(header["vocabulary"]), int(header["end"])
        self.document_count, self.text_bytes = int(header["documents"]), int(header["bytes"])
        self.tokenizer_hash = str(header["tokenizer"])
        self.source_token_counts = tuple(int(part) for part in header["parts"])
        self.dtype = np.dtype(header["dtype"]).newbyteorder("<")
        self._length = int(header["tokens"])
        size = self._length * self.dtype.itemsize
        start = HEADER_BYTES + size + _padding(size)
        if path.stat().st_size != start + 8 * self.document_count or self._content_hash(header) != header["sha256"]:
            raise DataError(f"token file {path} is truncated or damaged: delete it, and it will be made again.")
        if header.get("name", path.name) != path.name:  # files of earlier versions have no name
            raise DataError(
                f"token file {path} was written as {printable(str(header['name']))}, which is another text: delete it, "
                "and it will be made again."
            )
        self._tokens = self._map(self.dtype, HEADER_BYTES, self._length)
        self.offsets = self._map(np.dtype("<u8"), start, self.document_count)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop` as int64 [stop - start]. Raises IndexError outside the file."""
        if not 0 <= start <= stop <= self._length:
            raise IndexError(f"tokens {start} to {stop} of {self._length}")
        return self._tokens[start:stop].astype(np.int64)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, int64 [n], the end-of-document token first. Raises IndexError."""
        if not 0 <= index < self.document_count:
            raise IndexError(f"document {index} of {self.document_count}")
        stop = int(self.offsets[index + 1]) if index + 1 < self.document_count else self._length
        return self.read(int(self.offsets[index]), stop)

    def select(self, spans: Sequence[tuple[int, int]], byte_lengths: np.ndarray) -> TokenFile:
        """Return the spans (start, stop) as a file in memory. Each is a document, and begins with the end token.

        byte_lengths: int [vocab], the bytes of each token. The result has no `source_token_counts`.
        """
        parts = [self._tokens[start:stop] for start, stop in spans]
        end = np.array([self.eod_id], dtype=self.dtype)
        parts = [part if len(part) and part[0] == self.eod_id else np.concatenate([end, part]) for part in parts]
        result = copy.copy(self)
        result._tokens = np.concatenate([end[:0], *parts])
        result._length = len(result._tokens)
        result.offsets = np.flatnonzero(result._tokens == self.eod_id).astype("<u8")
        result.document_count, result.source_token_counts = len(result.offsets), ()
        result.text_bytes = int(np.maximum(byte_lengths[result._tokens], 0).sum())
        return result

    def _map(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        if count == 0:  # an empty range cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    def _header(self) -> dict[str, Any]:
        invalid = DataError(f"{self.path} is not a heddle token file of version {FORMAT_VERSION}: delete or move it.")
        what = describe_path(self.path)
        if what not in ("is a file", "does not exist"):
            raise DataError(f"token file {self.path} {what}: delete or move it.")
        try:
            with open(self.path, "rb") as file:
                text = file.read(HEADER_BYTES)
        except OSError as error:
            raise DataError(f"token file {self.path} cannot be read ({error.strerror}): delete it.") from error
        if not text.startswith(MAGIC) or len(text) != HEADER_BYTES:
            raise invalid
        try:
            header: dict[str, Any] = json.loads(text[len(MAGIC) :].decode())
        except (ValueError, RecursionError) as error:
            raise invalid from error
        if not _is_valid_header(header) or _header_text(header) != text:
            raise invalid
        return header

    def _content_hash(self, header: dict[str, Any]) -> str:
        hasher = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            file.seek(HEADER_BYTES)
            hash_rest(file.fileno(), hasher)
        hasher.update(_header_json({name: value for name, value in header.items() if name != "sha256"}))
        return hasher.hexdigest()


def _header_json(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode()


def _header_text(header: dict[str, Any]) -> bytes:
    return (MAGIC + _header_json(header)).ljust(HEADER_BYTES - 1) + b"\n"


def _padding(size: int) -> int:
    return -size % 8


def _is_valid_header(header: Any) -> bool:
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        return False
    if header.get("dtype") not in ("uint16", "uint32") or not isinstance(header.get("parts"), list):
        return False
    counts = [header.get(name) for name in _COUNT_FIELDS] + header["parts"]
    if not all(type(count) is int and 0 <= count < 2**48 for count in counts):
        return False
    return header["end"] < header["vocabulary"] and all(isinstance(header.get(k), str) for k in ("tokenizer", "sha256"))


# The held-out text is split into two parts: one for tuning, one for the final scores.


_MAX_PIECES = 64
_PIECE_WINDOWS = 4  # a piece has at least this many sequence lengths
_PIECES_PER_TUNING_PIECE = 4  # every fourth piece is for tuning
MAX_TUNING_TOKENS, MAX_FINAL_TOKENS = 2**14, 2**16


def split_held_out(text: TokenFile, sequence_length: int, byte_lengths: np.ndarray) -> tuple[TokenFile, TokenFile]:
    """Return (text for tuning, text for the final scores); no token is in both.

    The text is cut into pieces of about equal length, if possible where a document begins; every fourth is for tuning.
    Of a long text, only the beginning of each piece is used. Equal arguments give equal parts.
    byte_lengths: int [vocab], the bytes of each token. Raises DataError for a text that is too short.
    """
    pieces = min(_MAX_PIECES, len(text) // (_PIECE_WINDOWS * sequence_length))
    if pieces < _PIECES_PER_TUNING_PIECE:
        needed = _PIECES_PER_TUNING_PIECE * _PIECE_WINDOWS * sequence_length
        raise DataError(
            f"the held-out text has {len(text)} tokens, and tuning needs {needed} at sequence_length "
            f"{sequence_length}: give more text, or a shorter sequence_length"
        )
    even = [len(text) * piece // pieces for piece in range(pieces + 1)]
    ends = [0, *(_at_document(text, end, len(text) // pieces // 2) for end in even[1:-1]), len(text)]
    spans = list(pairwise(ends))
    is_tuning = [piece % _PIECES_PER_TUNING_PIECE == 1 for piece in range(pieces)]
    parts = []
    for part, limit in ((True, MAX_TUNING_TOKENS), (False, MAX_FINAL_TOKENS)):
        chosen = [span for span, tuning in zip(spans, is_tuning, strict=True) if tuning == part]
        longest = limit // len(chosen) - 1  # an end token may be added
        shortened = [(start, min(stop, start + longest)) for start, stop in chosen]
        parts.append(text.select(shortened, byte_lengths))
    return parts[0], parts[1]


def _at_document(text: TokenFile, position: int, distance: int) -> int:
    """Return the nearest start of a document within a distance of the position; else the position itself."""
    index = int(np.searchsorted(text.offsets, position))
    near = [int(offset) for offset in text.offsets[max(0, index - 1) : index + 1]]
    nearest = min(near, key=lambda offset: abs(offset - position), default=position)
    return nearest if abs(nearest - position) < distance else position
