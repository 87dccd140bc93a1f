"""Ranks as threads of one process: torch's own test group, without sockets or processes."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def on_ranks(ranks: int, function: Callable[[int], Any]) -> list[Any]:
    """Call function(rank) in `ranks` threads that form a process group; returns the results in order.

    Raises the first rank's error.
    """
    store, results, errors = HashStore(), [None] * ranks, dict[int, BaseException]()
    _install_threaded_pg()
    _set_thread_isolation_mode(True)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        distributed.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error
            ProcessLocalGroup.exception_handle(error)
        finally:
            distributed.destroy_process_group()

    try:
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _set_thread_isolation_mode(False)
        torch.compiler.set_stance("default")  # of the whole process: threads set and restore it out of order
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    for rank in sorted(errors, key=lambda rank: (type(errors[rank]).__name__ == "BrokenBarrierError", rank)):
        raise errors[rank]
    return results
