"""Counting the floating-point operations of matrix products as they are called, on any device (meta too)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.compiler import is_compiling

_tally: ContextVar[list[int] | None] = ContextVar("tally", default=None)


def count(flops: int) -> None:
    """Add the operations of one call (a multiply-add is two) to the tally in force, if any."""
    tally = None if is_compiling() else _tally.get()
    if tally is not None:
        tally[0] += flops


@contextmanager
def counting() -> Iterator[list[int]]:
    """Within the block, `tally[0]` holds the operations of every matrix product called so far."""
    tally = [0]
    token = _tally.set(tally)
    try:
        yield tally
    finally:
        _tally.reset(token)
