"""The slot of positions: rotations and score biases inside a mixer, and vectors added to the embedding."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from heddle.config import Part, build_under, refuse
from heddle.numerics.attention.mask import ScoreBiasFunction
from heddle.parts.layout import Layout

DEFAULT_BASE = 10000.0  # of rotary frequencies (Su et al. 2021)


class PositionConfig(Part, ABC):
    """Config of a position scheme."""

    slot: ClassVar[str] = "positions"


class MixerPositionConfig(PositionConfig, ABC):
    """A scheme inside a mixer: a rotation or a score bias. Scores depend on differences of positions only."""

    def resolved(self, head_dim: int) -> Self:
        """The same config with the number of rotary dims written out."""
        return self

    @property
    def shares_table(self) -> bool | None:
        """Whether it reads the table of an earlier layer, which has the same fields; None: it has no table."""
        return None


class RotationConfig(MixerPositionConfig, ABC):
    """A scheme that rotates queries and keys."""

    @abstractmethod
    def build(self, head_dim: int) -> "Rotation":
        """Build the module for heads of `head_dim` dims. Raises DesignError if they do not fit."""


def check_base(base: float, inv_freq: tuple[float, ...] | None) -> None:
    """Refuse a base next to the inverse frequencies that replace it, from within a validator of a rotation."""
    if inv_freq is not None and base != DEFAULT_BASE:
        refuse("base", f"{base:g} has no effect with inv_freq, which replaces its frequencies; keep one of the two")


class Rotation(nn.Module, ABC):
    """Rotates the heads of queries and keys by the positions of their tokens.

    attention_factor: multiplies the rotated dims. score_scale: a mixer that rotates only some dims of each head
    multiplies its scores by it (YaRN; see `heddle.parts.scalings`).
    length_dependent: whether the angles depend on the final sequence length. A state then needs a cache length.
    float64_angles: whether angles are computed in float64 for any dtype of x. Mixers without a softmax set it, because
    no softmax damps the rounding of angles far from position 0.
    axes: 1 for rotation by position, 2 for rotation by coordinates (x, y).
    cast: "after" if half-precision heads are rotated in float32, then cast. A mixer with wider heads refuses it.
    invertible: whether it has an `inverse`.
    """

    attention_factor: float = 1.0
    score_scale: float = 1.0
    length_dependent: bool = False
    float64_angles: bool = False
    axes: int = 1
    cast: Literal["after"] | None = None
    invertible: bool = False

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, H, T, head_dim] -> the same shape."""

    def inverse(self, x: Tensor, layout: Layout) -> Tensor:
        """x rotated by the opposite angles, times the attention factor as in `forward`."""
        raise AssertionError(f"{type(self).__name__} is not invertible")

    def prepare_length(self, length: int) -> None:
        """Precompute what depends on the sequence length: within a trace, tensors may have no values."""

    def table_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """The dtype in which angles are computed for heads of `dtype`. MPS has no float64."""
        return torch.float64 if self.float64_angles and device.type != "mps" else dtype


class ScoreBiasConfig(MixerPositionConfig, ABC):
    """A scheme that adds a term to each score, which depends on the offset of query and key."""

    @abstractmethod
    def build(self, heads: int, causal: bool) -> "ScoreBias":
        """Build the module for this number of query heads. Raises DesignError if the config does not fit them."""


class ScoreBias(nn.Module, ABC):
    """Gives each head a bias function of the offset i − j of query i and key j, with or without parameters.

    fast_graph: as in `Mixer`. A graph would add the gradients of learned biases in any order.
    """

    fast_graph: bool = False

    @property
    def table_fields(self) -> Mapping[str, Any]:
        """What must be equal in layers that share a table, by field of the mixer."""
        return {}

    @abstractmethod
    def forward(self, layout: Layout, dtype: torch.dtype) -> ScoreBiasFunction:
        """The function for one call, whose values have `dtype`, or float32 if that is wider."""


def build_mixer_position(
    config: MixerPositionConfig | None, head_dim: int, heads: int, causal: bool
) -> tuple[Rotation | None, ScoreBias | None]:
    """Build the scheme of a mixer's field `position`, for this number of query heads of `head_dim` dims.

    At most one of the two is not None. Raises DesignError if the config does not fit the heads.
    """
    if isinstance(config, RotationConfig):
        return build_under("position", config.build, head_dim), None
    if isinstance(config, ScoreBiasConfig):
        return None, build_under("position", config.build, heads, causal)
    return None, None


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
