"""Bits per byte of the same text read in pieces of 1, 2, 4 … times a context, which tells how a model extrapolates.

As Press et al. (2021) measure it, in pieces that do not overlap. A stretch is `context · multiples[-1]` tokens to
predict, all within one document. For each multiple it is cut into equal pieces, each read from position 0 and an empty
state, and the bits of all tokens of all pieces are summed: between multiples only the context of a token differs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from heddle.errors import ConfigError, is_out_of_memory
from heddle.model.decoder import Decoder
from heddle.training.evaluation.bits_per_byte import window_bits

# All multiples together read at most this share of the tokens that a run trains on. To read a token costs about half
# of what it costs to train on it, so this is about 8 % of a run's time.
SHARE = 1 / 6
FEWEST, MOST = 2, 16  # stretches


class Text(Protocol):
    """Tokens of documents one after another, and where each document begins."""

    @property
    def offsets(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Stretches:
    """What is read: `starts` are places in the text. No multiples: nothing is; `note` says what was not possible."""

    context: int
    multiples: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    documents: int = 0  # of how many documents the stretches are
    note: str | None = None

    @property
    def length(self) -> int:
        """Tokens of a stretch."""
        return self.context * max(self.multiples, default=0)


class Reading(NamedTuple):
    """Bits and bytes of each stretch in pieces of `multiple` contexts; none where `refusal` says why."""

    multiple: int
    windows: list[tuple[float, int]]
    refusal: str | None


class Pieces(NamedTuple):
    """Rows to evaluate: tokens int64 [B, T + 1] and for each row the length of its one document, T."""

    tokens: np.ndarray
    lengths: tuple[tuple[int, ...], ...]

    @property
    def targets(self) -> np.ndarray:
        """What follows each input."""
        return self.tokens[:, 1:]


def choose(text: Text, context: int, largest: int, trained: int) -> Stretches:
    """The stretches for multiples 1, 2, 4 … `largest`, or as far as the text's longest document goes.

    One of each of the longest documents, and further rounds where these are few; a document's own lie evenly in it.
    trained: tokens of a run, which bounds how many there are. The same text and numbers give the same stretches.
    """
    if largest < 2:
        return Stretches(context)
    offsets = np.asarray(text.offsets, dtype=np.int64)
    sizes = np.diff(np.append(offsets, len(text)))
    longest = int(sizes.max(initial=0))
    multiples = [2**power for power in range(largest.bit_length()) if 2**power * context < longest]
    limit = f"the longest held-out document has {longest} tokens"
    if len(multiples) < 2:
        return Stretches(context, note=f"{limit}, less than two contexts of {context} and one more")
    note = None if multiples[-1] == largest else f"{limit}, so {multiples[-1]} times the context is the largest"
    length = multiples[-1] * context
    wanted = min(MOST, max(FEWEST, int(SHARE * trained) // (length * len(multiples))))
    room = (sizes - 1) // length  # a document's first token is predicted by nothing
    taken = np.zeros_like(room)
    order = np.argsort(-sizes, kind="stable")
    while taken.sum() < min(wanted, room.sum()):
        open_ones = order[taken[order] < room[order]]
        taken[open_ones[: wanted - taken.sum()]] += 1
    starts = []
    for document in np.flatnonzero(taken):
        slots = (2 * np.arange(taken[document]) + 1) * room[document] // (2 * taken[document])
        starts += (offsets[document] + slots * length).tolist()
    return Stretches(context, tuple(multiples), tuple(starts), int((taken > 0).sum()), note)


def pieces(text: Text, stretches: Stretches, multiple: int) -> Iterator[Pieces]:
    """A batch a stretch: its pieces of `multiple` contexts, whose targets are the stretch's tokens, each once."""
    length = multiple * stretches.context
    for start in stretches.starts:
        tokens = text.read(start, start + stretches.length + 1)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        yield Pieces(rows, ((length,),) * len(rows))


def extrapolation(
    model: Decoder, text: Text, stretches: Stretches, byte_lengths: np.ndarray, autocast: torch.dtype | None = None
) -> list[Reading]:
    """What each multiple gives; a length that the model refuses (learned positions end, say) tells its reason.

    byte_lengths: int [vocab], bytes each token stands for.
    """
    found = []
    for multiple in stretches.multiples:
        windows: list[tuple[float, int]] = []
        refusal = None
        try:
            for batch in pieces(text, stretches, multiple):
                rows = window_bits(model, [batch], byte_lengths, autocast)
                windows.append((sum(bits for bits, _ in rows), sum(size for _, size in rows)))
        except ConfigError as error:
            windows, refusal = [], str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            windows, refusal = [], "out of memory"
        found.append(Reading(multiple, windows, refusal))
    return found
