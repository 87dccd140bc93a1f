"""Read a file as documents: strict UTF-8, split at blank lines, with only a block of the file in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from heddle.data.compressed import UnreadableError, open_text, text_suffix

# A document is at most this many bytes of UTF-8.
MAX_DOCUMENT_BYTES = 64 * 1024
# One line of a .jsonl file is parsed whole, so it is bounded.
MAX_JSON_LINE_BYTES = 16 * 1024 * 1024

_WARC_SUFFIXES = (".warc", ".wet")  # their headers would be read as text
_BLOCK_BYTES = 1024 * 1024
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
