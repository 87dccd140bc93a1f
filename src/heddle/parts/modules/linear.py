"""Modules that initialize their own parameters. `Linear` is the projection that all parts use."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from heddle.numerics.linear import linear, linears
from heddle.numerics.random import ParameterDraws, RandomStream
from heddle.torch_private import is_watched

_rows_to_fill: ContextVar[Mapping[int, slice]] = ContextVar("rows_to_fill", default=MappingProxyType({}))


class SelfInitialized(nn.Module, ABC):
    """A module that owns parameters and initializes them.

    matrix_parameters: names of the parameters that are matrices [outputs, inputs] acting on vectors, or stacks of such
    matrices. Muon trains these. A module with other parameters of two dims names its matrices, too, if only by ().
    value_scale, output_scale: factors for the initial standard deviation of value and output projections, set by the
    model.
    """

    matrix_parameters: ClassVar[tuple[str, ...]] = ()
    value_scale, output_scale = 1.0, 1.0

    @abstractmethod
    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Fill every parameter of this module, each from its own random stream. Values do not depend on the device."""


def fill_normal(parameter: Tensor, std: float, stream: RandomStream, mean: Tensor | float = 0.0) -> None:
    """Fill with normal numbers around `mean`, each rounded to float32 for any dtype and device of the parameter.

    Element i is the stream's element i. Within `fill_rows`, only the named rows are drawn and filled.
    """
    rows = _rows_to_fill.get().get(id(parameter), slice(0, len(parameter)))
    part = parameter[rows]
    first_element = rows.start * (parameter.numel() // max(1, len(parameter)))
    values = torch.empty(part.numel(), dtype=torch.float32, device="cpu")
    for first, numbers in stream.normal_chunks(first_element, first_element + len(values)):
        values[first - first_element : first - first_element + len(numbers)] = numbers.mul_(std)
    part_mean = mean.expand(parameter.shape)[rows] if isinstance(mean, Tensor) else mean
    with torch.no_grad():
        part.copy_(values.view(part.shape).add_(part_mean))


@contextmanager
def fill_rows(rows: Mapping[int, slice]) -> Iterator[None]:
    """Within the block, `fill_normal` fills only these rows. rows: slices of step 1, by the id() of a parameter."""
    token = _rows_to_fill.set(rows)
    try:
        yield
    finally:
        _rows_to_fill.reset(token)


class Linear(SelfInitialized, nn.Linear):
    """`y = x Wᵀ + b` with W [outputs, inputs]. A subclass of `nn.Linear`, so adapter and quantization tools find it.

    output_projection: the last of a branch. value_projection: to a mixer's values or a feed-forward's hidden channels.
    Initial weights of the former, and with some residual kinds of the latter, shrink with depth. initial_std: replaces
    the standard deviation of the initial weights, whatever the depth; 0: zeros.
    """

    matrix_parameters = ("weight",)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        output_projection: bool = False,
        value_projection: bool = False,
        initial_std: float | None = None,
    ) -> None:
        nn.Linear.__init__(self, inputs, outputs, bias)
        self.initial_std = initial_std
        self.output_projection, self.value_projection = output_projection, value_projection

    def reset_parameters(self) -> None:
        """Do nothing: `init_weights` fills the parameters, not torch's constructor."""

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal weights, zero bias."""
        scale = self.output_scale if self.output_projection else self.value_scale if self.value_projection else 1.0
        std = std * scale if self.initial_std is None else self.initial_std
        if std:
            fill_normal(self.weight, std, draws("weight"))
        else:
            nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return linear(x, self.weight, self.bias)


class VisitAdapter(SelfInitialized):
    """A [rank, inputs] and B [outputs, rank] of one visit of a layer. B is zero at first, so that it adds nothing."""

    matrix_parameters = ("a", "b")

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(rank, inputs)), nn.Parameter(torch.empty(outputs, rank))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """A from normal(0, 1 / inputs), B zero."""
        fill_normal(self.a, self.a.shape[1] ** -0.5, draws("a"))
        nn.init.zeros_(self.b)


class AdaptedLinear(Linear):
    """`y = x Wᵀ + b + (x Aᵀ) Bᵀ`: a `Linear` of a shared layer, with A and B of one visit alone."""

    def __init__(self, base: Linear, rank: int) -> None:
        inputs, outputs, names = base.in_features, base.out_features, ("output_projection", "value_projection")
        kinds = {name: getattr(base, name) for name in names}
        super().__init__(inputs, outputs, base.bias is not None, **kinds, initial_std=base.initial_std)
        self.adapter = VisitAdapter(inputs, outputs, rank)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return linear(x, self.weight, self.bias) + linear(linear(x, self.adapter.a), self.adapter.b)

    @property
    def matrix(self) -> Tensor:
        """W + B A [outputs, inputs], computed at each access."""
        return self.weight + linear(self.adapter.b, self.adapter.a.mT)


def adapt_projections(module: nn.Module, rank: int) -> None:
    """Put an `AdaptedLinear` in the place of each `Linear` within the module."""
    for path, base in [*module.named_modules()]:
        if type(base) is Linear:
            module.set_submodule(path, AdaptedLinear(base, rank))


def weight_matrix(projection: nn.Module) -> Tensor:
    """The matrix [outputs, inputs] of a `Linear` without bias, or of a wrapper around one, such as a LoRA adapter."""
    if type(projection) is Linear and not is_watched(projection):
        return projection.weight
    if isinstance(projection, AdaptedLinear) and not is_watched(projection):
        return projection.matrix
    inner = next((module for module in projection.modules() if isinstance(module, Linear)), None)
    if inner is None:  # a replacement of `Linear` that has a `weight` of its own
        return cast(Tensor, projection.weight)
    transposed: Tensor = projection(torch.eye(inner.in_features, dtype=inner.weight.dtype, device=inner.weight.device))
    return transposed.mT


def fused_projections(x: Tensor, *projections: nn.Module) -> Sequence[Tensor]:
    """Several projections of the same x [..., inputs] -> [..., outputs] each. Decoding fuses them into one product."""
    plain = [projection for projection in projections if type(projection) is Linear and not is_watched(projection)]
    if len(plain) < len(projections):  # a wrapped, replaced or watched `Linear` must be called itself
        return [projection(x) for projection in projections]
    return linears(x, [(projection.weight, projection.bias) for projection in plain])
