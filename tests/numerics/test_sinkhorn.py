"""Sinkhorn normalization against plain divisions, at convergence, and where plain divisions fail."""

import numpy as np
import pytest
import torch

from heddle.numerics.norms import sinkhorn


def logits(scale: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (scale * torch.randn(20, 4, 4, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("iterations", [1, 2, 13])
def test_it_equals_plain_divisions(iterations: int) -> None:
    inputs = logits(2.0)
    expected = np.exp(inputs.numpy())
    for _ in range(iterations):
        expected = expected / expected.sum(1, keepdims=True)
        expected = expected / expected.sum(2, keepdims=True)
    torch.testing.assert_close(sinkhorn(inputs, iterations), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_rows_and_columns_converge_to_sum_one() -> None:
    result = sinkhorn(logits(1.0), 200)
    ones = torch.ones(20, 4, dtype=torch.float64)
    torch.testing.assert_close(result.sum(-1), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(result.sum(-2), ones, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 30.0, 1e4])
def test_any_logits_have_rows_of_one_and_a_gradient(scale: float) -> None:
    inputs = logits(scale).requires_grad_()
    result = sinkhorn(inputs, 20)
    result.square().sum().backward()
    torch.testing.assert_close(result.detach().sum(-1), torch.ones(20, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert inputs.grad is not None
    assert bool(inputs.grad.isfinite().all())


def test_half_precision_is_widened() -> None:
    assert sinkhorn(logits(1.0, torch.bfloat16), 3).dtype == torch.float32
