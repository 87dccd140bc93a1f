"""The order of samples: a pure function of seed and step, so a run resumes by its step number alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, isqrt, lcm

import numpy as np

from heddle.data.token_file import TokenFile
from heddle.errors import DataError

LONGEST_CYCLE = 10_000
_ROUNDS = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Batch:
    """Rows of consecutive tokens: inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]` unless `answers` are given.

    tokens int64 [B, T + 1]. lengths: for each row the lengths of the document pieces inside its T inputs; a piece
    begins at an end token or at the row's start, and after the last one the row is padding. samples int64 [B]: each
    row's sample index. source int64 [B, S], −1 at padding: what the encoder of a design that has one reads.
    answers int64 [B, T]: targets of their own, −1 where none is asked. places [B, T, 2]: x and y of each input.
    """

    tokens: np.ndarray
    lengths: tuple[tuple[int, ...], ...]
    samples: np.ndarray
    source: np.ndarray | None = None
    answers: np.ndarray | None = None
    places: np.ndarray | None = None

    @property
    def targets(self) -> np.ndarray:
        """int64 [B, T]; −1 is not scored."""
        return self.tokens[:, 1:] if self.answers is None else self.answers


class Samples:
    """Training batches. Row `r` of step `s` is sample `s * batch_size + r` of one endless sequence.

    A sample is a window of `context + 1` tokens at a multiple of `context` (so each token is a target once;
    the last incomplete window of a source is left out). Sources take turns in proportion to their weights,
    never more than one sample ahead or behind. Each source gives every window once per epoch, every epoch
    in another order.
    """

    def __init__(
        self,
        corpus_train: Sequence[TokenFile],
        weights: Sequence[float],
        context: int,
        batch_size: int,
        seed: int,
        end: int,
    ) -> None:
        """Raises DataError for a source of less than one window, or less text than one batch."""
        check_size(corpus_train, context, batch_size)
        self._files = tuple(corpus_train)
        self._context, self._batch_size, self._seed, self._end = context, batch_size, seed, end
        self._windows = tuple((len(file) - 1) // context for file in self._files)
        self._cycle = _Cycle(weights)

    def batch(self, step: int) -> Batch:
        """The batch of a step, whatever was asked for before."""
        samples = np.arange(step * self._batch_size, (step + 1) * self._batch_size, dtype=np.int64)
        tokens = np.empty((self._batch_size, self._context + 1), dtype=np.int64)
        sources, windows = self.locate(samples)
        for row, (source, window) in enumerate(zip(sources.tolist(), windows.tolist(), strict=True)):
            start = window * self._context
            tokens[row] = self._files[source].read(start, start + self._context + 1)
        return Batch(tokens, _pieces(tokens, self._end), samples)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each sample index, int64 [n] each."""
        sources, index = self._cycle.place(samples)
        windows = np.empty_like(index)
        for source, count in enumerate(self._windows):
            mine = sources == source
            windows[mine] = shuffled(index[mine], count, (self._seed, source))
        return sources, windows


def shuffled(index: np.ndarray, count: int, key: tuple[int, int]) -> np.ndarray:
    """Which of `count` things comes at each index int64 [n] of an endless sequence: each once an epoch, every epoch in
    another order; key is (seed, source)."""
    epochs, positions = np.divmod(index, count)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        now = epochs == epoch
        found[now] = permute(positions[now], count, (*key, epoch))
    return found


def check_size(files: Sequence[TokenFile], context: int, batch_size: int) -> None:
    """Raise DataError where the files hold less than one batch, or one of them less than a window."""
    tokens = sum(len(file) for file in files)
    windows = [max(0, len(file) - 1) // context for file in files]
    if sum(windows) < batch_size or 0 in windows:
        needed = max(batch_size, len(files)) * context + len(files)
        place = "" if len(files) == 1 else f", and each source at least {context + 1}"
        raise DataError(
            f"the training split holds {tokens} tokens, but one batch of {batch_size} samples of {context} "
            f"needs {needed}{place}: give more text, or a smaller batch or context."
        )


def evaluation_windows(token_file: TokenFile, context: int, batch_size: int = 8) -> Iterator[Batch]:
    """All tokens but the first as targets, each once, in order: batches of up to `batch_size` windows.

    What is left after the last whole window is one last batch of a single shorter row; there is no padding.
    """
    whole, rest = divmod(max(0, len(token_file) - 1), context)
    for first in range(0, whole, batch_size):
        rows = np.arange(first, min(first + batch_size, whole), dtype=np.int64)
        block = token_file.read(int(rows[0]) * context, (int(rows[-1]) + 1) * context + 1)
        tokens = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(block, context + 1)[::context])
        yield Batch(tokens, _pieces(tokens, token_file.end), rows)
    if rest:
        tokens = token_file.read(whole * context, len(token_file))[None]
        yield Batch(tokens, _pieces(tokens, token_file.end), np.array([whole], dtype=np.int64))


def permute(positions: np.ndarray, size: int, key: tuple[int, int, int]) -> np.ndarray:
    """A bijection of 0 .. size - 1 chosen by the key (seed, source, epoch), applied to int64 positions [n].

    A Feistel network over a grid a * b >= size, with b about a: each round shifts one coordinate by a hash
    of the other; results outside are sent through again (cycle walking, Black and Rogaway 2002). Needs no
    memory and no past, and uses whole numbers only, so it is the same on every machine.
    """
    b = max(1, isqrt(size))
    a = -(-size // b)
    mixed = 0
    for part in key:
        mixed = mix(mixed ^ (part & _MASK))
    keys = [mix(mixed + number) for number in range(1, _ROUNDS + 1)]
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = np.divmod(result[outside], np.uint64(b))
        for number in range(0, _ROUNDS, 2):
            left = (left + mix_array(right, keys[number]) % np.uint64(a)) % np.uint64(a)
            right = (right + mix_array(left, keys[number + 1]) % np.uint64(b)) % np.uint64(b)
        result[outside] = left * np.uint64(b) + right
        outside = result >= size
    return result.astype(np.int64)


class _Cycle:
    """Which source each sample comes from: a cycle in which every prefix keeps the weights to one sample.

    Tijdeman's schedule (The chairman assignment problem, 1980): among the sources that are owed enough, the
    one whose turn is due first. With k sources no prefix is off by more than 1 - 1 / (2k - 2).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = _whole(weights)
        total, sources = sum(shares), len(shares)
        slack = max(1, 2 * sources - 2)
        given = [0] * sources
        order = np.empty(total, dtype=np.int64)
        ranks = np.empty(total, dtype=np.int64)
        for n in range(total):
            # Everything times total * slack, so that whole numbers decide.
            owed = [((n + 1) * share - total * got) * slack for share, got in zip(shares, given, strict=True)]
            due = [j for j in range(sources) if owed[j] >= (total if sources > 1 else 0)]
            chosen = min(due, key=lambda j: (Fraction(total * (slack - 1) - owed[j], shares[j]), j))
            order[n], ranks[n] = chosen, given[chosen]
            given[chosen] += 1
        assert given == shares
        self._order, self._ranks, self._shares = order, ranks, np.array(shares, dtype=np.int64)

    def place(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and how many samples of that source come before it; int64 [n] each."""
        cycles, within = np.divmod(samples, len(self._order))
        sources = self._order[within]
        return sources, cycles * self._shares[sources] + self._ranks[within]


def _whole(weights: Sequence[float]) -> list[int]:
    """The weights as the smallest whole numbers in the same proportion."""
    fractions = [Fraction(weight).limit_denominator(1000) for weight in weights]
    for weight, fraction in zip(weights, fractions, strict=True):
        if fraction <= 0 or abs(float(fraction) - weight) > 1e-9 * weight:
            raise DataError(f"data weight {weight:g} must be above 0, with at most three decimals.")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    common = gcd(*whole)
    whole = [number // common for number in whole]
    if sum(whole) > LONGEST_CYCLE:
        raise DataError(
            f"data weights {', '.join(f'{weight:g}' for weight in weights)} repeat only after {sum(whole)} samples: "
            f"round them so that the smallest whole numbers in proportion sum to at most {LONGEST_CYCLE}."
        )
    return whole


def _pieces(tokens: np.ndarray, end: int) -> tuple[tuple[int, ...], ...]:
    rows = []
    for row in tokens[:, :-1]:
        starts = np.flatnonzero(row == end)
        edges = np.concatenate(([0], starts[starts > 0], [len(row)]))
        rows.append(tuple(np.diff(edges).tolist()))
    return tuple(rows)


def mix(value: int) -> int:
    """SplitMix64's mixing of 64 bits (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_array(values: np.ndarray, key: int) -> np.ndarray:
    """The same mixing of uint64 [n] with a key; whole-number arrays wrap around silently."""
    mixed = values ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
