"""Which keys a query may see: one predicate over positions, documents and window, and the static facts beside it.

A key is seen when it stands (position ≥ 0), is of the query's document, and, with i the query's position and j
the key's: causal `0 ≤ i − j < w` (w keys, itself included); bidirectional `|i − j| ≤ w` (w is a half-width).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Where queries and keys stand. Static facts let a kernel be chosen without reading any value.

    ordered: in each row keys stand at consecutive positions of one document, and the queries are the last T.
    everything: each query sees each key.
    pieces: packed rows, T = S: lengths of the pieces of each row; a piece is ordered and sees only itself.
    ragged: some key slots may be unused or padding; what they hold must not reach any result.
    """

    q_positions: Tensor  # int [B, T], −1 is padding
    k_positions: Tensor  # int [B, S], −1 is padding or unused
    q_documents: Tensor | None = None  # int [B, T]
    k_documents: Tensor | None = None  # int [B, S]
    window: int | None = None
    causal: bool = True
    ordered: bool = False
    everything: bool = False
    pieces: tuple[tuple[int, ...], ...] | None = None
    ragged: bool = False

    def of(self, queries: slice) -> "Visibility":
        """What some of the queries see, by the predicate alone."""
        documents = None if self.q_documents is None else self.q_documents[:, queries]
        positions = self.q_positions[:, queries]
        return Visibility(positions, self.k_positions, documents, self.k_documents, self.window, self.causal)

    def alike(self) -> "Visibility":
        """That of the first row alone, where every row stands as it does."""
        if not (self.ordered or self.everything):
            return self
        return replace(self, q_positions=self.q_positions[:1], k_positions=self.k_positions[:1])

    def distance(self) -> Tensor:
        """|i − j| of every query and key, int [B, T, S], or [1, T, S] where all rows stand alike."""
        here = self.alike()
        return (here.q_positions[:, :, None] - here.k_positions[:, None, :]).abs()

    def mask(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """The predicate for some queries and keys: bool [B, queries, keys], True where the key is seen."""
        i = self.q_positions[:, queries, None]
        j = self.k_positions[:, None, keys]
        seen = (j >= 0) & (i >= 0)
        if self.causal:
            seen = seen & (j <= i)
            if self.window is not None:
                seen = seen & (i - j < self.window)
        elif self.window is not None:
            seen = seen & ((i - j).abs() <= self.window)
        if self.q_documents is not None and self.k_documents is not None:
            seen = seen & (self.q_documents[:, queries, None] == self.k_documents[:, None, keys])
        return seen


def pairs(queries: int, keys: int, window: int | None, causal: bool) -> int:
    """How many (query, key) pairs are seen when the queries are the last of consecutive keys."""
    total = 0
    if not causal:
        if window is None:
            return queries * keys
        near = min(window, keys - 1)
        return keys * (2 * near + 1) - near * (near + 1) if queries == keys else queries * min(keys, 2 * near + 1)
    reach = keys if window is None else min(window, keys)
    first = keys - queries + 1  # keys before and at the first query
    ramp = max(0, min(queries, reach - first))  # queries that see fewer than `reach` keys
    total = ramp * (2 * first + ramp - 1) // 2 + (queries - ramp) * reach
    return total


def ordered(batch: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of queries and keys when the queries are the last of `keys` consecutive positions."""
    k = torch.arange(keys, device=device).expand(batch, keys)
    return k[:, keys - queries :], k
