"""Experts as on an accelerator: no host wait and few launches, whatever the dtype and the widths."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.activations import glu
from heddle.numerics.experts.mixture import RoutingConfig, _counts, _order, block_rows, route, run_experts
from heddle.numerics.experts.sorted import ExpertAssignment, ExpertWeights
from tests.accelerator.budget_rows import fake
from tests.accelerator.budgets import count
from tests.accelerator.pretend import DEVICE, on_device, pretending, values_of
from tests.laws.planting import Plant, wrapped
from tests.numerics.test_experts import WIDTH, make_assignment, make_weights

SILU = glu(functional.silu)


def waits(dtype: torch.dtype, drop_some: bool = False) -> list[str]:
    """Host waits of routing, experts and their gradients. The values must equal those of a CPU."""
    weights, drawn = make_weights(True, True, dtype), make_assignment(40, 2, drop_some, False, dtype)
    x, logits = torch.randn(40, WIDTH).to(dtype), torch.randn(40, 5)
    expected = run_experts(x, drawn, weights, SILU)
    moved = weights.map(lambda weight: on_device(weight).requires_grad_())
    indices, gates = on_device(drawn.expert_indices), on_device(drawn.gates)
    assignment = ExpertAssignment(indices, gates, None, drawn.none_dropped)
    with pretending() as log:
        route(on_device(logits), None, RoutingConfig("softmax_topk", 3))
        y = run_experts(on_device(x).requires_grad_(), assignment, moved, SILU)
        torch.autograd.backward(y.float().sum())
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(values_of(y), expected, rtol=0, atol=tolerance)
    return log.report


@pytest.mark.parametrize("drop_some", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_host_never_waits(dtype: torch.dtype, drop_some: bool) -> None:
    assert waits(dtype, drop_some) == []


@pytest.mark.parametrize(
    "plant",
    [
        wrapped(_counts, lambda counts, experts, number: counts(experts, number + 0 * int(experts.max()))),
        wrapped(_order, lambda order, experts, number, _: order(experts, number, bool((experts >= 0).all()))),
    ],
    ids=["for the counts", "for the order"],
)
def test_a_wait_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert waits(torch.float32) != []


@pytest.mark.parametrize(
    ("dtype", "width", "kernel", "limit"),
    [
        (torch.bfloat16, 256, "grouped", 50),
        (torch.float32, 256, "blockwise", 80),
        (torch.bfloat16, 252, "blockwise", 90),  # rows do not start at multiples of 16 bytes
    ],
)
def test_launches_do_not_depend_on_the_experts(dtype: torch.dtype, width: int, kernel: str, limit: int) -> None:
    counts = set()
    for experts in (8, 64):

        def make(experts: int = experts) -> Callable[[], Tensor]:
            sizes = (experts, 128, width), (experts, width, 128), (experts, 128, width)
            weights = ExpertWeights(*(fake(*size, dtype=dtype) for size in sizes))
            indices = torch.empty(4096, 2, dtype=torch.int64, device=DEVICE)
            assignment = ExpertAssignment(indices, fake(4096, 2, dtype=torch.float32), None, True)
            x = fake(4096, width, dtype=dtype)
            return lambda: run_experts(x, assignment, weights, SILU)

        cost, choices = count(make)
        counts.add(cost.launches)
        assert [choice.kernel for choice in choices] == [kernel]
    assert len(counts) == 1
    assert counts.pop() <= limit


@pytest.mark.parametrize(("assignments", "rows"), [(8, 64), (256, 64), (262_144, 1024), (40_000, 144)])
def test_blocks_are_a_quarter_of_an_experts_rows(assignments: int, rows: int) -> None:
    """Of 64 experts. At least as many as take as long to multiply as a copy of the weight to make."""
    assert block_rows(assignments, 64) == rows
