"""The slot of scalings: how a rotation trained on short texts is stretched to turn longer ones."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from heddle.config import Part


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

    @abstractmethod
    def stretch(self, dim: int, base: float) -> Stretched:
        """Stretch the frequencies `base^(-2i/dim)` of dim / 2 pairs; `base` is above 1."""
