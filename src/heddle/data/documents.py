"""Read a file as documents: strict UTF-8, split at blank lines, with only a block of the file in memory."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from heddle.errors import describe_path, pip_install
from heddle.progress import printable

# Text files that may be compressed with gzip or zstd: read as a stream, and refused where they grow without bound.


COMPRESSED_SUFFIXES = (".gz", ".zst")
# What decompresses to more than this many bytes may be at most so many times as large as its compressed bytes.
MAX_BYTES_OF_ANY_RATIO = 64 * 1024 * 1024
MAX_RATIO = 100
_BLOCK_BYTES = 1024 * 1024


class UnreadableError(Exception):
    """Why a file cannot be used. The text completes a sentence that begins with the file's name."""


def text_suffix(path: Path) -> str:
    """The suffix of a file's content in lower case: `.jsonl` for a.jsonl.gz; `` for a.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its text, decompressed if its name ends in `.gz` or `.zst`.

    Raises UnreadableError, while it is read too: for what is no file, a damaged one, or one that grows without bound.
    """
    check_is_file(path)
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            if suffix not in COMPRESSED_SUFFIXES:
                yield file
                return
            stream = gzip.GzipFile(fileobj=file) if suffix == ".gz" else _zstd_stream(file)
            yield io.BufferedReader(_Decompressed(stream, file), _BLOCK_BYTES)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror or error}): make it readable") from error


def check_is_file(path: Path) -> None:
    """Raise UnreadableError for a pipe, a device or anything else that is no file: reading it might wait for ever."""
    what = describe_path(path)
    if what != "is a file":
        raise UnreadableError(f"{what}: give a file")


def import_pyarrow() -> Any:
    """The library that reads zstd, Parquet and Arrow. Raises UnreadableError where it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UnreadableError(f"needs pyarrow to be read: {pip_install('data')}") from error
    return pyarrow


class _Decompressed(io.RawIOBase):
    """The bytes of a decompressing stream over `file`, bounded by the compressed bytes that were read."""

    def __init__(self, stream: Any, file: BinaryIO) -> None:
        self._stream, self._file, self._count = stream, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data: bytes = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            reason = printable(str(error))[:120]
            raise UnreadableError(f"cannot be decompressed ({reason}): compress it again") from error
        self._count += len(data)
        if self._count > max(MAX_BYTES_OF_ANY_RATIO, MAX_RATIO * self._file.tell()):
            raise UnreadableError(
                f"decompresses to more than {MAX_RATIO} times its size: decompress it yourself if that is right"
            )
        buffer[: len(data)] = data
        return len(data)


def _zstd_stream(file: BinaryIO) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


# A document is at most this many bytes of UTF-8.
MAX_DOCUMENT_BYTES = 64 * 1024
# One line of a .jsonl file is parsed whole, so it is bounded.
MAX_JSON_LINE_BYTES = 16 * 1024 * 1024

_WARC_SUFFIXES = (".warc", ".wet")  # their headers would be read as text
_BINARY_CHECK_BYTES = 8192
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TO_LAST_BLANK_LINE = re.compile(rb".*\n[ \t\r]*\n", re.DOTALL)


def read_documents(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the documents of one file, in order; from a `.jsonl` file, the `field` of each line.

    The name of a compressed file goes on with `.gz` or `.zst`. A WARC file is refused.

    A file of at most 64 KB is one document. A longer file is split into documents of at most 64 KB: after the last
    blank line that fits, else the last line end, else the last space, else between two characters. Joined, the
    documents are the exact text of the file, without a byte order mark and without documents of white space alone.
    Raises UnreadableError.
    """
    suffix = text_suffix(path)
    if suffix in _WARC_SUFFIXES:
        raise UnreadableError("is a WARC file: write the text of its records to a .jsonl file, with warcio for example")
    with open_text(path) as file:
        if suffix == ".jsonl":
            yield from _json_documents(file, field)
        else:
            yield from _text_documents(file)


def split_documents(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split a stream of bytes into pieces of 1 to 65,536 bytes, where `read_documents` says."""
    buffer = b""
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > MAX_DOCUMENT_BYTES:
            end = start + _cut_point(buffer[start : start + MAX_DOCUMENT_BYTES + 1])
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut_point(window: bytes) -> int:
    """Where to end the document at the start of `window`, which is one byte longer than a document may be."""
    head = window[:-1]
    blank_line = _TO_LAST_BLANK_LINE.match(head)
    if blank_line is not None:
        return blank_line.end()
    for boundary in (b"\n", b" "):
        position = head.rfind(boundary)
        if position >= 0:
            return position + 1
    end = len(head)
    # A byte 10xxxxxx continues a UTF-8 character; a character has at most three of them.
    for back in range(4):
        if window[end - back] & 0xC0 != 0x80:
            return end - back
    return end


def _text_documents(file: BinaryIO) -> Iterator[str]:
    first = file.read(_BLOCK_BYTES)
    null_offset = first.find(b"\0", 0, _BINARY_CHECK_BYTES)
    if null_offset >= 0:
        raise UnreadableError(f"looks binary (byte 0 at offset {null_offset}): give UTF-8 text")
    offset = len(_BYTE_ORDER_MARK) if first.startswith(_BYTE_ORDER_MARK) else 0

    def blocks() -> Iterator[bytes]:
        yield first[offset:]
        while block := file.read(_BLOCK_BYTES):
            yield block

    position = offset
    for piece in split_documents(blocks()):
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableError(
                f"is not UTF-8 (byte 0x{piece[error.start]:02x} at offset {position + error.start}): "
                "convert it to UTF-8"
            ) from error
        position += len(piece)
        if not text.isspace():
            yield text


def documents_from_bytes(data: bytes) -> Iterator[str]:
    """Split one UTF-8 text into documents; pieces of white space alone are dropped."""
    for piece in split_documents([data]):
        text = piece.decode("utf-8")
        if not text.isspace():
            yield text


def read_json_lines(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the parsed JSON of each line that is not blank. Raises UnreadableError."""
    number = 0
    while line := file.readline(MAX_JSON_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_JSON_LINE_BYTES:
            raise UnreadableError(
                f"has more than {MAX_JSON_LINE_BYTES // 2**20} MB on line {number}: split that record"
            )
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.isspace():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"has no valid UTF-8 JSON on line {number}: give one object per line") from error
        yield number, record


def _json_documents(file: BinaryIO, field: str) -> Iterator[str]:
    for number, record in read_json_lines(file):
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UnreadableError(f'has no string "{field}" on line {number}: give one object with "{field}" per line')
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnreadableError(
                f'has half a surrogate pair in "{field}" on line {number}: repair that record'
            ) from error
        yield from documents_from_bytes(data)
