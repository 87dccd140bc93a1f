"""The slot of positions: rotations of heads and biases of scores inside a mixer, and tables added at the embedding."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from heddle.config import Part
from heddle.parts.context.layout import Layout


class PositionConfig(Part, ABC):
    """Config of a position scheme."""

    slot: ClassVar[str] = "positions"


class InnerConfig(PositionConfig, ABC):
    """A scheme inside a mixer, for one that takes rotations and biases; scores know differences of positions only."""


class RotationConfig(InnerConfig, ABC):
    """A scheme that turns queries and keys; scores then depend on differences of positions only."""

    def resolved(self, head_dim: int) -> Self:
        """The same scheme with the number of dims that it turns written out."""
        return self

    @abstractmethod
    def build(self, head_dim: int) -> "Rotation":
        """Make the module for heads of `head_dim` dims. Raises DesignError if they do not fit."""


class Rotation(nn.Module, ABC):
    """Turns heads by their positions.

    amplitude: by which it multiplies the turned dims, beside turning them. score: by which a mixer that gives it
    some dims of each head only multiplies its scores (YaRN; see `heddle.parts.scalings`).
    by_length: whether its angles depend on how long the text will be, which a state must then declare.
    exact: whether angles are computed in float64 whatever the dtype of x, for a mixer without a softmax, in which
    their rounding far from position 0 is not damped. axes: 1 where it turns by positions, 2 by places (x, y).
    """

    amplitude: float = 1.0
    score: float = 1.0
    by_length: bool = False
    exact: bool = False
    axes: int = 1

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape."""

    def table_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """In which the table for heads of `dtype` is asked for, before it is cast; MPS has no float64."""
        return torch.float64 if self.exact and device.type != "mps" else dtype


class BiasConfig(InnerConfig, ABC):
    """A scheme that takes something off each score for the distance between query and key."""

    @abstractmethod
    def build(self, heads: int) -> "Bias":
        """Make the module for so many query heads."""


class Bias(nn.Module):
    """Slopes: what a head's scores lose with each step of distance. It holds no tensor that a dtype could round."""

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """The slopes [heads], in at least float32, made once a call."""
        wide = torch.promote_types(dtype, torch.float32)
        make = lambda: torch.tensor(self.slopes, dtype=wide, device=layout.positions.device)  # noqa: E731
        return layout.once(("slopes", self.slopes, wide), make)


class AdditiveConfig(PositionConfig, ABC):
    """A scheme that adds a vector of the stream's width at the embedding; it knows absolute positions."""

    @abstractmethod
    def build(self, width: int) -> "Additive":
        """Make the module for a stream of `width` dims."""


class Additive(nn.Module, ABC):
    """Adds the vector of each token's position."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
