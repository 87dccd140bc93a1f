"""Texts between ranks, and failures that all ranks share: no rank waits for one that has failed."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from heddle import errors
from heddle.distributed.ranks import Ranks

_HEARTBEAT_SECONDS = 10.0
SHARED_ERRORS = (errors.CheckpointError, errors.ConfigError, errors.DataError, errors.MachineError)


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Return each rank's text, in the order of ranks, on all of them. All ranks must call it at once."""
    if ranks.count == 1:
        return [text]
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = ranks.gather(torch.tensor(len(content))).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(content)] = content
    rows = ranks.gather(padded)
    return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def call_on_all(ranks: Ranks, function: Callable[[], str]) -> list[str]:
    """Call `function` on each rank and return all results, on all ranks.

    If it fails on a rank, all ranks raise: the sentence is that of the first rank that failed. The function runs in a
    thread and must not communicate: meanwhile the ranks tell each other that they are alive, so that a long call,
    such as the writing of a large file, is not taken for a rank that hangs.
    """
    if ranks.count == 1:
        return [function()]
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(function)
        outcomes: list[Any] = [None]
        while None in outcomes:
            wait([pending], _HEARTBEAT_SECONDS)
            outcomes = [json.loads(text) for text in gather_texts(ranks, json.dumps(_outcome(pending)))]
    for rank, (kind, text) in enumerate(outcomes):
        if kind and rank == ranks.rank:
            pending.result()
        if kind:
            error_class = next((each for each in SHARED_ERRORS if each.__name__ == kind), None)
            if error_class is not None:
                raise error_class(text)
            raise errors.MachineError(f"rank {rank}: failed ({kind}: {text}); its own message says where")
    return [text for _, text in outcomes]


def _outcome(pending: Future[str]) -> tuple[str, str] | None:
    """The name of the error and its sentence, or no name and the result; None while the function runs."""
    if not pending.done():
        return None
    error = pending.exception()
    if error is None:
        return "", pending.result()
    kind = next((each for each in SHARED_ERRORS if isinstance(error, each)), type(error))
    return kind.__name__, str(error)
