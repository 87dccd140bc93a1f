"""Statistics that mixtures of experts record for training: the auxiliary losses and how often each expert was chosen.

A recorder takes entries only inside its `with` block. Layers that run again in the backward pass (activation
checkpointing) run after the block and are not counted twice; both runs compute the same tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import local
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from heddle.parts.feedforwards import Feedforward


class RouterStatistics(NamedTuple):
    """Statistics of one call of one mixture of experts, without padding.

    aux_loss: the weighted balance loss and z-loss, summed over tokens, differentiable; None if both are off.
    expert_counts: int64 [experts], how often each expert was chosen. dropped: int64 [], choices beyond the capacity of
    their expert. entropy: float64 [], of the router probabilities in nats, summed over tokens. tokens: int64 [].
    """

    mixture: Feedforward
    aux_loss: Tensor | None
    expert_counts: Tensor
    dropped: Tensor
    entropy: Tensor
    tokens: Tensor


@dataclass
class RouterRecorder:
    """The entries of one or several calls, in order. A closed recorder takes no more entries."""

    entries: list[RouterStatistics] = field(default_factory=list)
    closed: bool = False


class _Traced(local):
    """The recorder of this thread, once more: the compiler traces it, and cannot read a context variable."""

    recorder: RouterRecorder | None = None


_recorder: ContextVar[RouterRecorder | None] = ContextVar("recorder", default=None)
_traced = _Traced()


@contextmanager
def record_router_statistics() -> Iterator[RouterRecorder]:
    """Record the statistics of every mixture of experts that is called within the block. Results do not change.

    A whole model that is compiled adds its entries when its graph ends.
    """
    recorder, outer = RouterRecorder(), _traced.recorder
    token = _recorder.set(recorder)
    _traced.recorder = recorder
    try:
        yield recorder
    finally:
        recorder.closed = True
        _recorder.reset(token)
        _traced.recorder = outer


def record(make: Callable[[], RouterStatistics]) -> None:
    """Add `make()` to the current recorder. Without a recorder nothing is computed."""
    recorder = _traced.recorder if is_compiling() else _recorder.get()
    if recorder is None:
        return
    entry = make()  # also if closed: a layer that is run again for its gradient must save as many tensors as before
    if not recorder.closed:
        recorder.entries.append(entry)
