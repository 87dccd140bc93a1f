"""Prepare what the next step needs on one thread, while this step runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from types import TracebackType
from typing import Generic, TypeVar

import torch

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.training.settings import Settings
from heddle.training.step import PreparedBatch, prepare_batch

Value = TypeVar("Value")


class Prefetcher(Generic[Value]):
    """Calls `build` for the next step on a thread, one step ahead of `take`.

    steps: there is nothing to build from here on. An error of `build` is raised by the `take` of its step, as if it had
    been called there. When the block ends, the thread ends; a build under way is awaited, and its item dropped.
    """

    def __init__(self, build: Callable[[int], Value], steps: int) -> None:
        self._build, self._steps = build, steps
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heddle-batches")
        self._ahead: tuple[int, Future[Value]] | None = None

    def take(self, step: int) -> Value:
        """Return the item of a step, and start with that of the next one. Steps may come in any order."""
        ahead = self._ahead
        future = ahead[1] if ahead is not None and ahead[0] == step else self._submit(step)
        self._ahead = (step + 1, self._submit(step + 1)) if step + 1 < self._steps else None
        return future.result()

    def _submit(self, step: int) -> Future[Value]:
        return self._executor.submit(copy_context().run, self._build, step)

    def __enter__(self) -> "Prefetcher[Value]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def prepared_batches(
    batch_at: Callable[[int], Batch], settings: Settings, device: torch.device, ranks: Ranks, ahead: bool
) -> Iterator[Callable[[int], PreparedBatch]]:
    """Yield a function from a step to its batch, of which this rank's rows are on the device.

    ahead: a thread makes the next batch while a step runs, and copies it through pinned memory.
    """

    def prepare(step: int) -> PreparedBatch:
        return prepare_batch(batch_at(step), device, settings.gradient_accumulation_steps, ranks)

    if not ahead:
        yield prepare
        return
    with Prefetcher(prepare, settings.steps) as prefetcher:
        yield prefetcher.take
