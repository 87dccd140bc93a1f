"""The launcher's answer to the ways in which ranks end."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from heddle.distributed import launcher
from heddle.errors import RankLost


def ending(*codes: int) -> Callable[..., Any]:
    """A stand-in of torchrun's agent: the ranks end with these codes the first time, and well the second time."""
    starts = []

    def elastic_launch(config: object, entry: str) -> Callable[..., None]:
        def run(*arguments: str) -> None:
            starts.append(arguments)
            if len(starts) == 1:
                failures = {rank: ProcessFailure(rank, 100 + rank, code, "") for rank, code in enumerate(codes) if code}
                raise ChildFailedError("heddle", failures)

        return run

    return elastic_launch


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((0, -9), 0),  # a rank was killed: all start again
        ((143, -9), 0),  # the agent then ended another by SIGTERM, which it said first
        ((-15, -9, 75), 0),
        ((143, 143), 143),  # SIGTERM to a rank: all agreed on it and saved
        ((2, -9), 2),  # a refusal
    ],
)
def test_only_deaths_are_answered_by_another_start(
    codes: tuple[int, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "elastic_launch", ending(*codes))
    assert launcher.launch(["train"], len(codes), 1) == code


@pytest.mark.parametrize(
    ("codes", "sentence"),
    [
        ((75, -9, -15), "rank 1 (process 101, SIGKILL) was killed"),
        ((-9, -11), "ranks 0 (process 100, SIGKILL), 1 (process 101, SIGSEGV) were killed"),
        ((75, 0, 75), "rank 1 ended without an error"),
        ((0, 75, 0), "ranks 0, 2 ended without an error"),
        ((75, 75), "ranks 0, 1 lost each other"),
    ],
)
def test_the_rank_that_died_is_named(codes: tuple[int, ...], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "elastic_launch", ending(*codes))
    with pytest.raises(RankLost, match=re.escape(f"{sentence}; the same command continues")):
        launcher.launch(["train"], len(codes), 0)
