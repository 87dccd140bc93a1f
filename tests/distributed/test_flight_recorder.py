"""The newest collective of a process, as torch's own recorder has it."""

import json
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore

from heddle.distributed.process_group import newest_collective


def test_the_newest_collective_is_named() -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        distributed.all_reduce(torch.ones(3, 5))
        first = newest_collective()
        assert first is not None
        name, number = first.rsplit(" ", 1)
        assert name == "all_reduce of [3, 5], number"
        distributed.broadcast(torch.ones(2), 0)
        assert newest_collective() == f"broadcast of [2], number {int(number) + 1}"
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], None),
        (None, None),
        ([["gloo:all_gather", [[1], [2], [3], [4]], 7]], "all_gather of [1], [2], [3], …, number 7"),
    ],
)
def test_what_is_recorded_is_told(entries: Any, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("profiling_name", "input_sizes", "collective_seq_id")
    dump = {} if entries is None else {"entries": [dict(zip(keys, entry, strict=True)) for entry in entries]}
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda: json.dumps(dump).encode())
    assert newest_collective() == text
    monkeypatch.delattr(_distributed_c10d, "_dump_fr_trace_json")
    assert newest_collective() is None
