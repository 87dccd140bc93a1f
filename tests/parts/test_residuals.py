"""Residual wirings against the formulas of their papers, written out."""

import pytest
import torch
from torch import Tensor

from heddle.config import decode
from heddle.parts.norms import NormConfig
from heddle.parts.residuals import ResidualConfig, Wiring

WIDTH = 6
NORM = decode(NormConfig, {"kind": "rms"})  # type: ignore[type-abstract]


def block(data: dict, names: tuple[str, ...]) -> torch.nn.Module:
    config = decode(ResidualConfig, data)  # type: ignore[type-abstract]
    made = config.build(Wiring(names, WIDTH, NORM, 0.0)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def mixer(x: Tensor) -> Tensor:
    return x.flip(1).tanh()


def feedforward(x: Tensor) -> Tensor:
    return x.roll(1, dims=-1).sin()


BRANCHES = {"mixer": mixer, "feedforward": feedforward}


def test_pre_norm() -> None:
    made, x = block({"kind": "pre_norm"}, ("mixer", "feedforward")), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    weights = dict(made.named_parameters())
    middle = x + mixer(rms(x, weights["norms.mixer.weight"]))
    want = middle + feedforward(rms(middle, weights["norms.feedforward.weight"]))
    torch.testing.assert_close(made(x, BRANCHES), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norms", [1, 2])
def test_parallel(norms: int) -> None:
    made = block({"kind": "parallel", "norms": norms}, ("mixer", "feedforward"))
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    weights = dict(made.named_parameters())
    assert len(weights) == norms
    first, second = (weights[f"norms.{name}.weight"] for name in (("shared",) * 2 if norms == 1 else BRANCHES))
    want = x + mixer(rms(x, first)) + feedforward(rms(x, second))
    torch.testing.assert_close(made(x, BRANCHES), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["pre_norm", "parallel"])
def test_branches_of_zeros_leave_the_stream(kind: str) -> None:
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    made = block({"kind": kind}, ("mixer", "feedforward"))
    assert torch.equal(made(x, dict.fromkeys(BRANCHES, torch.zeros_like)), x)


@pytest.mark.parametrize("kind", ["pre_norm", "parallel"])
@pytest.mark.parametrize("name", BRANCHES)
def test_one_branch_alone(kind: str, name: str) -> None:
    made, x = block({"kind": kind}, (name,)), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    (weight,) = made.parameters()
    want = x + BRANCHES[name](rms(x, weight))
    torch.testing.assert_close(made(x, {name: BRANCHES[name]}), want, rtol=0, atol=1e-12)
