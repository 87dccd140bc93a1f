"""Two softmaxes: both kernels and the summary against plain loops, with masks, groups and empty rows."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.double_softmax import (
    double_softmax,
    double_softmax_flops,
    read_summary,
    summarize_keys_values,
)

MASKS = {"all": None, "some": [[1, 0, 1, 1, 0], [0, 0, 0, 1, 0]], "nothing": [[1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]}


def draw(heads: int = 6, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows, 4 queries and 5 keys, 3 wide, values 7 wide."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 4, 3), (2, groups, 5, 3), (2, groups, 5, 7))
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k, v


def mask_of(name: str) -> Tensor | None:
    rows = MASKS[name]
    return None if rows is None else torch.tensor(rows) > 0


def softmax(numbers: list[float]) -> list[float]:
    top = max(numbers, default=0.0)
    powers = [math.exp(number - top) for number in numbers]
    return [power / math.fsum(powers) for power in powers]


def loops(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        visible_keys = [s for s in range(k.shape[2]) if mask is None or bool(mask[b, s])]
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            columns = [softmax([float(k[b, g, s, d]) for s in visible_keys]) for d in range(k.shape[3])]
            for t in range(q.shape[2]):
                weights = softmax(q[b, h, t].tolist())
                for d, column in enumerate(columns):
                    for s, share in zip(visible_keys, column, strict=True):
                        out[b, h, t] += weights[d] * share * v[b, g, s]
    return out


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 3), (4, 1)])
def test_kernels_equal_plain_loops(mask: str, heads: int, groups: int) -> None:
    q, k, v = draw(heads, groups)
    expected = loops(q, k, v, mask_of(mask))
    for kernel in ("linear", "reference"):
        with kernels(double_softmax=kernel):
            torch.testing.assert_close(double_softmax(q, k, v, mask_of(mask)), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        read_summary(q, summarize_keys_values(k, v, mask_of(mask))), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kernel", ["linear", "reference"])
def test_masked_keys_and_values_have_no_effect(kernel: str) -> None:
    inputs, mask = draw(), mask_of("nothing")
    assert mask is not None
    results = []
    for filler in (0.0, float("nan"), float("inf")):
        q, k, v = (x.clone() for x in inputs)
        k[~mask[:, None].expand(k.shape[:3])] = filler
        v[~mask[:, None].expand(v.shape[:3])] = filler
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with kernels(double_softmax=kernel):
            y = double_softmax(q, k, v, mask)
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)])
        assert float(y[1].detach().abs().max()) == 0
    for result in results[1:]:
        assert all(torch.equal(value, expected_value) for value, expected_value in zip(result, results[0], strict=True))
    assert all(bool(x.isfinite().all()) for x in results[0])


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (4, 0), (4, 1)])
def test_short_and_empty_sequences(queries: int, keys: int) -> None:
    q, k, v = draw()
    q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
    for kernel in ("linear", "reference"):
        with kernels(double_softmax=kernel):
            torch.testing.assert_close(double_softmax(q, k, v), loops(q, k, v, None), rtol=0, atol=1e-12)


def test_lower_precision_is_widened_and_cast_back() -> None:
    q, k, v = (x.bfloat16() for x in draw())
    y = double_softmax(q, k, v)
    assert (y.dtype, summarize_keys_values(k, v, None).dtype) == (torch.bfloat16, torch.float32)
    expected = loops(q.double(), k.double(), v.double(), None)
    assert float((y.double() - expected).square().mean() / expected.square().mean()) < 1e-4


def test_operations_are_counted() -> None:
    q, k, v = draw(6, 2)
    with FlopCounterMode(display=False) as counter, count_flops() as flops:
        double_softmax(q, k, v)
    assert flops[0] == counter.get_total_flops() == double_softmax_flops(2, 6 * 4, 2 * 5, 3 * 7)
    with count_flops() as separate_flops:
        read_summary(q, summarize_keys_values(k, v, None))
    assert separate_flops[0] == flops[0]
