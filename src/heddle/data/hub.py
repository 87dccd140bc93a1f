"""`hf:NAME[:CONFIG][:SPLIT]`: a text column of a data set on the Hugging Face hub, streamed once into the cache.

The first rows are cached as JSON lines, in files of 10,000 rows, and every later run reads these: the same bytes,
without a network. An interrupted stream resumes after the last complete file, at the same commit of the data set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from heddle import progress
from heddle.data.cache import CACHE_REMEDY, DataCache, report_damage
from heddle.data.documents import (
    JSON_LINES_SUFFIXES,
    MAX_JSON_LINE_BYTES,
    MAYBE_RECORDS,
    MESSAGES,
    SkippedRecords,
    UnreadableError,
    chat_remedy,
    check_ratio,
    documents_from_bytes,
    import_pyarrow,
    naming_remedy,
    open_text,
    read_documents,
    read_records,
    text_suffix,
)
from heddle.errors import DataError, HeddleError, describe_path, pip_install
from heddle.numerics.dispatch import optional_module
from heddle.progress import printable
from heddle.storage.file_io import replace_file

# `hf:PATH,text=COLUMN,split=NAME`: the text column of a data set on this disk, read a batch of rows at a time.
#
# PATH is a folder that `datasets` saved (`save_to_disk`), a .parquet, .arrow or .jsonl file, or a folder of such files.
# No code of a data set is run. A path that is not on this disk is a name on the hub.


HF_PREFIX = "hf:"
OPTIONS = ("text", "split", "rows")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES)
DATASET_SUFFIXES = (*TABLE_SUFFIXES, *JSON_LINES_SUFFIXES, ".json")
# A file belongs to a split if one of these words is in its path.
SPLIT_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_OPTION = re.compile(r"(?P<rest>.*),(?P<key>\w+)=(?P<value>[^,]*)", re.DOTALL)
_BATCH_ROWS = 256  # rows read at a time
_TEXT_ROWS = 16  # converted to text at a time: a row may be long, and stored once for many
_MAX_STATE_BYTES = 64 * 1024 * 1024  # of the JSON that `datasets` writes beside its files
_DICTIONARY, _BATCH = 2, 3  # kinds of IPC messages
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class HFDataset:
    """A parsed `hf:` argument for this disk. split None: train, or the only split there is."""

    path: Path
    column: str
    split: str | None

    @property
    def display_name(self) -> str:
        """The name in messages."""
        return f"data {HF_PREFIX}{printable(str(self.path))}"


def is_hf_argument(argument: str) -> bool:
    """Whether a data argument names a data set; write ./hf:… for a file of that name."""
    return argument.startswith(HF_PREFIX)


def split_options(argument: str) -> tuple[str, dict[str, str]]:
    """Split an argument without its `hf:` into path and options `,name=value`. Raises DataError for unknown ones."""
    path_text, options = argument.removeprefix(HF_PREFIX), dict[str, str]()
    while match := _OPTION.fullmatch(path_text):
        path_text, key, value = match["rest"], match["key"], match["value"]
        if key not in OPTIONS or not value:
            raise DataError(
                f"data {printable(argument)}: has no option '{key}={value}'; choices: text=COLUMN, split=NAME, rows=N"
            )
        if key in options:
            raise DataError(f"data {printable(argument)}: has {key} twice; keep one")
        options[key] = value
    return path_text, options


def parse_hf_argument(argument: str) -> HFDataset:
    """Parse `hf:PATH,text=COLUMN,split=NAME` for this disk. Raises DataError for a missing path."""
    path_text, options = split_options(argument)
    dataset = HFDataset(Path(path_text), options.get("text", "text"), options.get("split"))
    what = describe_path(dataset.path) if path_text else "does not exist"
    if what not in ("is a file", "is a folder"):
        raise DataError(f"{dataset.display_name} {what}: give a folder or file on this disk, or OWNER/NAME on the hub.")
    if "rows" in options:
        raise DataError(f"{dataset.display_name} is on this disk: rows is for data sets on the hub; leave it out.")
    return dataset


def list_dataset_files(dataset: HFDataset) -> tuple[list[Path], list[Path]]:
    """Return the files of the split, in order, and those that name no split beside others that do.

    Raises DataError, naming the existing splits, if it is missing.
    """
    path = dataset.path
    if path.is_file():
        if text_suffix(path) not in (*DATASET_SUFFIXES, *MAYBE_RECORDS):
            raise DataError(
                f"{dataset.display_name} is not a {', '.join(DATASET_SUFFIXES)} file: "
                "give one, or a folder of such files."
            )
        _check_split(dataset, [])
        return [path], []
    if (path / "dataset_dict.json").is_file():
        splits = _read_names(path / "dataset_dict.json", "splits")
        name = dataset.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if name not in splits:
            raise DataError(f"{dataset.display_name} has no split '{name}'; splits: {', '.join(splits)}")
        path = path / name
    if (path / "state.json").is_file():
        return _saved_dataset_files(dataset, path), []
    return _folder_files(dataset)


def read_any_text(path: Path, skipped: SkippedRecords | None = None) -> Iterator[str]:
    """Yield the documents of any text file; for a Parquet or Arrow file, those in its column `text`."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        yield from read_column(path, skipped, "text")
    else:
        yield from read_documents(path, skipped=skipped)


def read_column(path: Path, skipped: SkippedRecords | None, column: str, argument: str = "") -> Iterator[str]:
    """Yield the documents of one column: each row's text, split as `read_documents` splits files; nulls are skipped.

    argument: how a user named the file, see `naming_remedy`.

    Raises UnreadableError if the column is missing, naming the existing columns, or if the text is more than a hundred
    times as large as the file.
    """
    skipped = SkippedRecords() if skipped is None else skipped
    if text_suffix(path) in (*JSON_LINES_SUFFIXES, *MAYBE_RECORDS):
        yield from read_documents(path, column, skipped, argument)
        return
    size = number = 0
    for rows in _read_table(path, partial(_check_column, column=column, path=path, argument=argument)):
        for text in rows.column(0).to_pylist():
            number += 1
            if text is None:
                skipped.add(f'has no text in "{column}" of row {number}')
                continue
            data = text.encode("utf-8")
            check_ratio(size := size + len(data), path)
            yield from documents_from_bytes(data)


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each record, as `read_records`; a row of a Parquet or Arrow file is one.

    Raises UnreadableError.
    """
    if path.suffix.lower() not in TABLE_SUFFIXES:
        yield from read_records(path)
        return
    size = number = 0
    for rows in _read_table(path, lambda schema: None):
        check_ratio(size := size + rows.nbytes, path)
        for row in rows.to_pylist():
            yield (number := number + 1), row


def _read_table(path: Path, check: Callable[[Any], int | None]) -> Iterator[Any]:
    """Yield a few rows at a time of the column that `check` finds in the schema; None: of all columns."""
    pyarrow, suffix = import_pyarrow(), path.suffix.lower()
    with open_text(path):  # refuses what is not a file, or a pointer to one
        pass
    try:
        for batch in _read_parquet(path, check) if suffix == ".parquet" else _read_arrow(pyarrow, path, check):
            batch.validate(full=True)  # the lengths in a damaged file may be wrong
            yield from (batch.slice(first, _TEXT_ROWS) for first in range(0, len(batch), _TEXT_ROWS))
    except (pyarrow.ArrowException, UnicodeError, OSError, OverflowError) as error:
        reason = printable(str(error))[:120]
        raise UnreadableError(f"cannot be read as {suffix} ({reason}): save the data set again") from error


def _read_parquet(path: Path, check: Callable[[Any], int | None]) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        index = check(file.schema_arrow)
        columns = None if index is None else [file.schema_arrow.names[index]]
        check_ratio(file.metadata.num_rows, path)  # nulls take no bytes
        for group in range(file.metadata.num_row_groups):
            check_ratio(file.metadata.row_group(group).total_byte_size, path)
        yield from file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)


def _read_arrow(pyarrow: Any, path: Path, check: Callable[[Any], int | None]) -> Iterator[Any]:
    """Read the column, or all, of an IPC file or IPC stream (`datasets` writes streams), which must be complete.

    Raises UnreadableError for compressed batches of too many bytes before one is decompressed.
    """
    from pyarrow import ipc

    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        if not is_file and file.read(8) != _STREAM_END:
            raise UnreadableError("is cut short: save the data set again")
        try:
            _check_ipc_batches(file, path, is_file)
        except (struct.error, IndexError) as error:
            raise OSError("its metadata points outside of it") from error
    open_ipc = ipc.open_file if is_file else ipc.open_stream
    with pyarrow.OSFile(str(path)) as source:
        index = check(open_ipc(source).schema)
    options = ipc.IpcReadOptions(included_fields=None if index is None else [index], use_threads=False)
    with pyarrow.OSFile(str(path)) as source:
        reader = open_ipc(source, options=options)
        if is_file:
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from reader


# Metadata of an Arrow IPC message is a flatbuffer (format/Message.fbs, format/File.fbs of Apache Arrow): a table begins
# with the distance back to its vtable, which has the offset of each field, 0 for one that is absent.


def _flat_field(data: bytes, table: int, number: int) -> int | None:
    """Position of a table's field; None if it is absent."""
    vtable = table - _int(data, "i", table)
    offset = _int(data, "H", vtable + 4 + 2 * number) if 4 + 2 * number < _int(data, "H", vtable) else 0
    return table + offset if offset else None


def _flat_target(data: bytes, position: int | None) -> int:
    """What the offset at a position points to, such as a table, or a vector, which begins with its count."""
    if position is None:
        raise IndexError
    return position + _int(data, "I", position)


def _int(data: bytes, form: str, position: int) -> int:
    if position < 0:
        raise IndexError
    return int(struct.unpack_from("<" + form, data, position)[0])


def _check_ipc_batches(file: BinaryIO, path: Path, is_file: bool) -> None:
    """Raise UnreadableError if one batch or dictionary of an IPC file or stream decompresses to too many bytes."""
    size = os.fstat(file.fileno()).st_size

    def read(position: int, length: int) -> bytes:
        if not 0 <= length <= min(size, _MAX_STATE_BYTES):
            raise IndexError
        file.seek(position)
        return file.read(length)

    if not is_file:
        position = 0
        while position < size and (end := _check_ipc_message(read, position, path)):
            position = end
        return
    length = _int(read(size - 10, 4), "i", 0)
    footer = read(size - 10 - length, length)
    for number in (2, 3):  # dictionaries, batches: structs of 24 bytes that begin with the message's position
        if (field := _flat_field(footer, _int(footer, "I", 0), number)) is not None:
            vector = _flat_target(footer, field)
            for index in range(_int(footer, "I", vector)):
                _check_ipc_message(read, _int(footer, "q", vector + 4 + 24 * index), path)


def _check_ipc_message(read: Callable[[int, int], bytes], position: int, path: Path) -> int | None:
    """Return where the message at a position ends; None for the mark of the stream's end."""
    position += 4 if read(position, 4) == _STREAM_END[:4] else 0  # messages before Arrow 0.15 have no such mark
    if not (length := _int(read(position, 4), "i", 0)):
        return None
    data, body = read(position + 4, length), position + 4 + length
    message = _int(data, "I", 0)
    kind = _flat_field(data, message, 1)
    if kind is not None and data[kind] in (_DICTIONARY, _BATCH):
        batch = _flat_target(data, _flat_field(data, message, 2))
        if data[kind] == _DICTIONARY:
            batch = _flat_target(data, _flat_field(data, batch, 1))
        is_compressed = _flat_field(data, batch, 3) is not None or b"experimental_compression" in data
        buffers = _flat_field(data, batch, 2)
        if is_compressed and buffers is not None:
            vector = _flat_target(data, buffers)  # of structs: offset in the body, length
            offsets = [_int(data, "q", vector + 4 + 16 * index) for index in range(_int(data, "I", vector))]
            lengths = [_int(data, "q", vector + 12 + 16 * index) for index in range(len(offsets))]
            pairs = zip(offsets, lengths, strict=True)  # a compressed buffer begins with its own length; −1: it is not
            check_ratio(sum(max(_int(read(body + at, 8), "q", 0), 0) for at, length in pairs if length), path)
    body_length = _flat_field(data, message, 3)
    return body + (0 if body_length is None else max(_int(data, "q", body_length), 0))


def _check_column(schema: Any, column: str, path: Path, argument: str) -> int:
    """Return the index of a text column. Raises UnreadableError if it is missing, not text or there twice."""
    count, texts = schema.names.count(column), [field.name for field in schema if _is_text(field.type)]
    if count == 1 and column in texts:
        return int(schema.names.index(column))
    what = f"{count or 'no'} column{'s' * (count > 1)} '{printable(column)}'"
    if count == 1:
        what = f"{printable(str(schema.field(column).type))[:60]} in column '{printable(column)}', not text"
    if MESSAGES in schema.names:
        raise UnreadableError(f"has {what}, but {chat_remedy(path)}")
    names, listed = [name for name in texts if schema.names.count(name) == 1], ", ".join(map(printable, schema.names))
    remedy = naming_remedy(path, argument, column, names) if texts else "write the text to a column of its own"
    raise UnreadableError(f"has {what}: {remedy}; columns: {listed}")


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _saved_dataset_files(dataset: HFDataset, folder: Path) -> list[Path]:
    """Return the files of a data set saved with `save_to_disk`, in its order."""
    state_file = folder / "state.json"
    state = _read_json_object(state_file)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{dataset.display_name} was saved with a separate order of rows; save it again with a newer datasets."
        )
    if folder == dataset.path:
        _check_split(dataset, [] if state.get("_split") is None else [str(state["_split"])])
    if state.get("_data_files") == []:
        raise DataError(f"{dataset.display_name} has no rows: give a data set with some.")
    names = [entry.get("filename") for entry in state.get("_data_files") or [] if isinstance(entry, dict)]
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise DataError(
            f"data file {printable(str(state_file))} names no files of its folder: save the data set again."
        )
    return [folder / str(name) for name in names]


def _folder_files(dataset: HFDataset) -> tuple[list[Path], list[Path]]:
    """As `list_dataset_files`, for the files below a folder: those whose paths name the split, or all if none does."""
    files = sorted(_walk_files(dataset), key=lambda path: os.fsencode(path.relative_to(dataset.path).as_posix()))
    splits_by_file = {path: _split_names_in(path.relative_to(dataset.path)) for path in files}
    split_names = sorted(set().union(*splits_by_file.values()))
    if split_names:
        split = dataset.split or (split_names[0] if len(split_names) == 1 else "train")
        files = [path for path in files if split in splits_by_file[path]]
        if not files:
            raise DataError(
                f"{dataset.display_name} has no split '{printable(split)}'; splits: {', '.join(split_names)}"
            )
    else:
        _check_split(dataset, [])
    formats = sorted({_format_of(path) for path in files})
    if not files:
        raise DataError(
            f"{dataset.display_name} holds no {', '.join(DATASET_SUFFIXES)} file: give the folder of a saved data set."
        )
    if len(formats) > 1:
        raise DataError(
            f"{dataset.display_name} holds files of several formats ({', '.join(formats)}): name a file, or a folder."
        )
    unnamed = [path for path, names in splits_by_file.items() if not names and _format_of(path) in formats]
    return files, unnamed if split_names else []


def _format_of(path: Path) -> str:
    if path.suffix.lower() in ARROW_SUFFIXES:
        return "arrow"
    suffix = text_suffix(path)
    return ".jsonl" if suffix in JSON_LINES_SUFFIXES else suffix


def _walk_files(dataset: HFDataset) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise DataError(f"{dataset.display_name} cannot be read ({error.strerror}): make it readable.") from error

    for folder, subfolders, names in os.walk(dataset.path, onerror=unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (
            Path(folder, name)
            for name in names
            if not name.startswith(".") and text_suffix(Path(name)) in DATASET_SUFFIXES
        )


def _split_names_in(relative: Path) -> set[str]:
    words = set(re.split(r"[^a-z0-9]+", relative.as_posix().lower()))
    return {name for name, spellings in SPLIT_NAMES.items() if words & spellings}


def _check_split(dataset: HFDataset, available_splits: list[str]) -> None:
    """Raise DataError if the requested split is not one of `available_splits` (empty: a single unnamed split)."""
    if dataset.split is not None and dataset.split not in (available_splits or ["train"]):
        known = (
            f"; splits: {', '.join(map(printable, available_splits))}"
            if available_splits
            else ", nor another by name; leave split out"
        )
        raise DataError(f"{dataset.display_name} has no split '{printable(dataset.split)}'{known}")


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_STATE_BYTES:
            raise ValueError("it is too large")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data file {printable(str(path))} cannot be read as JSON: save the data set again.") from error
    return data if isinstance(data, dict) else {}


def _read_names(path: Path, key: str) -> list[str]:
    """Read a list of folder names from a JSON file. Raises DataError for anything but plain names."""
    names = _read_json_object(path).get(key)
    if not isinstance(names, list) or not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise DataError(f"data file {printable(str(path))} names no {key}: save the data set again.")
    return names


DEFAULT_ROWS = 100_000
MAX_ROWS = 10**9
MAX_BYTES = 4 * 1024**3  # of all rows: a stream also ends here
FILE_ROWS = 10_000
_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config_name>[\w.-]+))?(:(?P<split_name>[\w.-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """A parsed argument for the hub. config None: the data set's default. rows: maximum number of rows read."""

    name: str
    config: str | None
    split: str
    column: str
    rows: int

    @property
    def display_name(self) -> str:
        """The name in messages."""
        return f"data {HF_PREFIX}{self.name}"


@dataclass(frozen=True)
class _Receipt:
    """A record of one file of rows. is_last: whether the split ends with it. state: of the stream after it."""

    commit: str
    sha256: str
    rows: int
    bytes: int
    is_last: bool
    state: Any


def parse_hub_argument(argument: str) -> HubDataset | None:
    """Parse `hf:NAME[:CONFIG][:SPLIT],text=COLUMN,rows=N`; None for a path on this disk or an impossible name.

    If only one word follows the name, `train`, `validation` or `test` is the split. Raises DataError for a bad option.
    """
    text, options = split_options(argument)
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    config, split = match["config_name"], match["split_name"]
    if split is None and config in SPLIT_NAMES:
        config, split = None, config
    if split is not None and "split" in options:
        raise DataError(f"data {printable(argument)}: has split twice; keep one")
    rows = options.get("rows", str(DEFAULT_ROWS))
    if not rows.isascii() or not rows.isdecimal() or not 1 <= int(rows[:12]) <= MAX_ROWS:
        raise DataError(f"data {printable(argument)}: rows must be a number from 1 to {MAX_ROWS:,}")
    split = split or options.get("split", "train")
    return HubDataset(match["name"], config, split, options.get("text", "text"), int(rows))


def download_rows(dataset: HubDataset, cache: DataCache) -> list[Path]:
    """Return the files of a data set's first rows, in order, from the cache; missing ones are streamed from the hub.

    Raises DataError if the hub or the data set cannot be read, and MachineError.
    """
    paths: list[Path] = []
    receipts: list[_Receipt] = []
    for path in (_file_path(dataset, cache, number) for number in range(_file_count(dataset))):
        receipt = _read_receipt(cache, path)
        if receipt is None:
            break
        paths.append(path)
        receipts.append(receipt)
        if _is_over(receipts):
            return paths
    if len(paths) == _file_count(dataset):
        return paths
    try:
        stream = _Stream(dataset, receipts[-1] if receipts else None)
        rows_done = sum(receipt.rows for receipt in receipts)
        with progress.progress_bar(f"reading {dataset.name}", dataset.rows, "rows", rows_done) as bar:
            while len(paths) < _file_count(dataset) and not _is_over(receipts):
                path = _file_path(dataset, cache, len(paths))
                receipts.append(stream.write_file(path, min(FILE_ROWS, dataset.rows - len(paths) * FILE_ROWS), bar))
                cache.write_text(path.with_suffix(".receipt"), json.dumps(vars(receipts[-1])))
                paths.append(path)
    except HeddleError:
        raise
    except Exception as error:  # whatever the library raises for a bad name, split or network
        reason = printable(" ".join(str(error).split()))[:200] or type(error).__name__
        raise DataError(
            f"{dataset.display_name} is not on this disk and cannot be read from the hub ({reason}): "
            "check the name, the split and the network."
        ) from error
    return paths


class _Stream:
    """The rows of a data set, from its start or from where a receipt ends."""

    def __init__(self, dataset: HubDataset, receipt: _Receipt | None) -> None:
        library = optional_module("datasets")
        if library is None:
            raise DataError(f"{dataset.display_name} needs datasets to be streamed: {pip_install('hub')}.")
        from huggingface_hub import HfApi

        self._dataset = dataset
        self._commit = HfApi().dataset_info(dataset.name).sha or "main" if receipt is None else receipt.commit
        self._rows = library.load_dataset(
            dataset.name, dataset.config, split=dataset.split, streaming=True, revision=self._commit
        )
        names = self._rows.column_names
        if names is not None and dataset.column not in names:
            columns = ", ".join(map(printable, names))
            raise DataError(
                f"{dataset.display_name} has no column '{printable(dataset.column)}': name one with text=COLUMN; "
                f"columns: {columns}."
            )
        if receipt is not None:
            self._rows.load_state_dict(receipt.state)
        self._iterator: Iterator[dict[str, Any]] = iter(self._rows)

    def write_file(self, path: Path, count: int, bar: progress.ProgressBar) -> _Receipt:
        """Write the next `count` rows, or as many as are left. A row without text is written as empty text."""
        hasher, size, rows = hashlib.sha256(), 0, 0
        with replace_file(path, CACHE_REMEDY) as temporary, temporary.open("xb") as file:
            for row in islice(self._iterator, count):
                text = row.get(self._dataset.column)
                if text is not None and not isinstance(text, str):
                    raise DataError(
                        f"{self._dataset.display_name} has no text in column '{self._dataset.column}': "
                        "name another with text=COLUMN."
                    )
                line = json.dumps({"text": text or ""}).encode() + b"\n"
                if len(line) > MAX_JSON_LINE_BYTES:
                    raise DataError(f"{self._dataset.display_name} has a row of more than 16 MB: take fewer rows.")
                file.write(line)
                hasher.update(line)
                size, rows = size + len(line), rows + 1
                bar.advance(1)
        return _Receipt(self._commit, hasher.hexdigest(), rows, size, rows < count, self._rows.state_dict())


def _file_count(dataset: HubDataset) -> int:
    return -(-dataset.rows // FILE_ROWS)


def _file_path(dataset: HubDataset, cache: DataCache, number: int) -> Path:
    """Return a file's path in the cache. Requests for more rows of the same data set reuse all whole files."""
    rows = min(FILE_ROWS, dataset.rows - number * FILE_ROWS)
    return cache.path("jsonl", "hub", dataset.name, dataset.config, dataset.split, dataset.column, number, rows)


def _is_over(receipts: list[_Receipt]) -> bool:
    return bool(receipts) and (receipts[-1].is_last or sum(receipt.bytes for receipt in receipts) >= MAX_BYTES)


def _read_receipt(cache: DataCache, path: Path) -> _Receipt | None:
    """Return the receipt of a whole file; None if there is none, or, with a warning, if the file was altered."""
    text = cache.read_text(path.with_suffix(".receipt"))
    if text is None or not path.is_file():
        return None
    receipt = _Receipt(**json.loads(text))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == receipt.sha256:
            return receipt
    report_damage(path)
    return None
