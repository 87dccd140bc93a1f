"""What a `--data` argument means: files, folders or `stdlib`, with a weight, as a stream of documents."""

from __future__ import annotations

import hashlib
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from heddle.data import tables
from heddle.data.documents import UnreadableError, read_documents
from heddle.data.recall import is_recall
from heddle.errors import DataError
from heddle.progress import printable

SUFFIXES = frozenset(
    """
    .txt .text .md .markdown .rst .adoc .org .tex .jsonl .py .pyi .pyx .ipynb .c .h .cc .cpp .cxx .hh .hpp
    .cu .cuh .m .mm .cs .java .kt .kts .scala .go .rs .swift .js .jsx .mjs .ts .tsx .rb .php .pl .pm .lua .r
    .jl .hs .ml .mli .fs .clj .ex .exs .erl .elm .lisp .el .scm .sh .bash .zsh .fish .ps1 .sql .html .htm
    .css .scss .xml .yaml .yml .toml .ini .cfg .json .csv .tsv .proto .cmake .f .f90 .f95 .zig .nim .dart .v
    .sv .vhd .s .asm .srt .vtt .po .log
    """.split()  # noqa: SIM905
)
_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_WEIGHT = re.compile(r"(?P<path>.+)@(?P<weight>[0-9]+(\.[0-9]+)?)", re.DOTALL)
_HELD_OUT = 20  # one document in this many is for validation


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    file: str
    reason: str


@dataclass
class Tally:
    """Counts over a stream of documents, and its hash; `held_*` is the validation side by hash."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    held_documents: int = 0
    held_characters: int = 0
    held_bytes: int = 0
    state: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, text: str) -> None:
        """Count one document."""
        data = text.encode("utf-8")
        digest = hashlib.sha256(data).digest()
        self.state.update(digest)
        self.documents += 1
        self.characters += len(text)
        self.bytes += len(data)
        if is_held_out(digest):
            self.held_documents += 1
            self.held_characters += len(text)
            self.held_bytes += len(data)

    def copy(self) -> Tally:
        """An independent copy, so that a file found bad half-way can be taken back."""
        counts = (self.documents, self.characters, self.bytes)
        held = (self.held_documents, self.held_characters, self.held_bytes)
        return Tally(*counts, *held, state=self.state.copy())


def is_held_out(digest: bytes) -> bool:
    """Whether the document with this SHA-256 is for validation: equal documents are never on both sides."""
    return int.from_bytes(digest[:8], "little") % _HELD_OUT == 0


@dataclass(frozen=True)
class Survey:
    """A source after its first full reading: its content's hash and counts, and how to read it again."""

    name: str
    hash: str
    tally: Tally
    files: int
    empty: int
    ignored: int
    skipped: tuple[Skipped, ...]
    read: Callable[[], Iterator[str]]


class Source(Protocol):
    """Anything that can give the same documents again and again."""

    @property
    def name(self) -> str:
        """A short name for people."""

    @property
    def size(self) -> int:
        """Bytes, for the progress bar."""

    def survey(self, advance: Callable[[int], None]) -> Survey:
        """Read everything once, calling `advance` with the bytes read. Raises DataError."""


@dataclass(frozen=True)
class TextFile:
    """One file of a source; `label` is how it is shown, `named` whether a bad one is an error, not skipped."""

    path: Path
    label: str
    named: bool
    read: Callable[[Path], Iterator[str]] = read_documents


@dataclass(frozen=True)
class FileSource:
    """A file, or the text files of a folder in the order of their relative paths."""

    name: str
    files: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...] = ()
    ignored: int = 0

    @property
    def size(self) -> int:
        """Bytes on disk now; a file that has vanished counts nothing and is reported by `survey`."""
        return sum(_size(file.path) for file in self.files)

    def survey(self, advance: Callable[[int], None]) -> Survey:
        """Read and check every file; a bad one is an error when named and skipped inside a folder."""
        tally, empty = Tally(), 0
        good: list[tuple[TextFile, tuple[int, int]]] = []
        skipped = list(self.skipped)
        for file in self.files:
            trial = tally.copy()
            try:
                mark = _mark(file.path)
                for text in file.read(file.path):
                    before = trial.bytes
                    trial.add(text)
                    advance(trial.bytes - before)
            except UnreadableError as error:
                if file.named:
                    raise DataError(f"data file {file.label} {error}.") from error
                skipped.append(Skipped(file.label, str(error)))
                continue
            if trial.documents == tally.documents:
                empty += 1
            else:
                good.append((file, mark))
            tally = trial
        if tally.documents == 0:
            raise DataError(_nothing(self.name, len(self.files), empty, skipped))
        return Survey(
            name=self.name,
            hash=tally.state.hexdigest(),
            tally=tally,
            files=len(good),
            empty=empty,
            ignored=self.ignored,
            skipped=tuple(skipped),
            read=lambda: _read_again(good),
        )


def open_source(argument: str) -> tuple[Source, float]:
    """The source a `--data` argument names, and its weight (1 when none is given).

    `stdlib`, a data set (`hf:PATH`, see `tables`), a file, or a folder (searched recursively; hidden files,
    linked folders, `__pycache__`, installed packages and files without a text suffix are left out), each
    optionally with `@WEIGHT`, such as `books@3`: a positive number with at most three decimals. A file or folder
    whose name really ends so wins over the weight. `stdlib` is always the source of the running Python; write
    `./stdlib` for a folder of that name. Raises DataError.
    """
    weight = 1.0
    match = _WEIGHT.fullmatch(argument)
    if match is not None and not os.path.lexists(argument.removeprefix(tables.PREFIX)):
        argument, written = match["path"], match["weight"]
        weight = float(written)
        if not 0 < weight < math.inf or round(weight, 3) != weight:
            raise DataError(
                f"the weight of data {_shown(argument)}@{written} must be above 0, with at most three decimals."
            )
    if argument == "stdlib":
        return _standard_library(), weight
    if tables.is_table(argument):
        return _table(argument), weight
    if argument.startswith("chat:"):
        raise DataError(f"data {_shown(argument)} is conversations, not text: give them to train, beside nothing else.")
    if is_recall(argument):
        raise DataError(
            f"data {_shown(argument)} is a task, not text: give it to train as the only --data; compare has --recall."
        )
    if not argument or "\0" in argument:
        raise DataError("data must name a file, a folder or stdlib, but an empty or impossible name was given.")
    path = Path(argument)
    label = _shown(argument)
    if not path.exists():
        raise DataError(f"data {label} does not exist: give a file, a folder or stdlib.")
    name = _shown(path.name or path.resolve().name or argument)
    if path.is_dir():
        return _folder(path, name, SUFFIXES), weight
    return FileSource(name, (TextFile(path, label, named=True),)), weight


def _table(argument: str) -> FileSource:
    table = tables.parse_table(argument)
    read = partial(tables.read_table, column=table.column)
    found = tables.table_files(table)
    name = _shown(table.path.name or table.path.resolve().name)
    return FileSource(name, tuple(TextFile(path, _shown(str(path)), named=True, read=read) for path in found))


def _standard_library() -> FileSource:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise DataError(f"the source of this Python is not in {root}: give --data a file or a folder.")
    return _folder(root, "stdlib", frozenset({".py"}))


def _folder(root: Path, name: str, suffixes: frozenset[str]) -> FileSource:
    found: list[tuple[bytes, TextFile]] = []
    skipped: list[Skipped] = []
    ignored = 0

    def unreadable(error: OSError) -> None:
        if Path(error.filename) == root:
            raise DataError(f"data folder {_shown(str(root))} cannot be read ({error.strerror}).") from error
        label = Path(error.filename).relative_to(root).as_posix()
        skipped.append(Skipped(_shown(label), f"cannot be read ({error.strerror})"))

    for folder, inner, names in os.walk(root, onerror=unreadable):
        inner[:] = [n for n in inner if n not in _LEFT_OUT_FOLDERS and not n.startswith(".")]
        for file_name in names:
            path = Path(folder, file_name)
            if file_name.startswith(".") or path.suffix.lower() not in suffixes:
                ignored += 1
                continue
            relative = path.relative_to(root).as_posix()
            # Sorted as bytes: the same order on every machine and in every locale.
            found.append((os.fsencode(relative), TextFile(path, _shown(relative), named=False)))
    found.sort(key=lambda entry: entry[0])
    skipped.sort(key=lambda entry: entry.file)
    return FileSource(name, tuple(file for _, file in found), tuple(skipped), ignored)


def _read_again(files: list[tuple[TextFile, tuple[int, int]]]) -> Iterator[str]:
    for file, mark in files:
        try:
            if _mark(file.path) != mark:
                raise UnreadableError("has other content than before")
            yield from file.read(file.path)
            if _mark(file.path) != mark:
                raise UnreadableError("has other content than before")
        except UnreadableError as error:
            raise DataError(
                f"data file {file.label} changed while it was read: give data that stays as it is."
            ) from error


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror}): make it readable") from error
    return status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _shown(path: str) -> str:
    return printable(path)


def _nothing(name: str, files: int, empty: int, skipped: list[Skipped]) -> str:
    if not files and not skipped:
        return (
            f"data {name} holds no text file: name a file, "
            "or give a folder with .txt, .md, .py, .jsonl or other source."
        )
    if skipped:
        first = skipped[0]
        reason = first.reason.partition(":")[0]
        return (
            f"data {name} holds no usable text ({empty} files are empty, {len(skipped)} were skipped, "
            f"the first, {first.file}, because it {reason}): give UTF-8 text."
        )
    return f"data {name} is empty: give a file or folder with text in it."
