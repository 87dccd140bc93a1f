"""Feature maps, the softmax over documents and the sums over documents, against plain loops."""

import math

import pytest
import torch
from torch import Tensor

from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.linear_attention import (
    document_sums,
    elu_features,
    hedgehog_features,
    relu_features,
    softmax_over_tokens,
)

SEGMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
REAL = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1, 1, 1]]).bool()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_feature_maps_equal_their_formulas() -> None:
    x = torch.tensor([-1e4, -30.0, -1.5, -1e-9, 0.0, 2.0, 1e4], dtype=torch.float64, requires_grad=True)
    expected = [math.exp(value) if value < 0 else value + 1 for value in x.tolist()]
    assert elu_features(x).tolist() == pytest.approx(expected, rel=1e-15)
    (gradient,) = torch.autograd.grad(elu_features(x).sum(), x)
    assert gradient.tolist() == pytest.approx([min(value, 1.0) for value in expected], rel=1e-15)
    assert relu_features(x).tolist() == [0.0] * 5 + [2.0, 1e4]
    assert float(elu_features(torch.tensor(-30.0))) == pytest.approx(
        math.exp(-30), rel=1e-6
    )  # not lost when 1 is added
    assert elu_features(x.bfloat16()).dtype == relu_features(x.bfloat16()).dtype == torch.float32


def test_hedgehog_features_are_two_softmaxes_with_one_matrix_per_head() -> None:
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(3, 5, 5)
    with count_flops() as flops:
        y = hedgehog_features(x, weight)
    assert flops[0] == 2 * 2 * 3 * 4 * 5 * 5
    for b, h, t in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        scores = weight[h] @ x[b, h, t]
        expected = torch.cat((scores.exp() / scores.exp().sum(), (-scores).exp() / (-scores).exp().sum()))
        torch.testing.assert_close(y[b, h, t], expected)


@pytest.mark.parametrize("call_segment_ids", [None, SEGMENTS])
@pytest.mark.parametrize("is_token", [None, REAL])
def test_softmax_over_tokens(is_token: Tensor | None, call_segment_ids: Tensor | None) -> None:
    k = draw(2, 3, 9, 4)
    actual = softmax_over_tokens(k * 50, None if is_token is None else ~is_token, call_segment_ids)
    expected = torch.zeros_like(k)
    for b in range(2):
        segment_ids = torch.zeros(9, dtype=torch.int64) if call_segment_ids is None else call_segment_ids[b]
        for document in segment_ids.unique():
            tokens = segment_ids == document if is_token is None else (segment_ids == document) & is_token[b]
            expected[b, :, tokens] = (k[b, :, tokens] * 50).softmax(1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    probe = torch.randn_like(k)
    gradients = [torch.autograd.grad((x * probe).sum(), k)[0] for x in (actual, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "call_segment_ids"),
    [("product", None), ("reference", None), ("both_directions", SEGMENTS), ("reference", SEGMENTS)],
)
def test_document_sums_equal_a_loop(kernel: str, call_segment_ids: Tensor | None) -> None:
    q, k, v = draw(2, 3, 9, 4), draw(2, 3, 9, 4), draw(2, 3, 9, 5)
    with kernels(document_sums=kernel), count_flops() as flops:
        actual = document_sums(q, k, v, call_segment_ids)
    assert flops[0] == causal_sums_flops(9, 2, 3, (4, 5))
    rows = []
    for b in range(2):
        for i in range(9):
            state = torch.zeros(3, 4, 5, dtype=torch.float64)
            for j in range(9):
                if call_segment_ids is None or call_segment_ids[b, i] == call_segment_ids[b, j]:
                    state = state + k[b, :, j, :, None] * v[b, :, j, None]
            rows.append((q[b, :, i, :, None] * state).sum(1))
    expected = torch.stack(rows).unflatten(0, (2, 9)).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    probe = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * probe).sum(), (q, k, v)) for x in (actual, expected)]
    for actual_gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-12)


def test_an_empty_call_of_documents() -> None:
    x = torch.zeros(2, 3, 0, 4)
    for call_segment_ids in (None, torch.zeros(2, 0, dtype=torch.int64)):
        assert document_sums(x, x, x, call_segment_ids).shape == (2, 3, 0, 4)
        assert softmax_over_tokens(x, None, call_segment_ids).shape == (2, 3, 0, 4)
