"""The slot of norms: x [..., width] -> the same shape, normalised over the last dimension."""

from abc import ABC, abstractmethod
from typing import ClassVar

from heddle.config import Part
from heddle.parts.modules.linear import Leaf


class NormConfig(Part, ABC):
    """Config of a norm."""

    slot: ClassVar[str] = "norms"

    @abstractmethod
    def build(self, width: int, heads: int | None = None) -> Leaf:
        """A norm over the last `width` dims; with `heads`, x is [..., heads, width] and each head has weights."""


def weight_shape(width: int, heads: int | None) -> tuple[int, ...]:
    """The shape of a norm's weight."""
    return (width,) if heads is None else (heads, width)
