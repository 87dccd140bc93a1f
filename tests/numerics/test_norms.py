"""Norms against plain loops, in every kernel and precision, with inputs from tiny to huge."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.numerics.dispatch import record_choices
from heddle.numerics.kernels import kernels
from heddle.numerics.norms import _normalized, layer_norm, layer_norm_reference, reference, rms_norm
from tests.laws.planting import Plant, calls, condition


def rms_loop(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    rows = []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        root = math.sqrt(math.fsum(value * value for value in row) / len(row) + eps)
        rows.append([(offset + gain) * value / root for value, gain in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def layer_loop(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    rows = []
    for row in x.reshape(-1, x.shape[-1]).tolist():
        mean = math.fsum(row) / len(row)
        root = math.sqrt(math.fsum((value - mean) ** 2 for value in row) / len(row) + eps)
        triples = zip(row, weight.tolist(), bias.tolist(), strict=True)
        rows.append([gain * (value - mean) / root + shift for value, gain, shift in triples])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("kernel", ["fused", "normalized", "reference"])
@pytest.mark.parametrize(("offset", "cast"), [(0.0, "before"), (0.0, "after"), (1.0, "after"), (1.0, "before")])
def test_rms_norm(size: float, kernel: str, offset: float, cast: str) -> None:
    x, weight = torch.randn(3, 5, 11, dtype=torch.float64) * size, torch.randn(11, dtype=torch.float64)
    expected = rms_loop(x, weight, 1e-5, offset)
    if kernel == "fused" and offset:
        with pytest.raises(ConfigError, match="offset"), kernels(rms_norm=kernel):
            rms_norm(x, weight, 1e-5, offset, cast)
        return
    with kernels(rms_norm=kernel):
        torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset, cast), expected, rtol=1e-12, atol=1e-30)


NARROW = [torch.bfloat16, torch.float16]
VARIANTS = [(0.0, "before"), (1.0, "before"), (0.0, "after"), (1.0, "after")]


@pytest.mark.parametrize("heads", [None, 5])
@pytest.mark.parametrize("weight_dtype", [torch.float32, None])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("offset", "cast"), VARIANTS)
def test_norms_of_accelerators_round_as_the_reference(
    offset: float, cast: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, heads: int | None
) -> None:
    """Statistics in float32, rounded where the reference rounds: equal in bits, whatever the dtype of the weight."""
    x = torch.randn(3, 5, 32).to(dtype).requires_grad_()
    weight = torch.randn((32,) if heads is None else (heads, 32)).to(weight_dtype or dtype)
    expected = reference(x, weight, 1e-5, offset, cast)
    with record_choices("cuda") as choices:
        actual = rms_norm(x, weight, 1e-5, offset, cast)
    assert choices[0].kernel in ("fused", "normalized")
    assert torch.equal(actual, expected)
    gradients = [torch.autograd.grad(y.float().sum(), x)[0].double() for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.05)


def test_a_cpu_computes_narrow_norms_in_steps() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(32).bfloat16()
    with record_choices("cpu") as choices:
        rms_norm(x, weight, 1e-5, 0.0, "after")
        layer_norm(x, weight, None, 1e-5)
    assert [choice.kernel for choice in choices] == ["steps", "steps"]


def check_all_variants() -> None:
    for (offset, cast), weight_dtype, heads in product(VARIANTS, (None, torch.float32), (None, 5)):
        test_norms_of_accelerators_round_as_the_reference(offset, cast, torch.bfloat16, weight_dtype, heads)


@pytest.mark.parametrize(
    "plant",
    [
        calls(_normalized, "to", lambda weight, dtype: weight, nth=1),
        calls(_normalized, "with_offset", lambda _, weight, *rest: weight),
        calls(_normalized, "rms_norm", lambda functional, *x, gamma: functional.rms_norm(*x) / gamma, nth=2),
        calls(_normalized, "at_least_float32", lambda _, x: x),
        condition(_normalized, "cast", True),
    ],
    ids=["a weight that is not cast", "no offset", "no weight", "narrow statistics", "always cast before"],
)
def test_planted_bugs_in_norms_are_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_all_variants()


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
def test_layer_norms_of_accelerators(dtype: torch.dtype) -> None:
    x, (weight, bias) = torch.randn(3, 5, 32).to(dtype), torch.randn(2, 32).to(dtype)
    exact = layer_loop(x.double(), weight.double(), bias.double(), 1e-5)
    with record_choices("cuda") as choices:
        actual = layer_norm(x, weight, bias, 1e-5)
        layer_norm(x, weight.float() if dtype != torch.float32 else weight.double(), None, 1e-5)
    assert [choice.kernel for choice in choices] == ["fused", "reference"]
    error, allowed = (float((y.double() - exact).norm()) for y in (actual, layer_norm_reference(x, weight, bias, 1e-5)))
    assert error <= 2 * allowed + 1e-12


def test_rms_of_the_output_is_one() -> None:
    y = rms_norm(torch.randn(4, 64, dtype=torch.float64) * 7, torch.ones(64, dtype=torch.float64), 1e-12)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
@pytest.mark.parametrize("kernel", ["fused", "steps", "normalized", "reference"])
def test_norms_without_a_weight_have_gains_of_one(kernel: str, dtype: torch.dtype) -> None:
    x, ones = torch.randn(3, 5, 32).to(dtype), torch.ones(32, dtype=torch.float64)
    rms, layer = rms_loop(x.double(), ones, 1e-5, 0.0), layer_loop(x.double(), ones, 0 * ones, 1e-5)
    rtol, atol = (0.0, 1e-12) if dtype == torch.float64 else (2**-8, 1e-6)
    if kernel != "fused" or dtype == torch.float64:
        with kernels(rms_norm=kernel):
            torch.testing.assert_close(rms_norm(x, None, 1e-5).double(), rms, rtol=rtol, atol=atol)
    if kernel != "normalized":
        with kernels(layer_norm=kernel):
            torch.testing.assert_close(layer_norm(x, None, None, 1e-5).double(), layer, rtol=rtol, atol=atol)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e4])
def test_layer_norm(size: float) -> None:
    x = torch.randn(3, 5, 11, dtype=torch.float64) * size
    weight, bias = torch.randn(2, 11, dtype=torch.float64)
    expected = layer_loop(x, weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-5), expected - bias, rtol=1e-10, atol=1e-13)


def test_the_position_of_the_cast_matters_in_bfloat16() -> None:
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    before, after = (rms_norm(x, weight, 1e-5, 0.0, cast) for cast in ("before", "after"))
    normed = reference(x.float(), torch.ones(32), 1e-5)
    assert torch.equal(before, normed.bfloat16() * weight)
    assert torch.equal(after, (normed * weight.float()).bfloat16())
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_are_wide(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(8, 256) * 300).to(dtype), torch.ones(256, dtype=dtype)
    expected = rms_loop(x.double(), weight.double(), 1e-5, 0.0)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=2**-7, atol=1e-6)
    centred = layer_loop(x.double(), weight.double(), weight.double() * 0, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-5).double(), centred, rtol=2**-7, atol=1e-3)
