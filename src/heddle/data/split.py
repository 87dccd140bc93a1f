"""The training and validation split of a source, and even samples of either; both depend on the content alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from heddle.data.sources import ScannedSource, is_in_validation
from heddle.errors import DataError

# A split with less than this fraction of the characters counts as empty: it would be too small to be useful.
MIN_SPLIT_FRACTION = 0.01
TAIL_FRACTION = 0.05
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class SplitSize:
    """The size of one split of a source; exact where the method is "hash", else approximate."""

    documents: int
    bytes: int


@dataclass(frozen=True)
class SourceSplit:
    """How one source is split: `method` is "hash", or "tail": the first `train_characters` are for training."""

    source: ScannedSource
    method: str
    train_characters: int

    def documents(self, split: str) -> Iterator[str]:
        """The documents of one split, in the order of the source."""
        return self._by_hash(split) if self.method == "hash" else self._by_position(split)

    def size(self, split: str) -> SplitSize:
        """Documents and bytes of one split."""
        counts = self.source.counts
        if self.method == "hash":
            validation = SplitSize(counts.validation_documents, counts.validation_bytes)
            train = SplitSize(counts.documents - validation.documents, counts.bytes - validation.bytes)
            return train if split == TRAIN else validation
        fraction = (
            self.train_characters / counts.characters
            if split == TRAIN
            else 1 - self.train_characters / counts.characters
        )
        return SplitSize(max(1, round(counts.documents * fraction)), max(1, round(counts.bytes * fraction)))

    def sample(self, split: str, fraction: float) -> Iterator[str]:
        """About this fraction (0 to 1) of a split's documents, evenly spread; larger samples include smaller ones."""
        limit = int(min(fraction, 1.0) * 2**64)
        for index, text in enumerate(self.documents(split)):
            # The first document always belongs to it, so that a sample is never empty.
            if index == 0 or _document_hash(index) < limit:
                yield text

    def _by_hash(self, split: str) -> Iterator[str]:
        for text in self.source.read():
            if is_in_validation(hashlib.sha256(text.encode("utf-8")).digest()) == (split == VALIDATION):
                yield text

    def _by_position(self, split: str) -> Iterator[str]:
        characters_before = 0
        for text in self.source.read():
            cut = min(max(self.train_characters - characters_before, 0), len(text))
            characters_before += len(text)
            part = text[:cut] if split == TRAIN else text[cut:]
            if part:
                yield part
            if split == TRAIN and characters_before >= self.train_characters:
                return


def split_source(source: ScannedSource) -> SourceSplit:
    """Split a source: one document in twenty, chosen by its hash, is for validation.

    Where that leaves a split with less than 1 % of the characters, the last 5 % of the text is for validation. Raises
    DataError for fewer than two characters.
    """
    counts = source.counts
    validation_fraction = counts.validation_characters / counts.characters
    if MIN_SPLIT_FRACTION <= validation_fraction <= 1 - MIN_SPLIT_FRACTION:
        return SourceSplit(source, "hash", 0)
    if counts.characters < 2:
        raise DataError(f"data {source.name} holds a single character: give more text.")
    train_characters = min(max(1, int(counts.characters * (1 - TAIL_FRACTION))), counts.characters - 1)
    return SourceSplit(source, "tail", train_characters)


def _document_hash(index: int) -> int:
    """A fixed pseudo-random number below 2**64 for the index of a document (SplitMix64)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)
