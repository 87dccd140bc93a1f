"""Modules that own parameters: each says how its own are initialised. `Linear` is the projection of every part."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heddle.numerics.linear import linear, linears


class Leaf(nn.Module, ABC):
    """A module with parameters of its own. `branch_scale`, told by the model, shrinks the start of last projections.

    maps: the names of those that are matrices [outputs, inputs] acting on vectors, or stacks of them, as Muon asks.
    """

    maps: ClassVar[tuple[str, ...]] = ()
    branch_scale = 1.0

    @abstractmethod
    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Fill every own parameter; `generator` is of the CPU, so values do not depend on the device."""


def fill_normal(parameter: Tensor, std: float, generator: torch.Generator, mean: Tensor | float = 0.0) -> None:
    """Normal numbers around `mean`, drawn in float32 on the CPU, whatever the parameter's dtype and device."""
    with torch.no_grad():
        numbers = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(numbers.normal_(0.0, std, generator=generator).add_(mean))


class Linear(Leaf, nn.Linear):
    """`y = x Wᵀ + b` with W [outputs, inputs]: to others a Linear of torch, which adapters and quantisers look for."""

    maps = ("weight",)

    def __init__(self, inputs: int, outputs: int, bias: bool = False, last: bool = False) -> None:
        nn.Linear.__init__(self, inputs, outputs, bias)
        self.last = last  # the last projection of a branch: its start is scaled with depth

    def reset_parameters(self) -> None:
        """Nothing, where torch would draw numbers: the model says how each parameter starts."""

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal weights, zero bias."""
        fill_normal(self.weight, std * (self.branch_scale if self.last else 1.0), generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return linear(x, self.weight, self.bias)


def matrix(projection: nn.Module) -> Tensor:
    """The matrix [outputs, inputs] of a `Linear` without a bias, or of the wrapper around one."""
    if type(projection) is Linear:
        return projection.weight
    inner = next((module for module in projection.modules() if isinstance(module, Linear)), None)
    if inner is None:  # a module in the place of one, which says what its matrix is
        return cast(Tensor, projection.weight)
    made: Tensor = projection(torch.eye(inner.in_features, dtype=inner.weight.dtype, device=inner.weight.device))
    return made.mT


def together(x: Tensor, *projections: nn.Module) -> Sequence[Tensor]:
    """Several projections of one x [..., inputs], [..., outputs] each; in decoding one product of them all."""
    plain = [one for one in projections if type(one) is Linear]  # others, a `Linear` wrapped, say, are called
    if len(plain) < len(projections):
        return [one(x) for one in projections]
    return linears(x, [(one.weight, one.bias) for one in plain])
