"""Looking at attention weights while the fast forms run: nothing is computed for them unless someone looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling


class Observation(NamedTuple):
    """The weights of one call, [B, H, T, S] in at least float32; `groups` heads of keys and values were read."""

    weights: Tensor
    groups: int


Take = Callable[[Observation], None]

_observer: ContextVar[Take | None] = ContextVar("observer", default=None)
_implied: ContextVar[bool] = ContextVar("implied", default=False)


def observe(make: Callable[[], Observation]) -> None:
    """Give the weights of a call to who looks; `make` is called for nobody else."""
    take = None if is_compiling() else _observer.get()
    if take is not None:
        take(make())


def imply(answer: Callable[[Tensor], Tensor], v: Tensor, padding: Tensor | None) -> None:
    """Give the weights that an answer without a softmax implies, to who looks and asked for such.

    answer: linear in the values, [B, H, S, d] -> [B, H, T, d], so what it makes of one-hot values are its weights of
    the values v [B, H, S, d_v]. padding: bool [B, T], whose rows become zero.
    """
    if is_compiling() or not _implied.get():
        return

    def make() -> Observation:
        one_hot = torch.eye(v.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)
        weights = answer(one_hot)
        return Observation(
            weights if padding is None else weights.masked_fill(padding[:, None, :, None], 0.0), v.shape[1]
        )

    observe(make)


@contextmanager
def observing(take: Take, implied: bool = False) -> Iterator[None]:
    """Within the block, `take` receives the weights of every call that has some; results do not change.

    implied: also of those that have none, but imply some.
    """
    token, other = _observer.set(take), _implied.set(implied)
    try:
        yield
    finally:
        _observer.reset(token)
        _implied.reset(other)
