"""What parts record for training: auxiliary losses, how often each expert was chosen, and the largest logits.

A recorder takes entries only inside its `with` block. Layers that run again in the backward pass (activation
checkpointing) run after the block and are not counted twice; both runs compute the same tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import local
from typing import NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from heddle.numerics.attention.indexer import largest_logits
from heddle.numerics.attention.mask import AttentionMask
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


class IndexLoss(NamedTuple):
    """The loss of one call of the indexer of a sparse attention.

    aux_loss: weighted, summed over tokens, differentiable. tokens: int64 [], without padding.
    """

    indexer: nn.Module
    aux_loss: Tensor
    tokens: Tensor


class LargestLogits(NamedTuple):
    """The largest scaled product of a query and a visible key in one call of an attention, of each head [H]."""

    mixer: nn.Module
    logits: Tensor


@dataclass
class RouterRecorder:
    """What was recorded in one or several calls, in order. A closed recorder ignores further entries.

    entries: of mixtures of experts. index_losses: of indexers. logits: of attentions; None: nobody asks for them.
    """

    entries: list[RouterStatistics] = field(default_factory=list)
    index_losses: list[IndexLoss] = field(default_factory=list)
    logits: list[LargestLogits] | None = None
    closed: bool = False

    @property
    def losses(self) -> list[Tensor]:
        """All auxiliary losses."""
        routers = [entry.aux_loss for entry in self.entries if entry.aux_loss is not None]
        return [*routers, *(entry.aux_loss for entry in self.index_losses)]


class _Traced(local):
    """The recorder of this thread, once more: the compiler traces it, and cannot read a context variable."""

    recorder: RouterRecorder | None = None


_recorder: ContextVar[RouterRecorder | None] = ContextVar("recorder", default=None)
_traced = _Traced()


@contextmanager
def record_router_statistics(logits: bool = False) -> Iterator[RouterRecorder]:
    """Record the entries of every mixture of experts and every indexer within the block. Results do not change.

    logits: also the largest logits of attentions, which are computed once more for this.
    A model that is compiled as a whole adds its entries when its graph ends.
    """
    recorder, outer = RouterRecorder(logits=[] if logits else None), _traced.recorder
    token = _recorder.set(recorder)
    _traced.recorder = recorder
    try:
        yield recorder
    finally:
        recorder.closed = True
        _recorder.reset(token)
        _traced.recorder = outer


def record(make: Callable[[], RouterStatistics]) -> None:
    """Add `make()` to the entries of the current recorder. Without a recorder nothing is computed."""
    recorder = _current()
    if recorder is None:
        return
    entry = make()  # also if closed: a layer that is run again for its gradient must save as many tensors as before
    if not recorder.closed:
        recorder.entries.append(entry)


def record_index_loss(make: Callable[[], IndexLoss]) -> None:
    """As `record`, for the loss of an indexer."""
    recorder = _current()
    if recorder is None:
        return
    entry = make()
    if not recorder.closed:
        recorder.index_losses.append(entry)


def record_largest_logits(
    mixer: nn.Module, attended: Callable[[], tuple[Tensor, Tensor]], mask: AttentionMask, scale: float
) -> None:
    """As `record`, for the logits of an attention. attended: its q [B, H, T, d] and k [B, G, S, d]."""
    recorder = _current()
    if recorder is not None and recorder.logits is not None and not recorder.closed:
        recorder.logits.append(LargestLogits(mixer, largest_logits(*attended(), mask, scale)))


def _current() -> RouterRecorder | None:
    return _traced.recorder if is_compiling() else _recorder.get()
