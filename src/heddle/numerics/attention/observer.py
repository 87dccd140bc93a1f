"""Passes attention weights to an observer. They are computed only if an observer is set; the fast kernels still run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class Observation(NamedTuple):
    """Attention weights of one call, [B, H, T, S] in at least float32. `groups` is the number of key/value heads."""

    weights: Tensor
    groups: int


ObserverCallback = Callable[[Observation], None]

_observer: ContextVar[ObserverCallback | None] = ContextVar("observer", default=None)
_implied: ContextVar[bool] = ContextVar("implied", default=False)


def notify_observer(compute: Callable[[], Observation]) -> None:
    """Pass the weights of a call to the observer. `compute` is called only if there is an observer."""
    callback = None if is_compiling() else _observer.get()
    if callback is not None:
        callback(compute())


def notify_implied_weights(attend: Callable[[Tensor], Tensor], v: Tensor, padding: Tensor | None) -> None:
    """Pass the implied weights of a mixer without a softmax to the observer, if it asked for implied weights.

    attend: maps values [B, H, S, d] to outputs [B, H, T, d] and is linear in them, so its outputs for one-hot values
    are its weights of the values v [B, H, S, d_v]. padding: bool [B, T], True where the weights are set to zero.
    """
    if is_compiling() or not _implied.get():
        return

    def compute() -> Observation:
        one_hot = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)
        weights = attend(one_hot)
        return Observation(
            weights if padding is None else weights.masked_fill(padding[:, None, :, None], 0.0), v.shape[1]
        )

    notify_observer(compute)


@contextmanager
def observing_attention(callback: ObserverCallback, implied: bool = False) -> Iterator[None]:
    """Within the block, call `callback` with the weights of every attention call. Results do not change.

    implied: also pass the implied weights of mixers that are linear in the values, such as linear attention.
    """
    callback_token, implied_token = _observer.set(callback), _implied.set(implied)
    try:
        yield
    finally:
        _observer.reset(callback_token)
        _implied.reset(implied_token)
