"""`hf:PATH,text=COLUMN,split=NAME`: texts of a column, from data sets on this disk, read a batch of rows at a time.

PATH is a folder that `datasets` saved (`save_to_disk`), a .parquet, .arrow or .jsonl file, or a folder of such files.
Nothing is fetched, and no code of a data set is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.data.documents import UnreadableError, documents_of, read_documents
from heddle.errors import DataError
from heddle.progress import printable

PREFIX = "hf:"
ARROW = (".arrow", ".feather", ".ipc")
FORMATS = (".parquet", *ARROW, ".jsonl")
# A file belongs to a split when one of these words stands in its path.
SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_OPTION = re.compile(r"(?P<rest>.*),(?P<key>\w+)=(?P<value>[^,]*)", re.DOTALL)
_ROWS = 256  # of a parquet file at a time
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class Table:
    """A `hf:` argument taken apart; split None: train, or the only one there is."""

    path: Path
    column: str
    split: str | None

    @property
    def shown(self) -> str:
        """For messages."""
        return f"data {PREFIX}{printable(str(self.path))}"


def is_table(argument: str) -> bool:
    """Whether a `--data` argument names a data set; a file of such a name is written ./hf:…"""
    return argument.startswith(PREFIX)


def parse_table(argument: str) -> Table:
    """`hf:PATH,text=COLUMN,split=NAME` taken apart. Raises DataError for another option, or one given twice."""
    rest, options = argument.removeprefix(PREFIX), dict[str, str]()
    while match := _OPTION.fullmatch(rest):
        rest, key, value = match["rest"], match["key"], match["value"]
        if key not in ("text", "split") or not value:
            raise DataError(
                f"data {printable(argument)}: has no option '{key}={value}'; choices: text=COLUMN, split=NAME"
            )
        if key in options:
            raise DataError(f"data {printable(argument)}: says {key} twice; keep one")
        options[key] = value
    table = Table(Path(rest), options.get("text", "text"), options.get("split"))
    if not rest or "\0" in rest or not table.path.exists():
        raise DataError(f"{table.shown} does not exist: give a folder or file of this disk; nothing is fetched.")
    return table


def table_files(table: Table) -> list[Path]:
    """The files of the split, in order. Raises DataError, naming the splits there are, where it is missing."""
    path = table.path
    if path.is_file():
        if path.suffix.lower() not in FORMATS:
            raise DataError(f"{table.shown} is no {', '.join(FORMATS)} file: give one, or a folder that holds some.")
        _check_split(table, [])
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _strings(path / "dataset_dict.json", "splits")
        name = table.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if name not in splits:
            raise DataError(f"{table.shown} has no split '{name}'; splits: {', '.join(splits)}")
        path = path / name
    if (path / "state.json").is_file():
        return _saved(table, path)
    return _found(table)


def read_table(path: Path, column: str) -> Iterator[str]:
    """The documents of one column: each row's text, cut as `read_documents` cuts files; a null is no text.

    Raises UnreadableError, naming the columns where there is no such one, and DataError where pyarrow is missing.
    """
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from read_documents(path, column)
        return
    pyarrow = _pyarrow(path)
    try:
        batches = _parquet(path, column) if suffix == ".parquet" else _arrow(pyarrow, path, column)
        for batch in batches:
            batch.validate(full=True)  # what a damaged file says of lengths is not believed
            for first in range(0, len(batch), _ROWS):
                for text in batch.slice(first, _ROWS).to_pylist():
                    if text is not None:
                        yield from documents_of(text.encode("utf-8"))
    except (pyarrow.ArrowException, UnicodeError, OSError, OverflowError) as error:
        reason = printable(str(error))[:120]
        raise UnreadableError(f"cannot be read as {suffix} ({reason}): save the data set again") from error


def _parquet(path: Path, column: str) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        _check_column(file.schema_arrow, column)
        for batch in file.iter_batches(_ROWS, columns=[column], use_threads=False):
            yield batch.column(0)


def _arrow(pyarrow: Any, path: Path, column: str) -> Iterator[Any]:
    """Columns of an IPC file or, as `datasets` writes it, of an IPC stream, which must have its end."""
    from pyarrow import ipc

    with open(path, "rb") as raw:
        is_file = raw.read(6) == b"ARROW1"
        raw.seek(-min(8, os.fstat(raw.fileno()).st_size), os.SEEK_END)
        if not is_file and raw.read(8) != _STREAM_END:
            raise UnreadableError("is cut short: save the data set again")
    open_it = ipc.open_file if is_file else ipc.open_stream
    with pyarrow.OSFile(str(path)) as source:
        index = _check_column(open_it(source).schema, column)
    options = ipc.IpcReadOptions(included_fields=[index], use_threads=False)
    with pyarrow.OSFile(str(path)) as source:
        reader = open_it(source, options=options)
        if is_file:
            yield from (reader.get_batch(number).column(0) for number in range(reader.num_record_batches))
        else:
            yield from (batch.column(0) for batch in reader)


def _check_column(schema: Any, column: str) -> int:
    """Where a column of text stands."""
    from pyarrow import types

    if schema.names.count(column) != 1:
        names = ", ".join(printable(name) for name in schema.names)
        raise UnreadableError(f"has no column '{printable(column)}': name one with text=COLUMN; columns: {names}")
    index = schema.names.index(column)
    kind = schema.field(index).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UnreadableError(f"has {printable(str(kind))[:60]} in column '{column}', not text: name another")
    return int(index)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"data file {printable(str(path))} needs pyarrow to be read: pip install 'heddle-lm[data]'."
        ) from error
    return pyarrow


def _saved(table: Table, folder: Path) -> list[Path]:
    """The files of one saved data set, in its own order."""
    state = folder / "state.json"
    one = _object(state)
    if one.get("_indices_data_files"):
        raise DataError(f"{table.shown} was saved with an order beside it; save it again with a newer datasets.")
    if folder == table.path:
        _check_split(table, [] if one.get("_split") is None else [str(one["_split"])])
    names = [entry.get("filename") for entry in one.get("_data_files") or [] if isinstance(entry, dict)]
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise DataError(f"data file {printable(str(state))} names no files of its folder: save the data set again.")
    return [folder / str(name) for name in names]


def _found(table: Table) -> list[Path]:
    """The files below a folder whose paths name the split; all of them where no path names any."""
    files = sorted(_below(table), key=lambda path: os.fsencode(path.relative_to(table.path).as_posix()))
    known = {path: _splits_of(path.relative_to(table.path)) for path in files}
    named = sorted(set().union(*known.values()))
    if named:
        wanted = table.split or "train"
        files = [path for path in files if wanted in known[path]]
        if not files:
            raise DataError(f"{table.shown} has no split '{printable(wanted)}'; splits: {', '.join(named)}")
    else:
        _check_split(table, [])
    kinds = sorted({"arrow" if path.suffix.lower() in ARROW else path.suffix.lower() for path in files})
    if not files:
        raise DataError(f"{table.shown} holds no {', '.join(FORMATS)} file: give the folder of a saved data set.")
    if len(kinds) > 1:
        raise DataError(f"{table.shown} holds files of several formats ({', '.join(kinds)}): name a file, or a folder.")
    return files


def _below(table: Table) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise DataError(f"{table.shown} cannot be read ({error.strerror}): make it readable.") from error

    for folder, inner, names in os.walk(table.path, onerror=unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith(".") and name.lower().endswith(FORMATS))


def _splits_of(relative: Path) -> set[str]:
    words = set(re.split(r"[^a-z0-9]+", relative.as_posix().lower()))
    return {name for name, spellings in SPLITS.items() if words & spellings}


def _check_split(table: Table, there: list[str]) -> None:
    """Refuse a split that was asked for where there is another one, or none by name."""
    if table.split is not None and table.split not in (there or ["train"]):
        known = f"; splits: {', '.join(map(printable, there))}" if there else ", nor another by name; leave split out"
        raise DataError(f"{table.shown} has no split '{printable(table.split)}'{known}")


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data file {printable(str(path))} cannot be read as JSON: save the data set again.") from error
    return data if isinstance(data, dict) else {}


def _strings(path: Path, key: str) -> list[str]:
    """A list of names in a JSON file, each one a folder beside it."""
    names = _object(path).get(key)
    if not isinstance(names, list) or not names or any(not isinstance(n, str) or Path(n).name != n for n in names):
        raise DataError(f"data file {printable(str(path))} names no {key}: save the data set again.")
    return names
