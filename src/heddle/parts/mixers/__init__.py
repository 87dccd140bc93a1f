"""The slot of token mixers: attention, linear attention and their relatives.

Every mixer keeps one law: a sequence cut anywhere, with the state carried over, gives the same result as the whole
sequence. Training passes no state, prefill passes an empty one, and decoding passes the state back token by token.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from heddle.config import DesignError, Part, refuse
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.shrink import ShrinkContext
from heddle.parts.states import StateSpec


class MixerConfig(Part, ABC):
    """Config of a mixer."""

    slot: ClassVar[str] = "mixers"
    width_fields: ClassVar[tuple[str, ...]] = ("heads", "kv_heads", "key_heads")  # they grow with the model's width
    key_head_fields: ClassVar[tuple[str, ...]] = ("kv_heads", "key_heads")  # numbers of groups of heads that share keys
    head_width_fields: ClassVar[tuple[str, ...]] = ("head_dim", "value_dim")  # widths of one head

    def resolved(self, context: BuildContext) -> Self:
        """The same config with every default written out that depends on the context or on other fields."""
        return self

    def shrunk(self, context: ShrinkContext) -> Self:
        """The same config with small sizes, on which the laws run in seconds."""
        return self

    @property
    def windows(self) -> tuple[int, ...]:
        """The window, or those of the mixers within it. Empty: all tokens are seen."""
        return ()

    def with_window(self, window: int) -> Self:
        """The same config with windows of at most `window` tokens; a mixer that can have no window stays as it is."""
        return self

    def with_small_window(self) -> Self:
        """The same config with windows of at most SMALL_WINDOW tokens."""
        return self

    @property
    def template(self) -> "MixerConfig":
        """The mixer whose fields another kind keeps that comes in its place: itself, or a mixer within it."""
        return self

    def head_shape(self, width: int) -> tuple[int, int]:
        """The number of heads, and the width of each head's output, in a model of this width; (0, 0): not stated."""
        return (0, 0)

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """A head_dim, if the heads of the previous mixer do not divide the width."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        return {"head_dim": dim} if heads and width % heads and "head_dim" in cls.model_fields else {}

    def with_state_scaled(self, factor: float, width: int) -> Self:
        """The same config with about `factor` times the state in a model of this width; itself if no field sets it."""
        return self

    def at_width(self, width: int, new_width: int) -> Self:
        """A resolved config for a model of another width: `width_fields` grow in proportion, and no other field does.

        Key heads that are 1 for several heads stay 1. Raises DesignError if a number would not be whole, or if the
        mixer is another one with other numbers of heads.
        """
        several_heads = self.head_shape(width)[0] > 1
        changes = {}
        for name in self.width_fields:
            value = getattr(self, name) if name in type(self).model_fields else None
            if value is None or (value == 1 and several_heads):
                continue
            if value * new_width % width:
                reason = f"{value} at width = {width} is no whole number at {new_width}; choose another width"
                raise DesignError(name, reason)
            changes[name] = value * new_width // width
        return self.replace(**changes)

    def near_width(self, width: int, new_width: int) -> Self:
        """A resolved config for a model of another width, where `at_width` leaves no whole numbers of heads.

        It has the number of heads that leaves their widths nearest to what they were, in whole groups of heads that
        share keys. Other `width_fields` are in proportion, rounded.
        """
        numbers = {name: value for name in type(self).model_fields if type(value := getattr(self, name)) is int}
        if "heads" not in numbers:
            return self
        heads, ratio = numbers["heads"], new_width / width
        key_heads = {name: numbers[name] for name in self.key_head_fields if name in numbers}
        group_size = math.lcm(*(heads // count for count in key_heads.values() if count > 1))
        new_heads = nearest_head_count(heads, group_size, ratio, new_width)
        dims = ratio * heads / new_heads
        ranks = set(self.width_fields) - {"heads", *self.key_head_fields}
        changes = {name: max(1, round(numbers[name] * ratio)) for name in ranks & numbers.keys()}
        changes |= {name: scale_even(numbers[name], dims) for name in self.head_width_fields if name in numbers}
        changes |= {name: max(1, count * new_heads // heads) for name, count in key_heads.items()}
        return self.replace(**changes, heads=new_heads)

    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """The numbers of heads, before and after `shrunk`, that must divide the model's width."""
        return ()

    @abstractmethod
    def build(self, context: BuildContext) -> "Mixer":
        """Build the module. Raises DesignError if the config does not fit the context."""


class Mixer(nn.Module, ABC):
    """Maps x [B, T, width] to the same shape; each token depends on the tokens that it may see.

    window: how many tokens a token sees, itself included (causal), or how many to each side (bidirectional). None: all.
    causal: whether later tokens are hidden. A mixer that is not causal has no state.
    encoder_width: the width of the encoder output that it reads beside x; None: it reads none.
    state_note: what its state holds in place of keys and values of each head, as a phrase for people.
    input_projections: names of the projections that read x, some of which may be absent, if nothing else reads it;
    None: not stated. uses_layer_index: whether its formula depends on the number of its layer. absolute_positions:
    whether it depends on positions themselves, and not on their differences alone.
    """

    window: int | None
    causal: bool
    encoder_width: int | None = None
    state_note: str = ""
    input_projections: Sequence[str] | None = None
    uses_layer_index: bool = False
    absolute_positions: bool = False

    @property
    def lookback(self) -> int | None:
        """How many earlier tokens the position table must keep for its state: all (None), some, or none (0)."""
        return self.window

    @abstractmethod
    def init_state(self, spec: StateSpec) -> Any:
        """An empty state, a `MixerState`. A recurrence cannot roll back, so it ignores `spec.rollback`."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state, or None without a state). The state passed in is consumed."""


class RecurrentMixer(Mixer, ABC):
    """A mixer whose state replaces all earlier tokens; its size does not depend on their number."""

    window: int | None = None
    causal: bool = True

    @property
    def lookback(self) -> int:
        """0: no earlier token is read again."""
        return 0


def check_head_groups(field: str, groups: int | None, heads: int) -> None:
    """Refuse a number of groups that does not divide the heads, from within a validator. None: each head is a group."""
    if groups is not None and heads % groups:
        refuse(field, f"{groups} does not divide heads = {heads}; choose a divisor of it")


def check_double_softmax(normalization: str, head_dim: int) -> None:
    """Refuse double_softmax over one dim: every query would have the weight 1 there. Raises DesignError."""
    if normalization == "double_softmax" and head_dim == 1:
        reason = "1 gives every query of double_softmax the weight 1, whatever the text"
        raise DesignError("head_dim", f"{reason}; give at least 2, or another normalization")


def check_norm_width(field: str, width: int) -> None:
    """Refuse a norm over one number, of which it leaves the sign at most. Raises DesignError."""
    if width == 1:
        raise DesignError(field, "leaves the norm one number of each head, and so at most its sign; give wider heads")


def scale_heads(count: int, factor: float, heads: int, dims: tuple[int, int]) -> tuple[int, int, int]:
    """`count` key and value heads of `dims` dims with about `factor` times the elements per token.

    Returns the number, a divisor of `heads`, and both widths, which change only if no number comes within 1 %.
    """
    divisors = [number for number in range(1, heads + 1) if heads % number == 0]
    goal = count * factor
    nearest = min(divisors, key=lambda number: abs(number - goal))
    if abs(nearest - goal) <= 0.01 * goal:
        return nearest, *dims
    number = next((number for number in divisors if number >= goal), heads)
    key_dim, value_dim = (scale_even(dim, goal / number) for dim in dims)
    exact = sum(dims) * goal / number
    if abs(key_dim + value_dim - exact) > 0.01 * exact:  # an odd width, which is slower, only where it is needed
        value_dim = max(1, round(exact) - key_dim)
    return number, key_dim, value_dim


def nearest_head_count(heads: int, group_size: int, ratio: float, width: int) -> int:
    """The number nearest, as a ratio, to heads · ratio that has whole groups and divides the width into even parts."""
    counts = range(group_size, width // 2 + 1, group_size)
    choices = [count for count in counts if width % (2 * count) == 0 and count >= min(2, heads)]
    return min(choices or [heads], key=lambda count: abs(math.log(count / (heads * ratio))))


def scale_even(dims: int, factor: float) -> int:
    """`dims` times a factor, as the nearest even number above 0: pairs can be rotated."""
    return max(2, 2 * round(dims * factor / 2))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · d] -> [B, heads, T, d]."""
    split: Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, T, d] -> [B, T, heads · d]."""
    return torch.flatten(x.transpose(1, 2), 2)
