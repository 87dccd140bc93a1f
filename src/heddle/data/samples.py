"""Batches and their order: a pure function of seed and step, so that a run resumes from its step number alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, islice
from math import gcd, isqrt, lcm
from typing import Any

import numpy as np

from heddle.data.token_file import TokenFile
from heddle.errors import DataError
from heddle.tokenization.tokenizer import Tokenizer

MAX_CYCLE_LENGTH = 10_000
_ROUNDS = 8
_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens: inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]` unless `labels` are given.

    tokens: int64 [B, T + 1].
    doc_lengths: for each row, the lengths of its documents (or parts of documents) within the T inputs. A document
        begins at an end-of-document token or at the start of the row; padding follows the last one.
    sample_indices: int64 [B], the index of each row in the order of samples.
    encoder_tokens: int64 [B, S], −1 at padding: the input of the encoder, for a model that has one.
    labels: int64 [B, T], targets other than the next token; −1 is ignored.
    coordinates: [B, T, 2], x and y of each input.
    """

    tokens: np.ndarray
    doc_lengths: tuple[tuple[int, ...], ...]
    sample_indices: np.ndarray
    encoder_tokens: np.ndarray | None = None
    labels: np.ndarray | None = None
    coordinates: np.ndarray | None = None

    @property
    def targets(self) -> np.ndarray:
        """Return the targets, int64 [B, T]; the loss ignores −1."""
        return self.tokens[:, 1:] if self.labels is None else self.labels


@dataclass(frozen=True)
class RowProtocol:
    """How each sequence of a text begins.

    bos_ids: the BOS tokens of an imported model, which never read text without them. They replace the first tokens of
    a sequence, so its length, targets and positions stay the same. (): sequences begin where the text is cut, as in
    heddle's own training.
    """

    bos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> RowProtocol:
        """Return the row protocol that a tokenizer's model was trained with."""
        return cls() if tokenizer.is_native else cls(tuple(tokenizer.bos_ids))

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> RowProtocol:
        """Return the protocol in a `record`; older files have none, and their rows begin where the text was cut."""
        return cls(tuple(record.get("bos_ids", ())))

    def __str__(self) -> str:
        """Return a phrase for a sentence about a loss: "beginning with BOS, which is not scored"."""
        if not self.bos_ids:
            return "beginning mid-text, without BOS"
        return "beginning with BOS, which is not scored"

    def record(self) -> dict[str, list[int]]:
        """Return the fields to save in a file; none for rows that begin where the text is cut."""
        return {"bos_ids": list(self.bos_ids)} if self.bos_ids else {}

    def begin(self, tokens: np.ndarray) -> np.ndarray:
        """Return rows of a text, int64 [B, T + 1], with their first tokens replaced by BOS."""
        if not self.bos_ids:
            return tokens
        tokens = tokens.copy()
        tokens[:, : len(self.bos_ids)] = self.bos_ids
        return tokens

    def without_bos_targets(self, batch: Batch) -> Batch:
        """Return the batch with labels that ignore BOS, which such a model never has to predict."""
        if not self.bos_ids:
            return batch
        return replace(batch, labels=np.where(np.isin(batch.targets, self.bos_ids), -1, batch.targets))


PLAIN_ROWS = RowProtocol()


class CorpusLoader:
    """Training batches of a corpus. Row `r` of step `s` is sample `s * batch_size + r` of one endless sequence.

    A sample is a window of `sequence_length + 1` tokens that starts at a multiple of `sequence_length`, so each token
    is a target once; the last incomplete window of a source is dropped. Sources are mixed in proportion to their
    weights, at every point to within one sample. Each source yields every window once per epoch, in a new order each
    epoch.
    """

    def __init__(
        self,
        token_files: Sequence[TokenFile],
        weights: Sequence[float],
        sequence_length: int,
        batch_size: int,
        seed: int,
        eod_id: int,
        rows: RowProtocol = PLAIN_ROWS,
    ) -> None:
        """Raises DataError for a source shorter than one window, or less text than one batch."""
        check_token_count(token_files, sequence_length, batch_size)
        self._rows = rows
        self._files = tuple(token_files)
        self._sequence_length, self._batch_size, self._seed, self._eod_id = sequence_length, batch_size, seed, eod_id
        self._window_counts = tuple((len(file) - 1) // sequence_length for file in self._files)
        self._source_cycle = _SourceCycle(weights)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step; it does not depend on earlier calls."""
        return self.batch_from(step * self._batch_size)

    def batch_from(self, first_sample: int) -> Batch:
        """Return the batch of `batch_size` samples from `first_sample` on."""
        sample_indices = np.arange(first_sample, first_sample + self._batch_size, dtype=np.int64)
        tokens = np.empty((self._batch_size, self._sequence_length + 1), dtype=np.int64)
        sources, windows = self.locate(sample_indices)
        for row, (source, window) in enumerate(zip(sources.tolist(), windows.tolist(), strict=True)):
            start = window * self._sequence_length
            tokens[row] = self._files[source].read(start, start + self._sequence_length + 1)
        tokens = self._rows.begin(tokens)
        batch = Batch(tokens, document_lengths(tokens, self._eod_id), sample_indices)
        return self._rows.without_bos_targets(batch)

    def locate(self, sample_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the window of each sample, int64 [n] each."""
        sources, indices_in_source = self._source_cycle.locate(sample_indices)
        windows = np.empty_like(indices_in_source)
        for source, window_count in enumerate(self._window_counts):
            from_source = sources == source
            windows[from_source] = epoch_shuffle(indices_in_source[from_source], window_count, (self._seed, source))
        return sources, windows


def epoch_shuffle(indices: np.ndarray, count: int, key: tuple[int, int]) -> np.ndarray:
    """Map indices int64 [n] of an endless sequence to items 0 to count − 1, each once per epoch.

    Each epoch has its own order, which depends on `key` (seed, source).
    """
    epochs, positions = np.divmod(indices, count)
    result = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        result[in_epoch] = feistel_permute(positions[in_epoch], count, (*key, epoch))
    return result


def check_token_count(files: Sequence[TokenFile], sequence_length: int, batch_size: int) -> None:
    """Raise DataError if the files hold less than one batch, or one of them less than one window."""
    tokens = sum(len(file) for file in files)
    windows = [max(0, len(file) - 1) // sequence_length for file in files]
    if sum(windows) < batch_size or 0 in windows:
        needed = max(batch_size, len(files)) * sequence_length + len(files)
        per_source = "" if len(files) == 1 else f", and each source at least {sequence_length + 1}"
        raise DataError(
            f"the training split holds {tokens} tokens, but one batch of {batch_size} samples of {sequence_length} "
            f"needs {needed}{per_source}: give more text, or a smaller batch_size or sequence_length."
        )


def evaluation_windows(
    token_file: TokenFile, sequence_length: int, batch_size: int = 8, rows: RowProtocol = PLAIN_ROWS, every: int = 1
) -> Iterator[Batch]:
    """Yield batches of up to `batch_size` windows in order, in which every token but the first is a target once.

    The tokens after the last full window form a final batch of one shorter row; there is no padding. every: read only
    the first of every this many batches.
    """
    window_count, remainder = divmod(max(0, len(token_file) - 1), sequence_length)
    for first in range(0, window_count, batch_size * every):
        windows = np.arange(first, min(first + batch_size, window_count), dtype=np.int64)
        block = token_file.read(int(windows[0]) * sequence_length, (int(windows[-1]) + 1) * sequence_length + 1)
        tokens = np.ascontiguousarray(
            np.lib.stride_tricks.sliding_window_view(block, sequence_length + 1)[::sequence_length]
        )
        tokens = rows.begin(tokens)
        yield Batch(tokens, document_lengths(tokens, token_file.eod_id), windows)
    if remainder and -(-window_count // batch_size) % every == 0:
        tokens = rows.begin(token_file.read(window_count * sequence_length, len(token_file))[None])
        yield Batch(tokens, document_lengths(tokens, token_file.eod_id), np.array([window_count], dtype=np.int64))


def joined(windows: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield batches of up to `count` windows of one length, from batches of one."""
    for _, same in groupby(windows, lambda window: window.tokens.shape[1]):
        while group := list(islice(same, count)):
            tokens, numbers = (
                np.concatenate(column) for column in zip(*((x.tokens, x.sample_indices) for x in group), strict=True)
            )
            yield Batch(tokens, tuple(lengths for window in group for lengths in window.doc_lengths), numbers)


def feistel_permute(positions: np.ndarray, size: int, key: tuple[int, int, int]) -> np.ndarray:
    """Apply a permutation of 0 .. size - 1, chosen by the key (seed, source, epoch), to int64 positions [n].

    A Feistel network over a grid a * b >= size, with a about b: each round shifts one coordinate by a hash of the
    other. Results of at least `size` go through the network again (cycle walking, Black and Rogaway 2002). It stores
    nothing and uses only integers, so it gives the same result on every machine.
    """
    b = max(1, isqrt(size))
    a = -(-size // b)
    state = 0
    for part in key:
        state = splitmix64(state ^ (part & _MASK))
    round_keys = [splitmix64(state + number) for number in range(1, _ROUNDS + 1)]
    result = positions.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = np.divmod(result[outside], np.uint64(b))
        for round_index in range(0, _ROUNDS, 2):
            left = (left + keyed_splitmix64(right, round_keys[round_index]) % np.uint64(a)) % np.uint64(a)
            right = (right + keyed_splitmix64(left, round_keys[round_index + 1]) % np.uint64(b)) % np.uint64(b)
        result[outside] = left * np.uint64(b) + right
        outside = result >= size
    return result.astype(np.int64)


class _SourceCycle:
    """The source of each sample: a repeating cycle in which every prefix follows the weights to within one sample.

    Tijdeman's schedule (The chairman assignment problem, 1980): among the sources that are far enough behind their
    share, take the one with the earliest deadline. With k sources no prefix is off by more than 1 - 1 / (2k - 2).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = _integer_weights(weights)
        length, sources = sum(shares), len(shares)
        slack = max(1, 2 * sources - 2)
        counts = [0] * sources
        order = np.empty(length, dtype=np.int64)
        ranks = np.empty(length, dtype=np.int64)
        for n in range(length):
            # All quantities are multiplied by length * slack, so that integers decide.
            owed = [((n + 1) * share - length * count) * slack for share, count in zip(shares, counts, strict=True)]
            due = [j for j in range(sources) if owed[j] >= (length if sources > 1 else 0)]
            chosen = min(due, key=lambda j: (Fraction(length * (slack - 1) - owed[j], shares[j]), j))
            order[n], ranks[n] = chosen, counts[chosen]
            counts[chosen] += 1
        assert counts == shares
        self._cycle_sources, self._ranks, self._shares = order, ranks, np.array(shares, dtype=np.int64)

    def locate(self, sample_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample, and the number of earlier samples of that source; int64 [n] each."""
        cycles, positions = np.divmod(sample_indices, len(self._cycle_sources))
        sources = self._cycle_sources[positions]
        return sources, cycles * self._shares[sources] + self._ranks[positions]


def _integer_weights(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in the same proportion as the weights."""
    fractions = [Fraction(weight).limit_denominator(1000) for weight in weights]
    for weight, fraction in zip(weights, fractions, strict=True):
        if fraction <= 0 or abs(float(fraction) - weight) > 1e-9 * weight:
            raise DataError(f"data weight {weight:g} must be above 0, with at most three decimals.")
    scale = lcm(*(fraction.denominator for fraction in fractions))
    integers = [int(fraction * scale) for fraction in fractions]
    divisor = gcd(*integers)
    integers = [number // divisor for number in integers]
    if sum(integers) > MAX_CYCLE_LENGTH:
        raise DataError(
            f"data weights {', '.join(f'{weight:g}' for weight in weights)} repeat only after {sum(integers)} samples: "
            f"round them so that the smallest integers in the same proportion sum to at most {MAX_CYCLE_LENGTH}."
        )
    return integers


def document_lengths(tokens: np.ndarray, eod_id: int) -> tuple[tuple[int, ...], ...]:
    rows = []
    for row in tokens[:, :-1]:
        starts = np.flatnonzero(row == eod_id)
        boundaries = np.concatenate(([0], starts[starts > 0], [len(row)]))
        rows.append(tuple(np.diff(boundaries).tolist()))
    return tuple(rows)


def splitmix64(value: int) -> int:
    """SplitMix64's hash of a 64-bit integer (Steele, Lea and Flood 2014)."""
    value = (value + GOLDEN_GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def keyed_splitmix64(values: np.ndarray, key: int) -> np.ndarray:
    """Apply the same mixing to uint64 [n] XOR a key; integer arrays wrap around silently."""
    mixed = values ^ np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
