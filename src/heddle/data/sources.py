"""Text sources: a data argument names a file, a folder or `stdlib`, with a weight, and is read as documents."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from heddle.data import hub
from heddle.data.cache import DataCache
from heddle.data.documents import SkippedRecords, UnreadableError, looks_like_text, text_suffix
from heddle.data.recall import is_recall_argument
from heddle.errors import CheckpointError, DataError, describe_path
from heddle.progress import format_amount, printable
from heddle.storage.file_io import read_json_file

TEXT_SUFFIXES = frozenset(
    """
    .txt .text .md .markdown .rst .adoc .org .tex .jsonl .ndjson .jsonlines .py .pyi .pyx .ipynb .c .h .cc .cpp .cxx
    .hh .hpp .cu .cuh .m .mm .cs .java .kt .kts .scala .go .rs .swift .js .jsx .mjs .ts .tsx .rb .php .pl .pm .lua .r
    .jl .hs .ml .mli .fs .clj .ex .exs .erl .elm .lisp .el .scm .sh .bash .zsh .fish .ps1 .sql .css .scss .xml .yaml
    .yml .toml .ini .cfg .json .proto .cmake .f .f90 .f95 .zig .nim .dart .v .sv .vhd .s .asm .srt .vtt .po .log
    .ldjson .parquet .arrow .feather .ipc .warc .wet
    """.split()  # noqa: SIM905
)
# Left out of folders, with a message: only a part of such a file is text for a reader, or what it holds.
LEFT_OUT_SUFFIXES = frozenset(
    ".csv .tsv .psv .html .htm .xhtml .zip .tar .tgz .7z .rar .pdf .docx .xlsx .epub .odt".split()  # noqa: SIM905
)
_MANUAL_SECTION = re.compile(r"\.[1-9n][a-z]{0,8}")  # ls.1, printf.3posix
_IGNORED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
_WEIGHT = re.compile(r"(?P<path>.+)@(?P<weight>[0-9]+(\.[0-9]+)?)", re.DOTALL)
_VALIDATION_ONE_IN = 20  # one document in this many goes to the validation split


@dataclass(frozen=True)
class SkippedFile:
    """A file that was skipped, and why."""

    file: str
    reason: str


@dataclass
class ContentCounts:
    """Counts over a stream of documents, and its hash; `validation_*` counts the validation split by hash."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0
    validation_documents: int = 0
    validation_characters: int = 0
    validation_bytes: int = 0
    hasher: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, text: str) -> None:
        """Count one document."""
        data = text.encode("utf-8")
        digest = hashlib.sha256(data).digest()
        self.hasher.update(digest)
        self.documents += 1
        self.characters += len(text)
        self.bytes += len(data)
        if is_in_validation(digest):
            self.validation_documents += 1
            self.validation_characters += len(text)
            self.validation_bytes += len(data)

    def copy(self) -> ContentCounts:
        """Return an independent copy, so that a file that turns out to be unreadable is not counted."""
        counts = (self.documents, self.characters, self.bytes)
        validation_counts = (self.validation_documents, self.validation_characters, self.validation_bytes)
        return ContentCounts(*counts, *validation_counts, hasher=self.hasher.copy())


def is_in_validation(digest: bytes) -> bool:
    """Whether the document with this SHA-256 is for validation. Equal documents are always in the same split."""
    return int.from_bytes(digest[:8], "little") % _VALIDATION_ONE_IN == 0


@dataclass(frozen=True)
class ScannedSource:
    """A source after its first full read: the hash and counts of its content, and how to read it again.

    skipped_records: (file, its records without text), for files that have any. left_out: number of a folder's files
    with each of `LEFT_OUT_SUFFIXES`.
    """

    name: str
    hash: str
    counts: ContentCounts
    files: int
    empty_files: int
    ignored_files: int
    skipped_files: tuple[SkippedFile, ...]
    read: Callable[[], Iterator[str]]
    skipped_records: tuple[tuple[str, SkippedRecords], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TextFile:
    """One file of a source, with its name in messages. A bad file is an error if `required`, else it is skipped."""

    path: Path
    display_name: str
    required: bool
    read: Callable[[Path, SkippedRecords], Iterator[str]] = hub.read_any_text


@dataclass(frozen=True)
class FileSource:
    """A file, or the text files of a folder in the order of their relative paths. name: for messages and reports.

    It gives the same documents each time it is read.
    """

    name: str
    files: tuple[TextFile, ...]
    skipped_files: tuple[SkippedFile, ...] = ()
    ignored_files: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes on disk now; a missing file counts as 0 and is reported by `scan`."""
        return sum(_file_size(file.path) for file in self.files)

    def scan(self, on_bytes_read: Callable[[int], None]) -> ScannedSource:
        """Read and check every file; a bad file is an error if the user named it, and is skipped in a folder."""
        counts, empty_files = ContentCounts(), 0
        readable: list[tuple[TextFile, tuple[int, int]]] = []
        skipped_files, skipped_records = list(self.skipped_files), list[tuple[str, SkippedRecords]]()
        for file in self.files:
            counts_with_file, skipped, unread = counts.copy(), SkippedRecords(), _file_size(file.path)
            try:
                size_and_mtime = _size_and_mtime(file.path)
                for text in file.read(file.path, skipped):
                    bytes_before = counts_with_file.bytes
                    counts_with_file.add(text)
                    read = min(counts_with_file.bytes - bytes_before, unread)  # compressed files hold more
                    on_bytes_read(read)
                    unread -= read
                on_bytes_read(unread)
            except UnreadableError as error:
                if file.required:
                    raise DataError(f"data file {file.display_name} {error}.") from error
                skipped_files.append(SkippedFile(file.display_name, str(error)))
                continue
            if skipped.count:
                skipped_records.append((file.display_name, skipped))
            if counts_with_file.documents == counts.documents:
                empty_files += 1
            else:
                readable.append((file, size_and_mtime))
            counts = counts_with_file
        if counts.documents == 0:
            raise DataError(_no_text_message(self.name, len(self.files), empty_files, skipped_files))
        return ScannedSource(
            name=self.name,
            hash=counts.hasher.hexdigest(),
            counts=counts,
            files=len(readable),
            empty_files=empty_files,
            ignored_files=self.ignored_files,
            skipped_files=tuple(skipped_files),
            skipped_records=tuple(skipped_records),
            left_out=self.left_out,
            read=lambda: _read_again(readable),
        )


def check_sources(arguments: Collection[str]) -> None:
    """Raise DataError for a file or folder that does not exist, and an empty file; nothing is read."""
    for argument in arguments:
        name, _ = _split_weight(argument)
        if name and ":" not in name and "\0" not in name and name != "stdlib":
            path = _existing(name)
            if path.is_file() and not path.stat().st_size:
                raise DataError(_no_text_message(printable(path.name), 1, 1, []))


def describe_files(arguments: Collection[str]) -> str:
    """How many files and bytes sources hold, as their folders list them; data sets are only named."""
    parts = []
    for argument in arguments:
        if hub.is_hf_argument(_split_weight(argument)[0]):
            parts.append(printable(argument))
            continue
        source, _ = parse_source(argument)
        files = f"{len(source.files):,} file{'s' * (len(source.files) != 1)}"
        parts.append(f"{source.name}: {files}, {format_amount(source.size, 'bytes')}")
    return "; ".join(parts)


def _existing(argument: str) -> Path:
    """The path of a file or folder. Raises DataError where there is none."""
    path = Path(argument)
    what = describe_path(path)
    if what not in ("is a file", "is a folder"):
        raise DataError(f"data {printable(argument)} {what}: give a file, a folder or stdlib.")
    return path


def _split_weight(argument: str) -> tuple[str, float]:
    """The name and the weight of `name@weight`. Raises DataError for a weight that is not one."""
    match = _WEIGHT.fullmatch(argument)
    if match is None or os.path.lexists(argument.removeprefix(hub.HF_PREFIX)):
        return argument, 1.0
    name, weight = match["path"], float(match["weight"])
    if not 0 < weight < math.inf or round(weight, 3) != weight:
        text = f"{printable(name)}@{match['weight']}"
        raise DataError(f"the weight of data {text} must be above 0, with at most three decimals.")
    return name, weight


def parse_source(argument: str, cache: DataCache | None = None) -> tuple[FileSource, float]:
    """Parse a data argument into its source and its weight (1 if none is given).

    The argument is `stdlib` (the source code of this Python), a data set (`hf:PATH` or `hf:NAME`, see `hub`), a file,
    or a folder. A folder is searched recursively; hidden files, linked folders, `__pycache__` and installed packages
    are ignored, and so are files without a text suffix; if there is no suffix, the first bytes decide. An argument may
    end in `@WEIGHT`, such as `books@3`: a positive number with at most three decimals. An existing file or folder with
    such a name is not split. Write `./stdlib` for a folder of that name. Raises DataError.
    """
    argument, weight = _split_weight(argument)
    if argument == "stdlib":
        return _standard_library_source(), weight
    if hub.is_hf_argument(argument):
        return _hf_source(argument, cache), weight
    if argument.startswith("chat:"):
        raise DataError(f"data {printable(argument)} is conversations, not text: train on them without other data.")
    if is_recall_argument(argument):
        raise DataError(
            f"data {printable(argument)} is a synthetic task, not text: train on it without other data; "
            "compare has an option for tasks."
        )
    if not argument or "\0" in argument:
        raise DataError("data must name a file, a folder or stdlib, but the name is empty or invalid.")
    path, display_name = _existing(argument), printable(argument)
    name = printable(path.name or path.resolve().name or argument)
    if path.is_dir():
        return _folder_source(path, name, TEXT_SUFFIXES), weight
    return FileSource(name, (TextFile(path, display_name, required=True),)), weight


def _hf_source(argument: str, cache: DataCache | None) -> FileSource:
    if (on_hub := hub.parse_hub_argument(argument)) is not None:
        rows = hub.download_rows(on_hub, cache or DataCache(None))
        return FileSource(on_hub.name, tuple(TextFile(path, on_hub.name, required=True) for path in rows))
    dataset = hub.parse_hf_argument(argument)
    own = f"{hub.HF_PREFIX}{dataset.path}" + (f",split={dataset.split}" if dataset.split else "")
    read = partial(hub.read_column, column=dataset.column, argument=own)
    paths, others = hub.list_dataset_files(dataset)
    name = printable(dataset.path.name or dataset.path.resolve().name)
    skipped = [SkippedFile(printable(path.name), "names no split, as other files do") for path in others]
    files = [TextFile(path, printable(str(path)), required=True, read=read) for path in paths]
    return FileSource(name, tuple(files), tuple(skipped))


def _standard_library_source() -> FileSource:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise DataError(f"the source code of this Python is not in {root}: give a file or a folder as data.")
    return _folder_source(root, "stdlib", frozenset({".py"}))


def _folder_source(root: Path, name: str, suffixes: frozenset[str]) -> FileSource:
    files: list[tuple[bytes, TextFile]] = []
    skipped_files: list[SkippedFile] = []
    ignored_files, left_out = 0, dict[str, int]()

    def unreadable(error: OSError) -> None:
        if Path(error.filename) == root:
            raise DataError(f"data folder {printable(str(root))} cannot be read ({error.strerror}).") from error
        label = Path(error.filename).relative_to(root).as_posix()
        skipped_files.append(SkippedFile(printable(label), f"cannot be read ({error.strerror})"))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        if reason := _no_folder_of_text(Path(folder), names, is_root=Path(folder) == root):
            if Path(folder) == root:
                raise DataError(f"data {printable(str(root))} {reason}.")
            label = printable(Path(folder).relative_to(root).as_posix())
            skipped_files.append(SkippedFile(label, reason))
            subfolders.clear()
            continue
        subfolders[:] = [n for n in subfolders if n not in _IGNORED_FOLDERS and not n.startswith(".")]
        for file_name in names:
            path = Path(folder, file_name)
            if file_name.startswith(".") or not _is_text(path, suffixes):
                ignored_files += 1
                if (suffix := text_suffix(path)) in LEFT_OUT_SUFFIXES and suffixes is TEXT_SUFFIXES:
                    left_out[suffix] = left_out.get(suffix, 0) + 1
                continue
            relative = path.relative_to(root).as_posix()
            # Sorted as bytes, for the same order on every machine and in every locale.
            files.append((os.fsencode(relative), TextFile(path, printable(relative), required=False)))
    files.sort(key=lambda entry: entry[0])
    skipped_files.sort(key=lambda entry: entry.file)
    left_out = dict(sorted(left_out.items()))
    return FileSource(name, tuple(file for _, file in files), tuple(skipped_files), ignored_files, left_out)


def _no_folder_of_text(folder: Path, names: Collection[str], is_root: bool) -> str:
    """Why a folder is not read, if so: the text files of a saved data set are only about its files.

    Files of a run, comparison or ladder of heddle would change the text during training.
    """
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"}.issubset(names):
        return f"is a data set that `datasets` saved: name it with {shlex.quote(f'{hub.HF_PREFIX}{folder}')}"
    for name in {"run.json", "plan.json"}.intersection(() if is_root else names):
        with suppress(CheckpointError):
            read_json_file(folder / name)
            return "is a run or a comparison by heddle"
    return ""


def _is_text(path: Path, suffixes: frozenset[str]) -> bool:
    """Whether a file of a folder is read: by its suffix; manual pages and files without one by their first bytes."""
    suffix = text_suffix(path)
    if suffix in suffixes:
        return True
    is_unnamed = suffixes is TEXT_SUFFIXES and (not suffix or _MANUAL_SECTION.fullmatch(suffix) is not None)
    return is_unnamed and path.is_file() and looks_like_text(path)


def _read_again(files: list[tuple[TextFile, tuple[int, int]]]) -> Iterator[str]:
    for file, mark in files:
        try:
            if _size_and_mtime(file.path) != mark:
                raise UnreadableError("has different content than before")
            yield from file.read(file.path, SkippedRecords())
            if _size_and_mtime(file.path) != mark:
                raise UnreadableError("has different content than before")
        except UnreadableError as error:
            raise DataError(
                f"data file {file.display_name} changed while it was read: give data that does not change."
            ) from error


def _size_and_mtime(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UnreadableError(f"cannot be read ({error.strerror}): make it readable") from error
    return status.st_size, status.st_mtime_ns


def _file_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _no_text_message(name: str, files: int, empty_files: int, skipped_files: list[SkippedFile]) -> str:
    if not files and not skipped_files:
        return (
            f"data {name} holds no text file: name a file, "
            "or give a folder with .txt, .md, .py, .jsonl or other source."
        )
    if skipped_files:
        first = skipped_files[0]
        return (
            f"data {name} holds no usable text ({empty_files} files are empty, {len(skipped_files)} were skipped); "
            f"the first, {first.file}, {first.reason}."
        )
    return f"data {name} is empty: give a file or folder with text in it."
