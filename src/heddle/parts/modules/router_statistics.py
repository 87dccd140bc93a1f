"""What mixtures of experts tell of a call, to who keeps a ledger of it: losses that training adds, loads to balance by.

A ledger takes entries while its block lasts and none afterwards, so that layers which run once more in the backward
pass (recomputed activations) are counted once; what they compute for the ledger is the same both times.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from heddle.parts.feedforwards import Feedforward


class Entry(NamedTuple):
    """One call of one mixture of experts; padding is in none of the numbers.

    penalty: the losses that balance it, summed over tokens and differentiable; None without any.
    loads: int64 [experts], how often each expert was chosen. dropped: int64 [], those choices beyond a capacity.
    entropy: float64 [], of the routers' probabilities in nats, summed over tokens. tokens: how many, int64 [].
    """

    mixture: Feedforward
    penalty: Tensor | None
    loads: Tensor
    dropped: Tensor
    entropy: Tensor
    tokens: Tensor


@dataclass
class Ledger:
    """The entries of one or several calls, in order."""

    entries: list[Entry] = field(default_factory=list)
    closed: bool = False


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Within the block, mixtures of experts enter what their calls did; results do not change."""
    kept = Ledger()
    token = _ledger.set(kept)
    try:
        yield kept
    finally:
        kept.closed = True
        _ledger.reset(token)


def enter(make: Callable[[], Entry]) -> None:
    """Enter a call into the ledger in force, open or closed; nothing is computed where there is none."""
    kept = None if is_compiling() else _ledger.get()
    if kept is None:
        return
    entry = make()  # also for a closed ledger: a layer that runs again must save as many tensors as before
    if not kept.closed:
        kept.entries.append(entry)
