"""Dynamic tanh and Derf against a loop over elements, in values and gradients."""

import ast
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics.random import ParameterDraws
from heddle.parts.norms.dynamic_tanh import DynamicTanh, DynamicTanhConfig
from tests.laws.planting import operator

SHAPES = [((2, 3, 7), 7, None), ((2, 3, 4, 5), 5, 4)]


def module(function: Any, width: int, heads: int | None, seed: int = 0) -> DynamicTanh:
    """In float64 with random parameters."""
    norm = DynamicTanhConfig(function=function).build(width, heads).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return norm


def loop(norm: DynamicTanh, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and gradients of half of the sum of their squares, element by element as the papers write them."""
    values = norm.state_dict()
    y, gradients = torch.empty_like(x), {name: torch.zeros_like(p) for name, p in values.items()}
    gradients["x"] = torch.empty_like(x)
    heads = values["weight"].dim() == 2
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        at = tuple(index[-2:]) if heads else (index[-1],)
        scalar = (index[-2], 0) if heads else (0,)
        gamma, beta, alpha = (float(values[name][i]) for name, i in (("weight", at), ("bias", at), ("alpha", scalar)))
        value = float(x[tuple(index)])
        if "shift" not in values:
            squashed = math.tanh(alpha * value)
            slope = 1 - squashed**2
        else:
            z = alpha * value + float(values["shift"][scalar])
            squashed, slope = math.erf(z), 2 / math.sqrt(math.pi) * math.exp(-(z**2))
        result = gamma * squashed + beta
        y[tuple(index)] = result
        gradients["weight"][at] += result * squashed
        gradients["bias"][at] += result
        gradients["alpha"][scalar] += result * gamma * slope * value
        gradients["x"][tuple(index)] = result * gamma * slope * alpha
        if "shift" in values:
            gradients["shift"][scalar] += result * gamma * slope
    return y, gradients


def error(function: str, shape: tuple[int, ...], width: int, heads: int | None) -> float:
    """The largest difference of values and gradients from the loop, relative to the largest number."""
    norm = module(function, width, heads)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = norm(x)
    (y**2).sum().div(2).backward()
    expected, gradients = loop(norm, x.detach())
    tensors = {"x": x, **dict(norm.named_parameters())}
    pairs = [(y.detach(), expected), *((tensors[name].grad, value) for name, value in gradients.items())]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("function", ["tanh", "erf"])
@pytest.mark.parametrize(("shape", "width", "heads"), SHAPES)
def test_values_and_gradients_equal_the_loop(
    function: str, shape: tuple[int, ...], width: int, heads: int | None
) -> None:
    assert error(function, shape, width, heads) < 1e-12


@pytest.mark.parametrize("function", ["tanh", "erf"])
def test_the_loop_finds_planted_bugs(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """α added instead of multiplied, and β multiplied instead of added."""
    for old, new, nth in ((ast.Mult, ast.Add, 0), (ast.Add, ast.Mult, -1)):
        with monkeypatch.context() as patch:
            operator(DynamicTanh.forward, old, new, nth=nth)(patch)
            assert error(function, *SHAPES[0]) > 0.01


def test_the_beginning() -> None:
    """α as configured, γ 1, β and s 0: tanh(α x) and erf(α x)."""
    x = torch.randn(5, 3)
    for function in ("tanh", "erf"):
        norm = DynamicTanhConfig(alpha=0.3, function=function).build(3)
        norm.init_weights(0.02, ParameterDraws(0, ""))
        assert torch.equal(norm(x), getattr(torch, function)(x * 0.3))
