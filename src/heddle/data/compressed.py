"""Text files that may be compressed with gzip or zstd: read as a stream, and refused where they grow without bound."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from heddle.errors import describe_path
from heddle.progress import printable

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
        raise UnreadableError("needs pyarrow to be read: pip install 'heddle-lm[data]'") from error
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
