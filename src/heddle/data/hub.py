"""`hf:NAME[:CONFIG][:SPLIT]`: a text column of a data set of the Hugging Face hub, streamed once into the cache.

The first rows are kept there as JSON lines, in files of 10,000 rows, and every later run reads these: the same bytes,
without a network. A stream that was cut short goes on after the last whole file, at the same commit of the data set.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.cache import CACHE_REMEDY, DataCache, report_damage
from heddle.data.documents import MAX_JSON_LINE_BYTES
from heddle.data.hf_datasets import HF_PREFIX, SPLIT_NAMES, split_options
from heddle.errors import DataError, HeddleError
from heddle.numerics.dispatch.libraries import optional_module
from heddle.progress import printable
from heddle.storage.atomic import replace_file

DEFAULT_ROWS = 100_000
MAX_ROWS = 10**9
MAX_BYTES = 4 * 1024**3  # of all rows: a stream ends here, too
FILE_ROWS = 10_000
_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config_name>[\w.-]+))?(:(?P<split_name>[\w.-]+))?")


@dataclass(frozen=True)
class HubDataset:
    """A parsed argument. config None: the data set's default. rows: how many are read, at most."""

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
    """What is known of a file of rows. is_last: whether the split ends with it. state: of the stream after it."""

    commit: str
    sha256: str
    rows: int
    bytes: int
    is_last: bool
    state: Any


def parse_hub_argument(argument: str) -> HubDataset | None:
    """Parse `hf:NAME[:CONFIG][:SPLIT],text=COLUMN,rows=N`; None for what is on this disk or can be no such name.

    Of one word after the name, `train`, `validation` or `test` is the split. Raises DataError for a bad option.
    """
    text, options = split_options(argument)
    match = _NAME.fullmatch(text)
    if match is None or Path(text).exists():
        return None
    config, split = match["config_name"], match["split_name"]
    if split is None and config in SPLIT_NAMES:
        config, split = None, config
    if split is not None and "split" in options:
        raise DataError(f"data {printable(argument)}: gives split twice; keep one")
    rows = options.get("rows", str(DEFAULT_ROWS))
    if not rows.isascii() or not rows.isdecimal() or not 1 <= int(rows[:12]) <= MAX_ROWS:
        raise DataError(f"data {printable(argument)}: rows must be a number from 1 to {MAX_ROWS:,}")
    split = split or options.get("split", "train")
    return HubDataset(match["name"], config, split, options.get("text", "text"), int(rows))


def download_rows(dataset: HubDataset, cache: DataCache) -> list[Path]:
    """The files of the first rows of a data set, in order: those of the cache, and what is missing from the hub.

    Raises DataError where the hub or the data set cannot be read, and MachineError.
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
    except Exception as error:  # whatever the library raises, for a name, a split or a network
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
            raise DataError(f"{dataset.display_name} needs datasets to be streamed: pip install 'heddle-lm[hub]'.")
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
        """Write the next `count` rows, or as many as are left. A row without text is an empty one."""
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
    """The cache's path of a file. More rows of the same data set share all whole files."""
    rows = min(FILE_ROWS, dataset.rows - number * FILE_ROWS)
    return cache.path("jsonl", "hub", dataset.name, dataset.config, dataset.split, dataset.column, number, rows)


def _is_over(receipts: list[_Receipt]) -> bool:
    return bool(receipts) and (receipts[-1].is_last or sum(receipt.bytes for receipt in receipts) >= MAX_BYTES)


def _read_receipt(cache: DataCache, path: Path) -> _Receipt | None:
    """The receipt of a whole file. None where there is none, or with a warning where a byte was altered."""
    text = cache.read_text(path.with_suffix(".receipt"))
    if text is None or not path.is_file():
        return None
    receipt = _Receipt(**json.loads(text))
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == receipt.sha256:
            return receipt
    report_damage(path)
    return None
