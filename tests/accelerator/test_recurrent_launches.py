"""Launches of recurrences on an accelerator hardly grow with the text, and their kernels are those for all chunks."""

from collections.abc import Callable

import pytest

from heddle.numerics.recurrent.batched_chunks import _block_products
from tests.accelerator import budget_rows
from tests.accelerator.budgets import count
from tests.laws.planting import condition

SCAN_LEVEL = 22  # launches of one more level of blocks in the scan of the delta rule, in both directions
ROWS: dict[str, tuple[Callable[[], budget_rows.Call], str, int]] = {
    "retention": (lambda: budget_rows.sums_call(True), "batched", 0),
    "linear": (lambda: budget_rows.sums_call(False), "batched", 0),
    "mamba2": (budget_rows.ssd_call, "batched", 0),
    "gated_delta": (budget_rows.delta_call, "batched", SCAN_LEVEL),
    "kda": (lambda: budget_rows.delta_call(channels=True), "batched", SCAN_LEVEL),
    "convolution": (budget_rows.convolution_call, "grouped", 0),
}


def growth(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Launches for 2,048 tokens beyond those for 512, forward and backward."""
    make, kernel, _ = ROWS[name]
    launches = []
    for length in (512, 2048):
        monkeypatch.setattr(budget_rows, "LENGTH", length)
        cost, choices = count(make)
        assert choices[-1].kernel == kernel
        launches.append(cost.launches)
    return launches[1] - launches[0]


@pytest.mark.parametrize("name", ROWS)
def test_launches_hardly_grow_with_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert growth(name, monkeypatch) <= ROWS[name][2]


def test_a_scan_chunk_by_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    condition(_block_products, "SCAN_BLOCK", False)(monkeypatch)
    assert growth("gated_delta", monkeypatch) > SCAN_LEVEL
