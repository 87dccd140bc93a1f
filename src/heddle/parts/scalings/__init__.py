"""The slot of scalings: how a rotary embedding trained on short sequences is adapted to longer ones."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field

from heddle.config import Part

LongContextFactor = Annotated[
    float, Field(ge=1.0, allow_inf_nan=False)
]  # how many times longer than in training sequences may be


class ScaledFrequencies(NamedTuple):
    """The inverse frequencies and factors of a rotary embedding.

    inv_freq: the angle per position of each pair. attention_factor: multiplies cosines and sines, so scores between
    rotated dims grow by its square. score_scale: multiplies all scores of a mixer that rotates only some dims.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    score_scale: float = 1.0


class ScalingConfig(Part, ABC):
    """Config of a scaling."""

    slot: ClassVar[str] = "scalings"

    @property
    def length_dependent(self) -> bool:
        """Whether the angles depend on the final sequence length. A state then needs a cache length."""
        return False

    @abstractmethod
    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """Scale the inverse frequencies `base^(-2i/dim)` of dim / 2 pairs for sequences of `length` tokens (base > 1).

        dtype: float64, or float32 to match transformers exactly, with the same operations in the same order.
        Only a `length_dependent` scaling reads `length`, and only for the angles: attention_factor and score_scale are
        the same for every length. Raises DesignError if the scaling does not fit the pairs.
        """
