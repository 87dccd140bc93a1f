"""Probes of recall and of state tracking: six tasks whose rows are drawn by arithmetic alone.

Each task is a frozen description. `rows(seed, indices)` is a pure function: the row of a seed and an index is the same
on every machine, in any batch. It gives inputs and targets, int64 [B, length] each; a target of −1 is not scored.
`chance` is the accuracy of picking blindly among the answers that the row leaves open.
"""

from dataclasses import dataclass
from itertools import permutations
from math import factorial

import numpy as np

from heddle.data.samples import mix, mix_array
from heddle.errors import DataError

UNSCORED = -1
BLANK = 0
LONGEST = 2**20
_GOLDEN = 0x9E3779B97F4A7C15

Rows = tuple[np.ndarray, np.ndarray]


def draws(seed: int, indices: np.ndarray, purpose: int, count: int) -> np.ndarray:
    """uint64 [B, count] that look random: a function of seed, the row's index int64 [B], and a purpose (SplitMix64)."""
    row = mix_array(indices.astype(np.uint64), mix(mix(seed & (2**64 - 1)) + purpose))
    return mix_array(row[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN), purpose)


def choose(drawn: np.ndarray, count: int) -> np.ndarray:
    """`count` different numbers below n for each row of uint64 [B, n], in random order: int64 [B, count]."""
    return np.argsort(drawn, axis=1, kind="stable")[:, :count]


def below(drawn: np.ndarray, limit: int) -> np.ndarray:
    """Numbers from 0 to limit − 1, int64, of uint64."""
    return (drawn % np.uint64(limit)).astype(np.int64)


def nothing(indices: np.ndarray, length: int) -> Rows:
    """Blank inputs and unscored targets."""
    shape = (len(indices), length)
    return np.full(shape, BLANK, dtype=np.int64), np.full(shape, UNSCORED, dtype=np.int64)


def check(name: str, value: int, low: int, high: int, why: str) -> None:
    """Raise DataError where an option is outside its bounds."""
    if not low <= value <= high:
        raise DataError(f"{name}={value}: must be from {low} to {high}, {why}")


@dataclass(frozen=True)
class Mqar:
    """Multi-query associative recall (Arora et al. 2023, Zoology).

    A row tells `pairs` keys, each with its value after it; later each key stands once more, at a random place among
    blanks, and there its value is the target. `keys` is the number of keys and of values there are.
    """

    pairs: int = 12
    keys: int = 24
    length: int = 36

    def __post_init__(self) -> None:
        check("length", self.length, 3, LONGEST, "room for a key, its value and a question")
        check("pairs", self.pairs, 1, self.length // 3, f"a third of length = {self.length}")
        check("keys", self.keys, self.pairs, 2**16, f"at least pairs = {self.pairs}")

    @property
    def vocab_size(self) -> int:
        """Blank, keys, values."""
        return 1 + 2 * self.keys

    @property
    def chance(self) -> float:
        """One of the row's values, picked blindly."""
        return 1 / self.pairs

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        inputs, targets = nothing(indices, self.length)
        told = 2 * self.pairs
        keys = 1 + choose(draws(seed, indices, 1, self.keys), self.pairs)
        values = 1 + self.keys + choose(draws(seed, indices, 2, self.keys), self.pairs)
        inputs[:, 0:told:2], inputs[:, 1:told:2] = keys, values
        places = told + choose(draws(seed, indices, 3, self.length - told), self.pairs)
        np.put_along_axis(inputs, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        return inputs, targets


@dataclass(frozen=True)
class Induction:
    """Induction heads (Olsson et al. 2022): what followed a token before follows it again.

    A row is a block of different tokens, between a quarter and a half of the row long, repeated to the row's end, so
    that no fixed distance answers. From its second round on each next token is the target.
    """

    words: int = 64
    length: int = 64

    def __post_init__(self) -> None:
        check("length", self.length, 8, LONGEST, "room for two rounds")
        check("words", self.words, self.length // 2, 2**16, f"at least half of length = {self.length}")

    @property
    def vocab_size(self) -> int:
        """The words."""
        return self.words

    @property
    def chance(self) -> float:
        """One of the block's tokens, picked blindly: right 1 time in the block's length."""
        blocks = range(self.length // 4, self.length // 2 + 1)
        return sum((self.length - block) / block for block in blocks) / sum(self.length - block for block in blocks)

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        shortest, longest = self.length // 4, self.length // 2
        block = shortest + below(draws(seed, indices, 1, 1), longest - shortest + 1)  # [B, 1]
        words = choose(draws(seed, indices, 2, self.words), longest)
        place = np.arange(self.length + 1)[None]
        row = np.take_along_axis(words, place % block, 1)
        return row[:, :-1].copy(), np.where(place[:, :-1] >= block, row[:, 1:], UNSCORED)


@dataclass(frozen=True)
class Copying:
    """Selective copying (Jing et al. 2019; Gu & Dao 2023, Mamba): `tokens` letters stand at random places among
    blanks; then a mark stands `tokens` times, and the targets there are the letters in their order.
    """

    tokens: int = 8
    letters: int = 16
    length: int = 64

    def __post_init__(self) -> None:
        check("length", self.length, 2, LONGEST, "room for a letter and its mark")
        check("tokens", self.tokens, 1, self.length // 2, f"half of length = {self.length}")
        check("letters", self.letters, 2, 2**16, "so that there is something to remember")

    @property
    def vocab_size(self) -> int:
        """Blank, mark, letters."""
        return 2 + self.letters

    @property
    def chance(self) -> float:
        """Any letter."""
        return 1 / self.letters

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        inputs, targets = nothing(indices, self.length)
        text = self.length - self.tokens
        letters = 2 + below(draws(seed, indices, 1, self.tokens), self.letters)
        places = np.sort(choose(draws(seed, indices, 2, text), self.tokens), axis=1)
        np.put_along_axis(inputs, places, letters, 1)
        inputs[:, text:] = 1
        targets[:, text:] = letters
        return inputs, targets


@dataclass(frozen=True)
class Needle:
    """Needles in a haystack (after Kamradt 2023): `needles` marks, each followed by a word, hide at random places in
    a text of random words; at the end the marks stand again in random order, and the targets are their words.
    """

    needles: int = 4
    words: int = 32
    length: int = 128

    def __post_init__(self) -> None:
        check("length", self.length, 4, LONGEST, "room for a needle and its question")
        check("needles", self.needles, 1, self.length // 4, f"a quarter of length = {self.length}")
        check("words", self.words, 2, 2**16, "so that there is something to find")

    @property
    def vocab_size(self) -> int:
        """Words and marks."""
        return self.words + self.needles

    @property
    def chance(self) -> float:
        """One of the words that stand after a mark; two needles may have the same word."""
        return 1 / self.needles + (1 - 1 / self.needles) / self.words

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        inputs, targets = nothing(indices, self.length)
        hay = self.length - self.needles
        inputs[:, :hay] = below(draws(seed, indices, 1, hay), self.words)
        # places of two tokens each, so that no needle is cut by another
        places = 2 * choose(draws(seed, indices, 2, hay // 2), self.needles)
        marks = self.words + choose(draws(seed, indices, 3, self.needles), self.needles)
        found = np.take_along_axis(inputs, places + 1, 1)
        np.put_along_axis(inputs, places, marks, 1)
        order = choose(draws(seed, indices, 4, self.needles), self.needles)
        inputs[:, hay:] = np.take_along_axis(marks, order, 1)
        targets[:, hay:] = np.take_along_axis(found, order, 1)
        return inputs, targets


@dataclass(frozen=True)
class Parity:
    """Parity (Hahn 2020): after each bit the target is whether the ones so far are odd in number."""

    length: int = 32

    def __post_init__(self) -> None:
        check("length", self.length, 1, LONGEST, "tokens of a row")

    @property
    def vocab_size(self) -> int:
        """Two bits."""
        return 2

    @property
    def chance(self) -> float:
        """A coin."""
        return 1 / 2

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        bits = below(draws(seed, indices, 1, self.length) >> np.uint64(32), 2)
        return bits, np.cumsum(bits, axis=1) % 2


@dataclass(frozen=True)
class Permutation:
    """State tracking in the symmetric group S_n (Merrill, Petty & Sabharwal 2024, The Illusion of State).

    Each token is a permutation of `elements` things, numbered in dictionary order; after each, the target is the
    product of all so far, the latest applied last: t_i = x_i ∘ t_{i−1}. S_5 is the smallest that no constant-depth
    circuit of thresholds is believed to track.
    """

    elements: int = 5
    length: int = 16

    def __post_init__(self) -> None:
        check("length", self.length, 1, LONGEST, "tokens of a row")
        check("elements", self.elements, 2, 6, "whose permutations make a small vocabulary")

    @property
    def vocab_size(self) -> int:
        """All permutations."""
        return factorial(self.elements)

    @property
    def chance(self) -> float:
        """Any permutation."""
        return 1 / self.vocab_size

    def rows(self, seed: int, indices: np.ndarray) -> Rows:
        """See the module."""
        every = np.array(list(permutations(range(self.elements))))  # [n!, n]: row p sends i to p[i]
        weights = self.elements ** np.arange(self.elements)
        numbers = np.zeros(self.elements**self.elements, dtype=np.int64)
        numbers[every @ weights] = np.arange(len(every))
        inputs = below(draws(seed, indices, 1, self.length), len(every))
        targets = np.empty_like(inputs)
        state = np.broadcast_to(np.arange(self.elements), (len(indices), self.elements))
        for place in range(self.length):
            state = np.take_along_axis(every[inputs[:, place]], state, 1)
            targets[:, place] = numbers[state @ weights]
        return inputs, targets


Task = Mqar | Induction | Copying | Needle | Parity | Permutation
TASKS: dict[str, type[Task]] = {
    "mqar": Mqar,
    "induction": Induction,
    "copying": Copying,
    "needle": Needle,
    "parity": Parity,
    "s5": Permutation,
}
