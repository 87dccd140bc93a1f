"""MQAR with several numbers of pairs in one stream, so that a single training gives accuracy over the number of pairs.

Arora et al. (2024, Based) train on a mixture of numbers of pairs, and report recall over the state's size. Here a row
is packed with documents of one number of pairs each: many short ones or a few long ones. So every row has the same
length and the same number of targets, and every number of pairs has the same share of the loss.

A document of n pairs uses the first 2 · n keys and values only. So the short documents, whose few tokens are soon
known, teach how to look a key up, and the long ones need only more of it.
"""

from dataclasses import dataclass

import numpy as np

from heddle.data.recall_tasks import InputsAndTargets, Mqar, check_option
from heddle.data.samples import splitmix64
from heddle.errors import DataError

MAX_PAIRS = 2**12
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class MqarMixture:
    """Rows of MQAR with `smallest`, 2 · `smallest`, … `pairs` pairs; row i has the number i of them, in turn.

    A document of n pairs has 3 · n tokens: each key with its value, then each key again.
    """

    pairs: int = 64
    smallest: int = 4

    def __post_init__(self) -> None:
        check_option("pairs", self.pairs, 1, MAX_PAIRS, "the largest number of pairs")
        check_option("smallest", self.smallest, 1, self.pairs, f"at most pairs = {self.pairs}")
        ratio = self.pairs // self.smallest
        if ratio * self.smallest != self.pairs or ratio & (ratio - 1):
            raise DataError(f"pairs={self.pairs}: must be smallest={self.smallest} times a power of two")

    @property
    def keys(self) -> int:
        """The number of different keys, and of different values."""
        return 2 * self.pairs

    @property
    def pair_counts(self) -> tuple[int, ...]:
        """The numbers of pairs, in the order of the rows."""
        return tuple(self.smallest << power for power in range((self.pairs // self.smallest).bit_length()))

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return 3 * self.pairs

    @property
    def vocab_size(self) -> int:
        """Blank, keys, values."""
        return 1 + 2 * self.keys

    @property
    def chance_accuracy(self) -> float:
        """Guess one of the document's values, over all numbers of pairs."""
        return sum(1 / count for count in self.pair_counts) / len(self.pair_counts)

    def pairs_of(self, row_indices: np.ndarray) -> np.ndarray:
        """The number of pairs of each row's documents: int64 [B]."""
        counts: np.ndarray = np.asarray(self.pair_counts)[row_indices % len(self.pair_counts)]
        return counts

    def doc_lengths(self, row_indices: np.ndarray) -> tuple[tuple[int, ...], ...]:
        """The lengths of the documents of each row."""
        return tuple((3 * count,) * (self.pairs // count) for count in self.pairs_of(row_indices).tolist())

    def draw_rows(self, seed: int, row_indices: np.ndarray) -> InputsAndTargets:
        """Inputs and targets, int64 [B, length] each; a function of the seed and the rows' numbers."""
        inputs = np.empty((len(row_indices), self.length), dtype=np.int64)
        targets = np.empty_like(inputs)
        for count in self.pair_counts:
            rows = np.flatnonzero(self.pairs_of(row_indices) == count)
            documents = self.pairs // count
            numbers = (row_indices[rows, None] * documents + np.arange(documents)).ravel()
            own_seed = splitmix64((seed + count * _GOLDEN_GAMMA) & (2**64 - 1))  # other draws for each number of pairs
            drawn = Mqar(count, 2 * count, 3 * count).draw_rows(own_seed, numbers)
            for rows_of_all, tokens in zip((inputs, targets), drawn, strict=True):
                tokens = np.where(
                    tokens > 2 * count, tokens + self.keys - 2 * count, tokens
                )  # values come after all keys
                rows_of_all[rows] = tokens.reshape(len(rows), self.length)
        return inputs, targets
