"""Labeled rows from your own arrays: tokens, labels at chosen positions, and optional 2-D coordinates.

A label is a token id: the model's head chooses among the whole vocabulary. A classifier has one label per row, at a
token that attends to all others; a tagger has a label at every token.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from heddle.data.samples import Batch, epoch_shuffle
from heddle.errors import DataError


@dataclass(frozen=True, eq=False)
class LabeledRows:
    """tokens int [N, T]; labels int [N, T], −1 where the loss ignores the position; coordinates [N, T, 2] or None.

    Coordinates are x and y of each token. Raises DataError if shapes or dtypes do not fit, or every label is −1.
    """

    tokens: np.ndarray
    labels: np.ndarray
    coordinates: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = list(self.tokens.shape)
        if self.tokens.ndim != 2 or 0 in shape:
            raise DataError(f"labeled rows: tokens have shape {shape}; expected [rows, length], both above 0.")
        for name, array, minimum in (("tokens", self.tokens, 0), ("labels", self.labels, -1)):
            if list(array.shape) != shape:
                raise DataError(f"labeled rows: {name} have shape {list(array.shape)}; expected {shape}, as tokens.")
            if array.dtype.kind not in "iu" or int(array.min()) < minimum:
                raise DataError(f"labeled rows: {name} must be integers of at least {minimum}.")
        if not (self.labels >= 0).any():
            raise DataError("labeled rows: every label is −1, so there is nothing to learn; give some of at least 0.")
        if self.coordinates is not None and list(self.coordinates.shape) != [*shape, 2]:
            raise DataError(
                f"labeled rows: coordinates have shape {list(self.coordinates.shape)}; expected {[*shape, 2]}."
            )
        if self.coordinates is not None and (
            self.coordinates.dtype.kind not in "iuf" or not np.isfinite(self.coordinates).all()
        ):
            raise DataError("labeled rows: coordinates must be finite numbers.")

    def batch(self, row_indices: np.ndarray, sample_indices: np.ndarray) -> Batch:
        """Return the rows of these indices, int64 [B], each as one document."""
        tokens = np.pad(
            self.tokens[row_indices].astype(np.int64), ((0, 0), (0, 1))
        )  # a last column that no label reads
        coordinates = None if self.coordinates is None else self.coordinates[row_indices].astype(np.float32)
        doc_lengths = ((self.tokens.shape[1],),) * len(row_indices)
        return Batch(
            tokens,
            doc_lengths,
            sample_indices,
            labels=self.labels[row_indices].astype(np.int64),
            coordinates=coordinates,
        )

    @property
    def hash(self) -> str:
        """Return the SHA-256 of all arrays, with their shapes."""
        digest = hashlib.sha256()
        for array in (self.tokens.astype("<i8"), self.labels.astype("<i8"), self.coordinates):
            if array is not None:
                contiguous = np.ascontiguousarray(array)
                digest.update(f"{contiguous.dtype.str}{contiguous.shape}".encode())
                digest.update(contiguous.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class LabeledDataset:
    """Training and test rows of one length; both have coordinates, or neither has."""

    train: LabeledRows
    test: LabeledRows
    causal: ClassVar[bool] = False  # tokens contain no labels, so attention may see later tokens

    def __post_init__(self) -> None:
        if self.train.tokens.shape[1] != self.test.tokens.shape[1]:
            lengths = f"{self.train.tokens.shape[1]} and {self.test.tokens.shape[1]}"
            raise DataError(f"labeled rows: train and test have rows of {lengths} tokens; they must be equal.")
        if (self.train.coordinates is None) != (self.test.coordinates is None):
            raise DataError(
                "labeled rows: only one of train and test has coordinates; give them to both or to neither."
            )

    @property
    def length(self) -> int:
        """Return the tokens per row."""
        return int(self.train.tokens.shape[1])

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest token or label."""
        return 1 + max(int(array.max()) for rows in (self.train, self.test) for array in (rows.tokens, rows.labels))

    def batch(self, seed: int, first_row: int, num_rows: int) -> Batch:
        """Return `num_rows` rows from `first_row` on, in an endless order that is reshuffled every epoch."""
        sample_indices = np.arange(first_row, first_row + num_rows, dtype=np.int64)
        return self.train.batch(epoch_shuffle(sample_indices, len(self.train.tokens), (seed, 0)), sample_indices)

    def validation_batches(self, num_rows: int, batch_size: int) -> Iterator[Batch]:
        """Yield the first `num_rows` test rows, or all of them if there are fewer."""
        num_rows = min(num_rows, len(self.test.tokens))
        for first in range(0, num_rows, batch_size):
            row_indices = np.arange(first, min(first + batch_size, num_rows), dtype=np.int64)
            yield self.test.batch(row_indices, row_indices)

    def describe(self) -> dict[str, Any]:
        """Return plain data: the number of rows and the hash of their content."""
        splits = {"train": self.train, "test": self.test}
        summary = {name: {"rows": len(rows.tokens), "hash": rows.hash} for name, rows in splits.items()}
        return {"length": self.length, "vocab_size": self.vocab_size, **summary}
