"""`hf:PATH,text=COLUMN,split=NAME`: the text column of a data set on this disk, read a batch of rows at a time.

PATH is a folder that `datasets` saved (`save_to_disk`), a .parquet, .arrow or .jsonl file, or a folder of such files.
No code of a data set is run. What is not on this disk is a name of the hub (`heddle.data.hub`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.data.compressed import UnreadableError, check_is_file, import_pyarrow, text_suffix
from heddle.data.documents import documents_from_bytes, read_documents
from heddle.errors import DataError, describe_path
from heddle.progress import printable

HF_PREFIX = "hf:"
OPTIONS = ("text", "split", "rows")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
DATASET_SUFFIXES = (".parquet", *ARROW_SUFFIXES, ".jsonl")
# A file belongs to a split if one of these words is in its path.
SPLIT_NAMES = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_OPTION = re.compile(r"(?P<rest>.*),(?P<key>\w+)=(?P<value>[^,]*)", re.DOTALL)
_BATCH_ROWS = 256  # rows read at a time
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class HFDataset:
    """A parsed `hf:` argument. split None: train, or the only split there is."""

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
    """Cut the options `,name=value` off an argument without its `hf:`. Raises DataError for one that is unknown."""
    path_text, options = argument.removeprefix(HF_PREFIX), dict[str, str]()
    while match := _OPTION.fullmatch(path_text):
        path_text, key, value = match["rest"], match["key"], match["value"]
        if key not in OPTIONS or not value:
            raise DataError(
                f"data {printable(argument)}: has no option '{key}={value}'; choices: text=COLUMN, split=NAME, rows=N"
            )
        if key in options:
            raise DataError(f"data {printable(argument)}: gives {key} twice; keep one")
        options[key] = value
    return path_text, options


def parse_hf_argument(argument: str) -> HFDataset:
    """Parse `hf:PATH,text=COLUMN,split=NAME` of this disk. Raises DataError for a path that is not there."""
    path_text, options = split_options(argument)
    dataset = HFDataset(Path(path_text), options.get("text", "text"), options.get("split"))
    what = describe_path(dataset.path) if path_text else "does not exist"
    if what not in ("is a file", "is a folder"):
        raise DataError(f"{dataset.display_name} {what}: give a folder or file on this disk, or OWNER/NAME of the hub.")
    if "rows" in options:
        raise DataError(f"{dataset.display_name} is on this disk: rows is for data sets of the hub; leave it out.")
    return dataset


def list_dataset_files(dataset: HFDataset) -> list[Path]:
    """The files of the split, in order. Raises DataError, naming the existing splits, where it is missing."""
    path = dataset.path
    if path.is_file():
        if text_suffix(path) not in DATASET_SUFFIXES:
            raise DataError(
                f"{dataset.display_name} is not a {', '.join(DATASET_SUFFIXES)} file: "
                "give one, or a folder of such files."
            )
        _check_split(dataset, [])
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = _read_names(path / "dataset_dict.json", "splits")
        name = dataset.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if name not in splits:
            raise DataError(f"{dataset.display_name} has no split '{name}'; splits: {', '.join(splits)}")
        path = path / name
    if (path / "state.json").is_file():
        return _saved_dataset_files(dataset, path)
    return _folder_files(dataset)


def read_any_text(path: Path) -> Iterator[str]:
    """Yield the documents of any file of text: of a Parquet or Arrow file its column `text`."""
    if path.suffix.lower() in (".parquet", *ARROW_SUFFIXES):
        yield from read_column(path, "text")
    else:
        yield from read_documents(path)


def read_column(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of one column: each row's text, split as `read_documents` splits files; nulls are skipped.

    Raises UnreadableError, naming the existing columns where this one is missing.
    """
    suffix = path.suffix.lower()
    if text_suffix(path) == ".jsonl":
        yield from read_documents(path, column)
        return
    pyarrow = import_pyarrow()
    check_is_file(path)
    try:
        batches = _read_parquet(path, column) if suffix == ".parquet" else _read_arrow(pyarrow, path, column)
        for batch in batches:
            batch.validate(full=True)  # the lengths in a damaged file may be wrong
            for first in range(0, len(batch), _BATCH_ROWS):
                for text in batch.slice(first, _BATCH_ROWS).to_pylist():
                    if text is not None:
                        yield from documents_from_bytes(text.encode("utf-8"))
    except (pyarrow.ArrowException, UnicodeError, OSError, OverflowError) as error:
        reason = printable(str(error))[:120]
        raise UnreadableError(f"cannot be read as {suffix} ({reason}): save the data set again") from error


def _read_parquet(path: Path, column: str) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        _check_column(file.schema_arrow, column)
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column], use_threads=False):
            yield batch.column(0)


def _read_arrow(pyarrow: Any, path: Path, column: str) -> Iterator[Any]:
    """Read a column of an IPC file or of an IPC stream (which `datasets` writes), which must be complete."""
    from pyarrow import ipc

    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(-min(8, os.fstat(file.fileno()).st_size), os.SEEK_END)
        if not is_file and file.read(8) != _STREAM_END:
            raise UnreadableError("is cut short: save the data set again")
    open_ipc = ipc.open_file if is_file else ipc.open_stream
    with pyarrow.OSFile(str(path)) as source:
        index = _check_column(open_ipc(source).schema, column)
    options = ipc.IpcReadOptions(included_fields=[index], use_threads=False)
    with pyarrow.OSFile(str(path)) as source:
        reader = open_ipc(source, options=options)
        if is_file:
            yield from (reader.get_batch(number).column(0) for number in range(reader.num_record_batches))
        else:
            yield from (batch.column(0) for batch in reader)


def _check_column(schema: Any, column: str) -> int:
    """The index of a text column. Raises UnreadableError where it is missing or not text."""
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


def _saved_dataset_files(dataset: HFDataset, folder: Path) -> list[Path]:
    """The files of a data set saved with `save_to_disk`, in its order."""
    state_file = folder / "state.json"
    state = _read_json_object(state_file)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{dataset.display_name} was saved with a separate order of rows; save it again with a newer datasets."
        )
    if folder == dataset.path:
        _check_split(dataset, [] if state.get("_split") is None else [str(state["_split"])])
    names = [entry.get("filename") for entry in state.get("_data_files") or [] if isinstance(entry, dict)]
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise DataError(
            f"data file {printable(str(state_file))} names no files of its folder: save the data set again."
        )
    return [folder / str(name) for name in names]


def _folder_files(dataset: HFDataset) -> list[Path]:
    """The files below a folder whose paths name the split; all files where no path names a split."""
    files = sorted(_walk_files(dataset), key=lambda path: os.fsencode(path.relative_to(dataset.path).as_posix()))
    splits_by_file = {path: _split_names_in(path.relative_to(dataset.path)) for path in files}
    split_names = sorted(set().union(*splits_by_file.values()))
    if split_names:
        split = dataset.split or "train"
        files = [path for path in files if split in splits_by_file[path]]
        if not files:
            raise DataError(
                f"{dataset.display_name} has no split '{printable(split)}'; splits: {', '.join(split_names)}"
            )
    else:
        _check_split(dataset, [])
    formats = sorted({"arrow" if path.suffix.lower() in ARROW_SUFFIXES else text_suffix(path) for path in files})
    if not files:
        raise DataError(
            f"{dataset.display_name} holds no {', '.join(DATASET_SUFFIXES)} file: give the folder of a saved data set."
        )
    if len(formats) > 1:
        raise DataError(
            f"{dataset.display_name} holds files of several formats ({', '.join(formats)}): name a file, or a folder."
        )
    return files


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
    """Raise DataError where the requested split is not one of `available_splits` (none: a single unnamed split)."""
    if dataset.split is not None and dataset.split not in (available_splits or ["train"]):
        known = (
            f"; splits: {', '.join(map(printable, available_splits))}"
            if available_splits
            else ", nor another by name; leave split out"
        )
        raise DataError(f"{dataset.display_name} has no split '{printable(dataset.split)}'{known}")


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
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
