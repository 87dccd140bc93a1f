"""Looking at attention weights while the fast forms run: nothing is computed for them unless someone looks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor
from torch.compiler import is_compiling


class Observation(NamedTuple):
    """The weights of one call, [B, H, T, S] in at least float32; `groups` heads of keys and values were read."""

    weights: Tensor
    groups: int


Take = Callable[[Observation], None]

_observer: ContextVar[Take | None] = ContextVar("observer", default=None)


def observe(make: Callable[[], Observation]) -> None:
    """Give the weights of a call, or those that it implies, to who looks; `make` is called for nobody else."""
    take = None if is_compiling() else _observer.get()
    if take is not None:
        take(make())


@contextmanager
def observing(take: Take) -> Iterator[None]:
    """Within the block, `take` receives the weights of every call that has some; results do not change."""
    token = _observer.set(take)
    try:
        yield
    finally:
        _observer.reset(token)
