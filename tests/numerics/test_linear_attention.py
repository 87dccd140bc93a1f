"""What linear attention is made of: maps, softmax over documents and sums over them, against plain loops."""

import math

import pytest
import torch
from torch import Tensor

from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.causal_sums import flops
from heddle.numerics.recurrent.linear_attention import (
    document_sums,
    elu,
    learned,
    relu,
    softmax_over_tokens,
)

SEGMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
REAL = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1, 1, 1]]).bool()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_maps_are_their_formulas() -> None:
    x = torch.tensor([-1e4, -30.0, -1.5, -1e-9, 0.0, 2.0, 1e4], dtype=torch.float64, requires_grad=True)
    want = [math.exp(value) if value < 0 else value + 1 for value in x.tolist()]
    assert elu(x).tolist() == pytest.approx(want, rel=1e-15)
    (slope,) = torch.autograd.grad(elu(x).sum(), x)
    assert slope.tolist() == pytest.approx([min(value, 1.0) for value in want], rel=1e-15)
    assert relu(x).tolist() == [0.0] * 5 + [2.0, 1e4]
    assert float(elu(torch.tensor(-30.0))) == pytest.approx(math.exp(-30), rel=1e-6)  # not rounded away beside 1
    assert elu(x.bfloat16()).dtype == relu(x.bfloat16()).dtype == torch.float32


def test_the_learned_map_is_two_softmaxes_of_a_matrix_a_head() -> None:
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(3, 5, 5)
    with counting() as tally:
        y = learned(x, weight)
    assert tally[0] == 2 * 2 * 3 * 4 * 5 * 5
    for b, h, t in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        scores = weight[h] @ x[b, h, t]
        want = torch.cat((scores.exp() / scores.exp().sum(), (-scores).exp() / (-scores).exp().sum()))
        torch.testing.assert_close(y[b, h, t], want)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("real", [None, REAL])
def test_softmax_over_tokens(real: Tensor | None, segments: Tensor | None) -> None:
    k = draw(2, 3, 9, 4)
    got = softmax_over_tokens(k * 50, None if real is None else ~real, segments)
    want = torch.zeros_like(k)
    for b in range(2):
        own = torch.zeros(9, dtype=torch.int64) if segments is None else segments[b]
        for document in own.unique():
            here = own == document if real is None else (own == document) & real[b]
            want[b, :, here] = (k[b, :, here] * 50).softmax(1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    probe = torch.randn_like(k)
    slopes = [torch.autograd.grad((x * probe).sum(), k)[0] for x in (got, want)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "segments"),
    [("product", None), ("reference", None), ("both_ways", SEGMENTS), ("reference", SEGMENTS)],
)
def test_document_sums_are_what_a_loop_says(form: str, segments: Tensor | None) -> None:
    q, k, v = draw(2, 3, 9, 4), draw(2, 3, 9, 4), draw(2, 3, 9, 5)
    with kernels(document_sums=form), counting() as tally:
        got = document_sums(q, k, v, segments)
    assert tally[0] == flops(9, 2, 3, (4, 5))
    rows = []
    for b in range(2):
        for i in range(9):
            held = torch.zeros(3, 4, 5, dtype=torch.float64)
            for j in range(9):
                if segments is None or segments[b, i] == segments[b, j]:
                    held = held + k[b, :, j, :, None] * v[b, :, j, None]
            rows.append((q[b, :, i, :, None] * held).sum(1))
    want = torch.stack(rows).unflatten(0, (2, 9)).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    probe = torch.randn_like(want)
    slopes = [torch.autograd.grad((x * probe).sum(), (q, k, v)) for x in (got, want)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_an_empty_call_of_documents() -> None:
    x = torch.zeros(2, 3, 0, 4)
    for segments in (None, torch.zeros(2, 0, dtype=torch.int64)):
        assert document_sums(x, x, x, segments).shape == (2, 3, 0, 4)
        assert softmax_over_tokens(x, None, segments).shape == (2, 3, 0, 4)
