"""The slot of scalings: how a rotation trained on short texts is stretched to turn longer ones."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field

from heddle.config import Part

Longer = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]  # how many times longer texts may be


class Stretched(NamedTuple):
    """What a scaling makes of a rotation.

    thetas: the angle that each pair turns a position. amplitude: multiplies the cosines and sines, so that scores
    between turned dims grow by its square. score: multiplies every score of a mixer that turns some dims only.
    """

    thetas: tuple[float, ...]
    amplitude: float = 1.0
    score: float = 1.0


class ScalingConfig(Part, ABC):
    """Config of a scaling."""

    slot: ClassVar[str] = "scalings"

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on how long the text will be; then a state must declare its capacity."""
        return False

    @abstractmethod
    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """Stretch the frequencies `base^(-2i/dim)` of dim / 2 pairs, `base` above 1, for texts of `length` tokens.

        dtype: float64, or float32, in which transformers computes them: then with its operations in its order.
        Only a scaling that is `by_length` looks at `length`, and for its angles alone: amplitude and score are the
        same for every length. Raises DesignError where it does not fit the pairs.
        """
