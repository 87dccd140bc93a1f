"""Linear map `y = x Wᵀ + b`: the one place through which every projection of every part goes.

A weight is stored [out, in], as in torch. Forms that keep a derived, packed copy of a weight belong here.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.choose import Form, Operation, device_of
from heddle.numerics.counting import count


class LinearFacts(NamedTuple):
    """What decides the form: rows of x, whether gradients are wanted, device and dtypes."""

    rows: int
    gradients: bool
    device: str
    dtype: torch.dtype
    bias: bool


def flops(rows: int, inputs: int, outputs: int) -> int:
    """Operations of one call: a multiply and an add per weight and row."""
    return 2 * rows * inputs * outputs


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., in], `weight` [out, in], `bias` [out] or None -> [..., out]."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One row: a matrix-vector product reads the weight once, in order."""
    y = torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _no_vector(facts: LinearFacts) -> str | None:
    if facts.device != "cpu":
        return "it is for the CPU"
    if facts.rows != 1:
        return f"it multiplies one row, here are {facts.rows}"
    if facts.gradients:
        return "gradients are wanted"
    if facts.dtype != torch.float32:
        return f"it is no faster in {facts.dtype}"
    return None


LINEAR = Operation(
    "linear",
    (
        Form("vector", _vector, _no_vector),
        Form("matrix", functional.linear, lambda facts: None),
        Form("reference", reference, lambda facts: None),
    ),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in] plus `bias` [out] -> [..., out]."""
    rows = x.numel() // max(x.shape[-1], 1)
    count(flops(rows, weight.shape[1], weight.shape[0]))
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    facts = LinearFacts(rows, gradients, device_of(x), x.dtype, bias is not None)
    y: Tensor = LINEAR.choose(facts).run(x, weight, bias)
    return y
