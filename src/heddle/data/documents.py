"""Read a file as documents: strict UTF-8, split at blank lines, with one block of the file in memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from heddle.errors import describe_path, pip_install
from heddle.progress import printable

# Text files may be compressed: they are read as a stream, and refused if they decompress to too much.


COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".gzip", ".zstd", ".lzma")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".ldjson")
MAYBE_RECORDS = (".json", ".jl", "")  # the first bytes decide: .jl is Scrapy's records, or Julia's source
_TAR_SUFFIXES = (".tgz", ".tbz2", ".txz", ".tzst")
# Beyond MAX_BYTES_OF_ANY_RATIO, decompressed text may be at most MAX_RATIO times as large as the compressed bytes.
MAX_BYTES_OF_ANY_RATIO = 64 * 1024 * 1024
MAX_RATIO = 100
MAX_XZ_MEMORY = 256 * 1024 * 1024  # for the dictionary of an .xz file, whose size its header sets
_BLOCK_BYTES = 1024 * 1024
_TAR_BYTES = 262  # of a tar archive's header, up to the end of its mark
LFS_POINTER = b"version https://git-lfs"  # what stands in place of a file that was not downloaded
# What files begin with that are named as text, and are not: what they are, and the remedy.
_OTHER_FORMATS = (
    (LFS_POINTER, "a Git LFS pointer, not the file", "run `git lfs pull` in its folder, or download the file"),
    (b"\x1f\x8b", "compressed by gzip", "end its name in .gz"),
    (b"(\xb5/\xfd", "compressed by zstd", "end its name in .zst"),
    (b"\xfd7zXZ\0", "compressed by xz", "end its name in .xz"),
    (b"BZh91AY&", "compressed by bzip2", "end its name in .bz2"),
    (b"PK\x03\x04", "a zip archive", "give the files in it"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (b"\xff\xfe\0\0", "UTF-32", "convert it to UTF-8"),
    (b"\xff\xfe", "UTF-16", "convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16", "convert it to UTF-8"),
)


class UnreadableError(Exception):
    """Why a file cannot be used. The text completes a sentence that begins with the file's name."""


@dataclass
class SkippedRecords:
    """Records of a file that were left out: how many, and why the first one was."""

    count: int = 0
    reason: str = ""

    def add(self, reason: str) -> None:
        """Count a record. reason: completes a sentence that begins with the file's name."""
        self.reason = self.reason or reason
        self.count += 1


def check_ratio(size: int, path: Path) -> None:
    """Raise UnreadableError if text of `size` bytes is too large for the file that it came from."""
    if size > max(MAX_BYTES_OF_ANY_RATIO, MAX_RATIO * path.stat().st_size):
        raise UnreadableError(
            f"holds text of more than {MAX_RATIO} times its size: if that is right, write it to a .jsonl file"
        )


def text_suffix(path: Path) -> str:
    """Return the suffix of a file's content in lower case: `.jsonl` for a.jsonl.gz; `` for a.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its text, decompressed if its name ends in one of `COMPRESSED_SUFFIXES`.

    Raises UnreadableError, also while it is read, if it is not a file, is damaged or decompresses to too much.
    """
    check_is_file(path)
    suffix = path.suffix.lower()
    if suffix in _TAR_SUFFIXES:
        raise UnreadableError("is a tar archive: give the files in it")
    try:
        with open(path, "rb") as file:
            if suffix not in COMPRESSED_SUFFIXES:
                _refuse_other_formats(file)
                yield file
                return
            _refuse_other_formats(file, _OTHER_FORMATS[:1])
            yield io.BufferedReader(_Decompressed(_STREAMS[suffix](file), file), _BLOCK_BYTES)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror or error}): make it readable") from error


def _refuse_other_formats(file: BinaryIO, formats: Iterable[tuple[bytes, str, str]] = _OTHER_FORMATS) -> None:
    head = file.read(_TAR_BYTES)
    for begin, what, remedy in formats:
        if head.startswith(begin):
            raise UnreadableError(f"is {what}: {remedy}")
    _refuse_tar(head)
    file.seek(0)


def check_is_file(path: Path) -> None:
    """Raise UnreadableError for a pipe, a device or anything else that is not a file: reading it might never end."""
    what = describe_path(path)
    if what != "is a file":
        raise UnreadableError(f"{what}: give a file")


def import_pyarrow() -> Any:
    """Return pyarrow, which reads zstd, Parquet and Arrow. Raises UnreadableError if it is not installed."""
    try:
        import pyarrow
    except ImportError as error:
        raise UnreadableError(f"needs pyarrow to be read: {pip_install('data')}") from error
    return pyarrow


class _Decompressed(io.RawIOBase):
    """A decompressing stream over `file`, whose output is bounded by the compressed bytes read so far."""

    def __init__(self, stream: Any, file: BinaryIO) -> None:
        self._stream, self._file, self._count = stream, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data: bytes = self._stream.read(len(buffer))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            reason = printable(str(error))[:120]
            raise UnreadableError(f"cannot be decompressed ({reason}): compress it again") from error
        self._count += len(data)
        if self._count > max(MAX_BYTES_OF_ANY_RATIO, MAX_RATIO * self._file.tell()):
            raise UnreadableError(
                f"decompresses to more than {MAX_RATIO} times its size: if that is right, decompress it yourself"
            )
        buffer[: len(data)] = data
        return len(data)


def _zstd_stream(file: BinaryIO) -> Any:
    pyarrow = import_pyarrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


class _XZStream:
    """Reads an .xz or .lzma file with a memory limit, which `lzma.LZMAFile` does not have."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)

    def read(self, size: int) -> bytes:
        data = b""
        while True:
            if self._decoder.eof:  # another stream may follow
                data = self._decoder.unused_data or self._file.read(_BLOCK_BYTES)
                if not data.strip(b"\0"):
                    return b""
                self._decoder = lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY)
            elif self._decoder.needs_input and not (data := self._file.read(_BLOCK_BYTES)):
                raise EOFError("it is cut short")
            if output := self._decoder.decompress(data, size):
                return output
            data = b""


_STREAMS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".zst": _zstd_stream,
    ".bz2": bz2.BZ2File,
    ".xz": _XZStream,
}
_STREAMS |= {".gzip": _STREAMS[".gz"], ".zstd": _zstd_stream, ".lzma": _XZStream}

# A document is at most this many bytes of UTF-8.
MAX_DOCUMENT_BYTES = 64 * 1024
# One line of a .jsonl file is parsed whole, so it is bounded.
MAX_JSON_LINE_BYTES = 16 * 1024 * 1024

_WARC_SUFFIXES = (".warc", ".wet")  # otherwise their headers would be read as text
_BINARY_CHECK_BYTES = 8192
_CONTROL_BYTES = frozenset({*range(32), 127}) - frozenset(
    b"\t\n\v\f\r\b\x1b"
)  # allowed in text; \b is the bold of man pages
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY_OF_OBJECTS = re.compile(rb'\[\s*+(?:(?:null|true|false|[-+.\deE]++|"(?:[^"\\]|\\.)*+")\s*+,\s*+)*+\{', re.DOTALL)
_RECORD_LINES = 16  # of a .json file, which decide whether it holds one record a line
# An object whose first field that is no plain value holds an array of objects: {"version": 1, "data": [{
_WRAPPED_ARRAY = re.compile(
    rb'\{\s*+(?:"[^"\\]*+"\s*+:\s*+(?:null|true|false|[-+.\deE]++|"(?:[^"\\]|\\.)*+")\s*+,\s*+)*+'
    rb'"(?P<name>[^"\\]*+)"\s*+:\s*+\[\s*+\{',
    re.DOTALL,
)
_WRAPPED = 'has its records in a field "{}": write that array alone, or a record on each line'
_AROUND_RECORDS = b" \t\r\n,\x1e"  # with the comma of an array's line, and the mark of JSON text sequences
_GAP = re.compile(r"[ \t\r\n,]*")
_OPTION = re.compile(r",\w+=")  # what ends a path, see `hub`
MESSAGES = "messages"  # the field of conversations, see `chat`
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")  # how "surrogateescape" keeps a byte that is not UTF-8
_TO_LAST_BLANK_LINE = re.compile(rb".*\n[ \t\r]*\n", re.DOTALL)


def read_documents(
    path: Path, field: str = "text", skipped: SkippedRecords | None = None, argument: str = ""
) -> Iterator[str]:
    """Yield the documents of one file, in order; for JSON records, the text of `field`.

    argument: how a user named the file or its folder, see `naming_remedy`.

    Records are the lines of a file of `JSON_LINES_SUFFIXES`, and the objects in the array or on the lines of a `.json`
    file, a `.jl` file or one without a suffix; a `.json` file may be a single record. A record without text, or a
    broken one, is left out and counted in `skipped`; a file without any text is refused. A compressed file's name also
    has one of `COMPRESSED_SUFFIXES`. A WARC file is refused.

    A file of at most 64 KiB is one document. A longer file is split into documents of at most 64 KiB: after the last
    blank line that fits, else the last line end, else the last space, else between two characters. Joined, the
    documents are the exact text of the file, without a byte order mark and without documents of white space alone.
    Raises UnreadableError.
    """
    suffix = text_suffix(path)
    if suffix in _WARC_SUFFIXES:
        raise UnreadableError("is a WARC file: write the text of its records to a .jsonl file, with warcio for example")
    skipped = SkippedRecords() if skipped is None else skipped
    with open_text(path) as file:
        first = file.read(_BLOCK_BYTES)
        records = _records(first, file, suffix)
        if records is None:
            if suffix == ".json":
                first += file.read(MAX_JSON_LINE_BYTES - len(first)) if len(first) == _BLOCK_BYTES else b""
                whole = json.loads(first.strip(_AROUND_RECORDS)) if _is_object(first) else {}
                if isinstance(whole.get(field), str):
                    yield from _json_documents(iter([(1, whole)]), field, path, skipped, argument)
                    return
                _refuse_columns(whole, field)
                _refuse_wrapped_records(first, field)
            yield from _text_documents(first, file)
        else:
            yield from _json_documents(records, field, path, skipped, argument)


def _records(first: bytes, file: BinaryIO, suffix: str) -> Iterator[tuple[int, Any]] | None:
    """The records of a file that begins with `first`, as `_parsed_lines` yields them; None for plain text."""
    kind, rest = _records_of(first), _Continued(first, file)
    if suffix in JSON_LINES_SUFFIXES:
        kind = "array" if kind == "array" else "lines"
    if kind is None or suffix not in (*JSON_LINES_SUFFIXES, *MAYBE_RECORDS):
        return None
    return _parsed_lines(rest) if kind == "lines" else _parsed_values(rest, is_array=kind == "array")


def _refuse_tar(first: bytes) -> None:
    if first[257:262] == b"ustar":
        raise UnreadableError("is a tar archive: give the files in it")


def _refuse_wrapped_records(first: bytes, field: str) -> None:
    """Raise UnreadableError for one object around an array of records with this field: its JSON syntax is not text."""
    found = _WRAPPED_ARRAY.match(first.removeprefix(_BYTE_ORDER_MARK).lstrip())
    if found and re.search(rb'"%s"\s*:' % re.escape(json.dumps(field)[1:-1].encode()), found.string[found.end() :]):
        name = printable(found["name"].decode("utf-8", "replace"))
        raise UnreadableError(_WRAPPED.format(name))


def _refuse_columns(whole: Mapping[str, Any], field: str) -> None:
    """Raise UnreadableError for an object with all texts in one field, as data frames are written, or with records."""
    column = whole.get(field)
    texts = list(column.values() if isinstance(column, dict) else column) if isinstance(column, dict | list) else []
    if texts and all(isinstance(text, str) for text in texts):
        raise UnreadableError(f'has all its texts in one field "{field}": write a record on each line')
    for name, records in whole.items():
        if isinstance(records, list) and records and isinstance(records[0], dict) and field in records[0]:
            raise UnreadableError(_WRAPPED.format(printable(name)))


def looks_like_text(path: Path) -> bool:
    """Whether a file without a known suffix begins with UTF-8 text."""
    try:
        with open_text(path) as file:
            head = file.read(_BINARY_CHECK_BYTES)
    except UnreadableError:
        return False
    if not head or set(head) & _CONTROL_BYTES:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


class _Continued:
    """A stream with its first bytes already read."""

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first, self._file = io.BytesIO(first), file

    def readline(self, size: int) -> bytes:
        line = self._first.readline(size)
        if len(line) < size and not line.endswith(b"\n"):
            line += self._file.readline(size - len(line))
        return line

    def read(self, size: int) -> bytes:
        return self._first.read(size) or self._file.read(size)


def _records_of(first: bytes) -> str | None:
    """How a file holds records: an "array" with objects, objects on "lines", other "objects"; None for plain text."""
    head = first.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if _ARRAY_OF_OBJECTS.match(head):
        return "array"
    lines = [line for line in head.split(b"\n", _RECORD_LINES)[:_RECORD_LINES] if not line.isspace() and line]
    begins = all(line.removeprefix(b"\x1e").startswith(b"{") or line.strip() == b"null" for line in lines)
    if len(lines) > 1 and begins and any(map(_is_object, lines)):
        return "lines"
    return "objects" if head.startswith(b"{") and _object_follows(head) else None


def _object_follows(head: bytes) -> bool:
    """Whether an object, on several lines, ends in `head` and another one begins after it."""
    text = head.decode("utf-8", "ignore")
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return False
    return text[end:].lstrip().startswith("{")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.strip(_AROUND_RECORDS)), dict)
    except (ValueError, RecursionError):
        return False


def split_documents(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split a stream of bytes into pieces of 1 to 65,536 bytes, at the points that `read_documents` describes."""
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


def _text_documents(first: bytes, file: BinaryIO) -> Iterator[str]:
    _refuse_tar(first)
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


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of the line (from 1) and the value of each record of a file as `read_documents` finds them.

    In an array the number is the item's. Raises UnreadableError, also for a broken record.
    """
    with open_text(path) as file:
        first = file.read(_BLOCK_BYTES)
        records = _records(first, file, text_suffix(path))
        for number, record in _parsed_lines(_Continued(first, file)) if records is None else records:
            if isinstance(record, UnreadableError):
                raise record
            yield number, record


def _parsed_lines(file: BinaryIO | _Continued) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each line that is not blank; the value of an invalid line is the error."""
    number = 0
    while line := file.readline(MAX_JSON_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_JSON_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_JSON_LINE_BYTES)
            limit = MAX_JSON_LINE_BYTES // 2**20
            yield number, UnreadableError(f"has more than {limit} MB on line {number}: split that record")
            continue
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip().strip(_AROUND_RECORDS):
            continue
        try:
            record = json.loads(line.strip(_AROUND_RECORDS).decode("utf-8"))
        except (ValueError, RecursionError):
            yield number, UnreadableError(f"has no valid UTF-8 JSON on line {number}: give one object per line")
        else:
            yield number, record


def _parsed_values(file: BinaryIO | _Continued, is_array: bool) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each item, of an array or not, with 16 MB in memory; of a broken item, the error.

    After a broken item, the next one begins on a line of its own, indented as the first; otherwise the rest is one.
    """
    decoder, number = json.JSONDecoder(), 0
    bytes_decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def more() -> str:
        block = file.read(_BLOCK_BYTES)
        return bytes_decoder.decode(block, final=not block)

    text = more().lstrip()[int(is_array) :]
    start = len(text) - len(text.lstrip())
    next_item = "\n" + text[:start].rpartition("\n")[2] + "{"
    while True:
        gap = _GAP.match(text, start)
        assert gap is not None
        start = gap.end()
        if start == len(text) and (block := more()):
            text, start = block, 0
            continue
        if is_array and text.startswith("]", start):  # the end; \0 fills up a block
            while not (rest := text[start + 1 :].strip("\0 \t\r\n")) and (block := more()):
                text, start = block, -1
            if rest:
                yield number + 1, UnreadableError("has more after its array: write one array, or a record on each line")
            return
        if start == len(text) and not is_array:
            return
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            is_cut = isinstance(error, ValueError) and len(text) - start <= MAX_JSON_LINE_BYTES
            if is_cut and (block := more()):
                text, start = text[start:] + block, 0
                continue
            number, end = number + 1, text.find(next_item, start + 1)
            rest = f"in item {number}" if end >= 0 else f"from item {number} on"
            yield number, UnreadableError(f"has no valid JSON {rest}: repair that record")
            if end < 0:
                return
        else:
            number += 1
            if _ESCAPED_BYTE.search(text, start, end):
                value = UnreadableError(f"has no valid UTF-8 in item {number}: repair that record")
            yield number, value
        start = end


def _json_documents(
    records: Iterator[tuple[int, Any]], field: str, path: Path, skipped: SkippedRecords, argument: str
) -> Iterator[str]:
    found, names, is_chat = False, dict[str, None](), False
    for number, record in records:
        if isinstance(record, UnreadableError):
            skipped.add(str(record))
            continue
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            fields = record.items() if isinstance(record, dict) else ()
            is_chat = is_chat or isinstance(dict(fields).get(MESSAGES), list)
            names |= dict.fromkeys(name for name, value in fields if isinstance(value, str))
            skipped.add(f'has no text in "{field}" of record {number}: give every record that field')
            continue
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            skipped.add(f'has half a surrogate pair in "{field}" of record {number}: repair it')
            continue
        found = True
        yield from documents_from_bytes(data)
    if skipped.count and not found:
        if is_chat:
            raise UnreadableError(f'has no text in "{field}", but {chat_remedy(path)}')
        if not names:
            raise UnreadableError(skipped.reason)
        listed, remedy = ", ".join(map(printable, list(names)[:8])), naming_remedy(path, argument, field, names)
        raise UnreadableError(f'has no text in "{field}", but fields with text ({listed}): {remedy}')


def chat_remedy(path: Path) -> str:
    """How to read a file whose records are conversations."""
    return f'conversations in "{MESSAGES}": train on them with {shlex.quote(f"chat:{path}")}'


def naming_remedy(path: Path, argument: str, field: str, names: Iterable[str]) -> str:
    """How to read another field of a file: the data argument that names the first of these names that can be named.

    argument: how a user named the file, or its folder, without the field; empty if not as a data set.
    """
    named = f"{argument or f'hf:{path}'},text={next((name for name in names if _can_be_named(name)), '')}"
    if named.endswith("=") or printable(named) != named or (not argument and _OPTION.search(str(path))):
        return f'call one "{field}"'  # such a field, or such a file, cannot be named
    return f"name one with {shlex.quote(named)}"


def _can_be_named(field: str) -> bool:
    """Whether `text=FIELD` can name a field."""
    return bool(field) and "," not in field and printable(field) == field
