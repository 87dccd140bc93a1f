"""Recurrences over chunks in few launches: scans, the inverse and pairs against the plain forms, for many chunks."""

import pytest
import torch
from torch import Tensor

from heddle.numerics.recurrent.batched_chunks import (
    _block_products,
    _in_order,
    _Scan,
    channel_decays,
    channel_pairs,
    scan_transitions,
    unit_triangular_inverse,
)
from tests.laws.planting import Plant, assigned, condition, constant, reads


def in_order(transitions: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk after the other."""
    states = [state]
    for chunk in range(transitions.shape[1]):
        states.append(transitions[:, chunk] @ states[-1] + added[:, chunk])
    return torch.stack(states[:-1], dim=1), states[-1]


def compare_scans(chunks: int) -> None:
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((2, chunks, 3, 3), (2, chunks, 3, 2), (2, 3, 2))]
    inputs = [(x * 0.4).requires_grad_() for x in inputs]
    actual, expected = scan_transitions(*inputs), in_order(*inputs)
    probes = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad([(x * probe).sum() for x, probe in zip(pair, probes, strict=True)], inputs)
        for pair in (actual, expected)
    ]
    for got, want in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 3, 4, 5, 9, 16, 17, 66])
def test_a_scan_equals_one_chunk_after_the_other(chunks: int) -> None:
    compare_scans(chunks)


@pytest.mark.parametrize(
    "plant",
    [
        reads(_Scan.backward, "before", lambda before, *, after: after),
        assigned(_block_products, "product", lambda _, *, product, step: product @ step, nth=1),
        constant(_Scan.backward, True, False),
        condition(_in_order, "reverse", False, nth=1),
    ],
    ids=["states after", "products in reverse", "gradients forward", "steps not transposed"],
)
def test_a_wrong_scan_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        compare_scans(66)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 33])
def test_the_inverse_of_a_unit_triangle(size: int) -> None:
    system = 0.2 * torch.randn(3, 2, size, size, dtype=torch.float64)
    expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + system.tril(-1))
    torch.testing.assert_close(unit_triangular_inverse(system), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 5, 8, 33])
def test_pairs_that_decay_by_channels(size: int, packed: bool) -> None:
    q, k = (torch.randn(2, 2, 1, 3, size, 4, dtype=torch.float64) for _ in range(2))
    log_decay = -torch.randn(2, 2, 3, 3, size, 4, dtype=torch.float64).square()
    ids = (torch.randn(2, 3 * size) > 1).cumsum(1) if packed else None
    rows = torch.stack((q, k))
    (actual, actual_decays), (expected, expected_decays) = (
        function(rows, k, log_decay, ids) for function in (channel_pairs, channel_decays)
    )
    for got, want in zip((actual, *actual_decays), (expected, *expected_decays), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
