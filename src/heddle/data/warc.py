"""WARC files (ISO 28500): the records of plain text, as in the WET files of Common Crawl; a record is a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from heddle.data.compressed import UnreadableError

WARC_SUFFIXES = (".warc", ".wet")
MAX_RECORD_BYTES = 16 * 1024 * 1024  # of text: it is decoded whole
_MAX_HEADER_BYTES = 64 * 1024
_BLOCK_BYTES = 1024 * 1024
_TEXT_TYPES = ("conversion", "resource")


def read_warc_texts(file: BinaryIO) -> Iterator[bytes]:
    """Yield the UTF-8 of each record of plain text (`conversion` and `resource` records of text/plain).

    Raises UnreadableError for what is no WARC file, a file that is cut short, and one without such a record.
    """
    number = texts = 0
    while (header := _read_header(file, number + 1)) is not None:
        number += 1
        size_text = header.get("content-length", "")
        if not size_text.isascii() or not size_text.isdecimal() or len(size_text) > 15:
            raise UnreadableError(f"has no size of record {number}: write the file again")
        size = int(size_text)
        is_text = header.get("warc-type") in _TEXT_TYPES and header.get("content-type", "").startswith("text/plain")
        if is_text and size > MAX_RECORD_BYTES:
            raise UnreadableError(f"has more than {MAX_RECORD_BYTES // 2**20} MB in record {number}: split that record")
        blocks: list[bytes] = []
        while size:
            block = file.read(min(size, _BLOCK_BYTES))
            if not block:
                raise UnreadableError(f"is cut short in record {number}: copy it again")
            size -= len(block)
            if is_text:
                blocks.append(block)
        if is_text:
            texts += 1
            text = b"".join(blocks)
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UnreadableError(f"is not UTF-8 in record {number}: convert it to UTF-8") from error
            yield text
    if number and not texts:
        raise UnreadableError("holds no record of plain text: give the WET files, which hold the text of pages")


def _read_header(file: BinaryIO, number: int) -> dict[str, str] | None:
    """The fields of the next record, names in lower case; None at the end of the file."""
    line = file.readline(_MAX_HEADER_BYTES)
    while line and line.isspace():
        line = file.readline(_MAX_HEADER_BYTES)
    if not line:
        return None
    if not line.startswith(b"WARC/"):
        raise UnreadableError(f"is no WARC file from record {number} on: write the file again")
    fields: dict[str, str] = {}
    size = 0
    while (line := file.readline(_MAX_HEADER_BYTES)) and not line.isspace():
        size += len(line)
        if size > _MAX_HEADER_BYTES:
            raise UnreadableError(f"has too long a header of record {number}: write the file again")
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        fields[name.strip().lower()] = value.strip()
    return fields
