"""Feed-forwards: each activation against its formula, and the shape of the whole."""

import math
from collections.abc import Callable

import pytest
import torch

from heddle.config import decode
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.layout import Layout

FORMULAS: dict[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "gated"])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name: str, kind: str, bias: bool) -> None:
    data = {"kind": kind, "hidden": 7, "activation": name, "bias": bias}
    config = decode(FeedforwardConfig, data)  # type: ignore[type-abstract]
    part = config.build(5).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    weights = dict(part.named_parameters())
    assert len(weights) == (3 if kind == "gated" else 2) * (2 if bias else 1)
    with torch.no_grad():
        for value in weights.values():
            value.normal_()

        def project(role: str, z: torch.Tensor) -> torch.Tensor:
            y = z @ weights[f"{role}.weight"].T
            return y + weights[f"{role}.bias"] if bias else y

        first = project("gate" if kind == "gated" else "up", x)
        hidden = torch.tensor([FORMULAS[name](v) for v in first.flatten().tolist()], dtype=torch.float64)
        hidden = hidden.view(first.shape) * (project("up", x) if kind == "gated" else 1.0)
        got = part(x, Layout.causal(2, 3))
    torch.testing.assert_close(got, project("down", hidden), rtol=0, atol=1e-10)
