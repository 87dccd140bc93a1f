"""The budgets: no count is worse than the committed one, and each budget that was met stays met."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from heddle.numerics.attention import sdpa
from heddle.numerics.recurrent import batched_chunks, causal_sums
from heddle.parts.modules.eager import eager_methods
from tests.accelerator import budget_rows, budgets, launches
from tests.accelerator.budgets import GOLDEN, ROWS, Row, Table

TABLE = Table.read()
CHEAP = [name for name, row in ROWS.items() if row.cheap]


def faults(names: list[str]) -> list[str]:
    """The rows that are worse than committed, or than a budget that was met."""
    found = []
    for name in names:
        row, committed = ROWS[name], TABLE.now[name]
        value = row.measure()
        if row.worse(value, committed):
            found.append(f"{row.title}: {value} {row.unit}, committed are {committed}")
    return found


def test_no_count_is_worse_than_the_committed_one() -> None:
    assert faults(CHEAP) == [], "if it must be: python -m tests.accelerator.budgets"


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ROWS if name not in CHEAP])
def test_no_large_count_is_worse_than_the_committed_one(name: str) -> None:
    assert faults([name]) == []


def test_the_table_has_every_row() -> None:
    assert list(TABLE.now) == list(ROWS)
    assert json.loads(GOLDEN.read_text(encoding="utf-8")).keys() == {"start", "now"}


def test_the_budgets_that_are_open_are_these() -> None:
    """A budget that a change meets leaves this list for good."""
    still_open = {name for name, row in ROWS.items() if row.met(TABLE.now[name]) is False}
    assert still_open == OPEN


OPEN: set[str] = set()


def test_a_planted_loop_over_chunks_breaks_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    original = batched_chunks.batched_sums

    def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *rates, state = others
        out = []
        for start in range(0, q.shape[2], 512):
            part = slice(start, start + 512)
            log_decay, ids = (x if x is None else x[:, :, part] for x in rates)
            y, state = original(q[:, :, part], k[:, :, part], v[:, :, part], log_decay, ids, state)
            out.append(y)
        return torch.cat(out, dim=2), state

    monkeypatch.setattr(causal_sums, "batched_sums", loop)
    assert len(faults(["retention"])) == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("row", "module", "name", "fault"),
    [
        # experts and delta rules between two graphs
        ("mfu_moe_compile", launches, "eager_methods", lambda module, _: eager_methods(module, "cpu")),
        ("mfu_gated_delta_compile", launches, "eager_methods", lambda m, _: eager_methods(m, "cpu")),
        ("mfu_mla_compile", sdpa, "_cudnn_serves", lambda q, v: False),  # padded values
    ],
)
def test_a_planted_fault_breaks_the_budget_of_a_training(
    row: str, module: ModuleType, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert ROWS[row].met(ROWS[row].measure()) is False


def test_a_planted_read_of_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "causal", Row("", lambda: budgets.launches(planted)))
    with pytest.raises(Exception, match="_local_scalar_dense"):
        faults(["causal"])


def planted() -> Callable[[], torch.Tensor]:
    call = budget_rows.attention_call()

    def read() -> torch.Tensor:
        y = call()
        return y * float(y.detach().amax().item())

    return read


def test_worse_and_met_depend_on_the_unit() -> None:
    launches, utilization = Row("", float, "launches", 40), Row("", float, "% MFU", 60)
    assert launches.worse(41, 40)
    assert not launches.worse(39, 40)
    assert utilization.worse(59.0, 60.0)
    assert not utilization.worse(61.0, 60.0)
    assert (launches.met(40), launches.met(41)) == (True, False)
    assert (utilization.met(60), utilization.met(59)) == (True, False)
