"""Which documents train and which validate, and even samples of either that depend on nothing but the content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from heddle.data.sources import Survey, is_held_out
from heddle.errors import DataError

# A side with less than this share of the characters counts as empty: it would measure or teach nothing.
SMALLEST_SHARE = 0.01
TAIL_SHARE = 0.05
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Side:
    """About how much one side of a source holds; exact where the split is by hash."""

    documents: int
    bytes: int


@dataclass(frozen=True)
class Split:
    """How one source is divided: `kind` is "hash", or "tail" with `edge` characters for training and then the rest."""

    survey: Survey
    kind: str
    edge: int

    def documents(self, side: str) -> Iterator[str]:
        """The documents of one side, in the source's order."""
        return self._by_hash(side) if self.kind == "hash" else self._by_place(side)

    def size(self, side: str) -> Side:
        """Documents and bytes of one side."""
        tally = self.survey.tally
        if self.kind == "hash":
            held = Side(tally.held_documents, tally.held_bytes)
            rest = Side(tally.documents - held.documents, tally.bytes - held.bytes)
            return rest if side == TRAIN else held
        share = self.edge / tally.characters if side == TRAIN else 1 - self.edge / tally.characters
        return Side(max(1, round(tally.documents * share)), max(1, round(tally.bytes * share)))

    def sample(self, side: str, share: float) -> Iterator[str]:
        """About this share (0 to 1) of one side's documents, spread evenly; a larger share holds a smaller one."""
        limit = int(min(share, 1.0) * 2**64)
        for index, text in enumerate(self.documents(side)):
            # The first always belongs, so that a sample is never empty.
            if index == 0 or _draw(index) < limit:
                yield text

    def _by_hash(self, side: str) -> Iterator[str]:
        for text in self.survey.read():
            if is_held_out(hashlib.sha256(text.encode("utf-8")).digest()) == (side == VALIDATION):
                yield text

    def _by_place(self, side: str) -> Iterator[str]:
        passed = 0
        for text in self.survey.read():
            cut = min(max(self.edge - passed, 0), len(text))
            passed += len(text)
            part = text[:cut] if side == TRAIN else text[cut:]
            if part:
                yield part
            if side == TRAIN and passed >= self.edge:
                return


def split(survey: Survey) -> Split:
    """One document in twenty validates, chosen by its hash; where a side would be empty, the last 5 % of the text.

    A side with less than 1 % of the characters counts as empty. Raises DataError for less than two
    characters.
    """
    tally = survey.tally
    held = tally.held_characters / tally.characters
    if SMALLEST_SHARE <= held <= 1 - SMALLEST_SHARE:
        return Split(survey, "hash", 0)
    if tally.characters < 2:
        raise DataError(f"data {survey.name} holds a single character: give more text.")
    edge = min(max(1, int(tally.characters * (1 - TAIL_SHARE))), tally.characters - 1)
    return Split(survey, "tail", edge)


def _draw(index: int) -> int:
    """A fixed pseudo-random number below 2**64 for a document's place (SplitMix64)."""
    value = (index + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)
