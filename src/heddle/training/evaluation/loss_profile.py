"""Where the loss lies: bits and bytes by the position of a token in its document, and by how frequent the token is.

A profile uses the token losses of an evaluation; nothing is read twice. Neighboring windows are summed into at most
`MAX_BLOCKS` blocks, from which intervals for the sampling error of the held-out text are drawn.

Frequencies: the tokens of the vocabulary are sorted by their count in the training text and cut into ten groups, each
of which makes up about a tenth of the training text (deciles of the text, not of the vocabulary: half of a vocabulary
hardly occurs).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.training.evaluation.scores import (
    FiniteScores,
    Scores,
    TokenScores,
    finite_scores,
    row_sums,
    token_bits,
)

MAX_BLOCKS = 32
FREQUENCY_GROUPS = 10
MAX_TOKENS = 2**22  # of each training file, spread evenly: enough to rank the tokens that are scored
_COUNTED_PIECES = 64


def position_edges(length: int) -> list[int]:
    """Return the edges of ranges of positions in a window of `length`, each range twice as long as the one before."""
    return sorted({0, *(length // divisor for divisor in (16, 8, 4, 2)), length})


def position_groups(doc_lengths: Sequence[Sequence[int]], edges: Sequence[int]) -> np.ndarray:
    """Return the range in which the position of each input in its document lies: int64 [B, T]."""
    positions = np.stack([np.concatenate([np.arange(length) for length in row]) for row in doc_lengths])
    groups: np.ndarray = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    return groups


def token_frequencies(corpus: Corpus) -> np.ndarray:
    """Return each token's share of the training text, float64 [vocab]. The end token, which is not scored, has 0."""
    size = len(corpus.tokenizer.byte_lengths)
    shares = np.zeros(size)
    for file, weight in zip(corpus.train, corpus.weights, strict=True):
        pieces = 1 if len(file) <= MAX_TOKENS else _COUNTED_PIECES
        length = min(len(file), MAX_TOKENS) // pieces
        starts = np.linspace(0, len(file) - length, pieces).astype(np.int64).tolist()
        counts = sum(np.bincount(file.read(start, start + length), minlength=size) for start in starts)
        counts = np.asarray(counts, dtype=np.float64)
        counts[corpus.tokenizer.eod_id] = 0
        shares += weight * counts / max(1.0, counts.sum())
    frequencies: np.ndarray = shares / max(shares.sum(), np.finfo(float).tiny)
    return frequencies


def frequency_groups(frequencies: np.ndarray) -> np.ndarray:
    """Return the group of each token, 0 for the most frequent ones: int64 [vocab].

    A token more frequent than 1 / FREQUENCY_GROUPS forms its own group; there are fewer groups then.
    """
    order = np.argsort(-frequencies, kind="stable")
    middles = np.cumsum(frequencies[order]) - frequencies[order] / 2
    groups = np.empty(len(order), dtype=np.int64)
    shares = FREQUENCY_GROUPS * middles / max(frequencies.sum(), 1e-300)
    groups[order] = np.clip(shares.astype(np.int64), 0, FREQUENCY_GROUPS - 1)
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


def scores_by_group(bits: np.ndarray, sizes: np.ndarray, groups: np.ndarray, number: int) -> list[Scores]:
    """Return for each group the score of each row. bits float64, sizes and groups int64 [B, T]."""
    inside = [groups == group for group in range(number)]
    return [row_sums(np.where(mask, bits, 0.0), sizes * mask) for mask in inside]


def merge_rows(scores: Scores, blocks: int = MAX_BLOCKS) -> Scores:
    """Sum the scores of neighboring rows into at most `blocks` blocks; the last may have fewer rows."""
    rows = -(-len(scores) // blocks) or 1
    pieces = [scores[first : first + rows] for first in range(0, len(scores), rows)]
    return [(sum(score for score, _ in piece), sum(size for _, size in piece)) for piece in pieces]


@dataclass
class LossProfile:
    """Collects the scores of an evaluation by group; `add` is its observer.

    edges: of the position ranges. token_groups: int64 [vocab]. positions, frequencies: for each group, the scores of
    each window so far.
    """

    edges: Sequence[int]
    token_groups: np.ndarray
    positions: list[Scores] = field(init=False)
    frequencies: list[Scores] = field(init=False)

    def __post_init__(self) -> None:
        self.positions = [[] for _ in pairwise(self.edges)]
        self.frequencies = [[] for _ in range(int(self.token_groups.max(initial=-1)) + 1)]

    def add(self, batch: Batch, tokens: TokenScores) -> None:
        """Add the windows of a batch."""
        bits, sizes = token_bits(tokens), tokens.sizes.cpu().numpy()
        by_position = position_groups(batch.doc_lengths, self.edges)
        by_frequency = self.token_groups[np.clip(batch.targets, 0, None)]
        for scores, groups in ((self.positions, by_position), (self.frequencies, by_frequency)):
            for collected, added in zip(scores, scores_by_group(bits, sizes, groups, len(scores)), strict=True):
                collected += added

    def summary(self) -> dict[str, list[FiniteScores]]:
        """Return the scores of the blocks of each group, as plain data for the record of a run."""
        return {
            name: [finite_scores(merge_rows(scores)) for scores in groups]
            for name, groups in (("positions", self.positions), ("frequencies", self.frequencies))
        }
