"""Small sizes for a part of a large design, on which the laws run in seconds (`heddle.laws.shrink`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

V = TypeVar("V")

SMALL_WINDOW = 7
SMALL_TEXT = 128  # tokens, more than any law's text


class SmallHeads(NamedTuple):
    """Numbers and widths of small heads; None where the large design leaves them out.

    dims: of each query and key head, before and after.
    """

    heads: int
    groups: int | None
    head_dim: int | None
    value_dim: int | None
    dims: tuple[int, int]


@dataclass(frozen=True)
class ShrinkContext:
    """The width of the residual stream, before and after.

    small_encoder_width: that of the encoder output, if the design has an encoder of its own.
    """

    width: int
    small_width: int
    small_encoder_width: int | None = None

    def small_heads(
        self, heads: int, groups: int | None = None, head_dim: int | None = None, value_dim: int | None = None
    ) -> SmallHeads:
        """Heads keep their ratio to groups if it is at most 3. Widths of up to 8 keep their order and parity."""
        few = small_head_count(heads, groups)
        before = head_dim or self.width // heads
        after = self.small_width // few if head_dim is None else at_most(before, 8)
        few_groups = None if groups is None else small_count(groups)
        value = small_relative_width(value_dim, before, after)
        return SmallHeads(few, few_groups, None if head_dim is None else after, value, (before, after))


def small_count(number: int) -> int:
    """1, 2 or 3, with the parity of the number."""
    return number if number <= 3 else 3 - (number + 1) % 2


def small_head_count(heads: int, groups: int | None = None) -> int:
    """The number of heads after shrinking, a multiple of that of the groups. None: each head is a group."""
    groups = groups or heads
    return small_count(groups) * small_count(heads // groups)


def at_most(number: int, most: int) -> int:
    """The number if it is at most `most` (which is even), else `most`, plus 1 for an odd number."""
    return number if number <= most else most + number % 2


def small_relative_width(value: int | None, before: int, after: int) -> int | None:
    """A width that is to `after` as `value` is to `before`: wider, as wide or narrower."""
    return None if value is None else after + (value > before) - (value < before and after > 1)


def subsample(values: Sequence[V], count: int) -> tuple[V, ...]:
    """`count` of the values, evenly spaced."""
    return tuple(values[i * len(values) // count] for i in range(count))
