"""The slot of norms: x [..., width] -> the same shape, normalized over the last dimension."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from heddle.config import DesignError, Part
from heddle.parts.modules.linear import SelfInitialized


class NormConfig(Part, ABC):
    """Config of a norm.

    Fields of several kinds: `weight`: whether the result is multiplied by a parameter of that name; `offset`, which is
    added to it. Conversions fold gains by these two.
    """

    slot: ClassVar[str] = "norms"

    def without_weight(self) -> Self:
        """The same norm without a weight. Raises DesignError for a kind that always has one."""
        if "weight" not in type(self).model_fields:
            raise DesignError("qk_norm_weight", f"norms of kind {self.kind} always have a weight; leave it out")
        return self.replace(weight=False)

    @abstractmethod
    def build(self, width: int, heads: int | None = None) -> SelfInitialized:
        """Build a norm over the last `width` elements. With `heads`, x is [..., heads, width] with weights per head."""


def weight_shape(width: int, heads: int | None) -> tuple[int, ...]:
    """The shape of a norm's weight."""
    return (width,) if heads is None else (heads, width)
