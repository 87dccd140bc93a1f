"""Counts the floating-point operations of matrix products as they run, on any device including meta."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.compiler import is_compiling

_total: ContextVar[list[int] | None] = ContextVar("total", default=None)


def counts_flops() -> bool:
    """Whether the call is within `count_flops` (and not being compiled)."""
    return not is_compiling() and _total.get() is not None


def add_flops(flops: int) -> None:
    """Add the FLOPs of one call (a multiply-add is two) to the enclosing `count_flops`, if there is one."""
    total = None if is_compiling() else _total.get()
    if total is not None:
        total[0] += flops


@contextmanager
def count_flops() -> Iterator[list[int]]:
    """Yield a list whose only element is the number of FLOPs counted in the block so far."""
    total = [0]
    token = _total.set(total)
    try:
        yield total
    finally:
        _total.reset(token)
