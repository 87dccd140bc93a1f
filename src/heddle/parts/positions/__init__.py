"""The slot of positions: rotations and score biases inside a mixer, and vectors added to the embedding."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from heddle.config import Part
from heddle.parts.context.layout import Layout


class PositionConfig(Part, ABC):
    """Config of a position scheme."""

    slot: ClassVar[str] = "positions"


class MixerPositionConfig(PositionConfig, ABC):
    """A scheme inside a mixer: a rotation or a score bias. Scores depend on differences of positions only."""


class RotationConfig(MixerPositionConfig, ABC):
    """A scheme that rotates queries and keys."""

    def resolved(self, head_dim: int) -> Self:
        """The same config with the number of rotary dims written out."""
        return self

    @abstractmethod
    def build(self, head_dim: int) -> "Rotation":
        """Build the module for heads of `head_dim` dims. Raises DesignError if they do not fit."""


class Rotation(nn.Module, ABC):
    """Rotates the heads of queries and keys by the positions of their tokens.

    attention_factor: multiplies the rotated dims. score_scale: a mixer that rotates only some dims of each head
    multiplies its scores by it (YaRN; see `heddle.parts.scalings`).
    length_dependent: whether the angles depend on the final length of the text. A state then needs a cache length.
    float64_angles: whether angles are computed in float64 for any dtype of x. Mixers without a softmax set it, because
    no softmax damps the rounding of angles far from position 0.
    axes: 1 for rotation by position, 2 for rotation by coordinates (x, y).
    """

    attention_factor: float = 1.0
    score_scale: float = 1.0
    length_dependent: bool = False
    float64_angles: bool = False
    axes: int = 1

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape."""

    def table_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype in which angles are computed for heads of `dtype`. MPS has no float64."""
        return torch.float64 if self.float64_angles and device.type != "mps" else dtype


class ScoreBiasConfig(MixerPositionConfig, ABC):
    """A scheme that subtracts from each score a term that grows with the distance of query and key."""

    @abstractmethod
    def build(self, heads: int) -> "ScoreBias":
        """Build the module for this number of query heads."""


class ScoreBias(nn.Module):
    """One slope per head: how much a score loses per step of distance. Slopes are floats, so no dtype rounds them."""

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """The slopes [heads], in at least float32, as a tensor built once per call."""
        wide = torch.promote_types(dtype, torch.float32)
        make = lambda: torch.tensor(self.slopes, dtype=wide, device=layout.positions.device)  # noqa: E731
        return layout.cached(("slopes", self.slopes, wide), make)


class AdditivePositionConfig(PositionConfig, ABC):
    """A scheme that adds a vector for the absolute position to the embedding."""

    @abstractmethod
    def build(self, width: int) -> "AdditivePosition":
        """Build the module for embeddings of `width` dims."""


class AdditivePosition(nn.Module, ABC):
    """Adds the vector of each token's position to x."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
