"""What a mixer carries from call to call: a frozen dataclass of tensors, batch first, that can be copied row by row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from heddle.parts.context.encoder_output import EncoderOutput

if TYPE_CHECKING:
    from heddle.parts.context.position_table import PositionTable


@dataclass(frozen=True, eq=False)
class StateSpec:
    """What a mixer needs to know to make an empty state.

    batch: rows. cache_length: the most tokens a row may get (None: the state grows). encoder_output: what
    cross-attention reads. rollback: how many tokens can be taken back at a time; ring buffers have that many extra
    slots.
    """

    batch: int
    cache_length: int | None
    dtype: torch.dtype
    device: torch.device | str
    encoder_output: EncoderOutput | None = None
    rollback: int = 0


class MixerState:
    """Base class of mixer states, which are dataclasses.

    A field is a tensor [B, ...], another `MixerState`, None, or plain data.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, batch first, by field name; nested names are joined with a dot."""
        tensors: dict[str, Tensor] = {}
        for name, value in self._fields().items():
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, MixerState):
                tensors |= {f"{name}.{inner}": tensor for inner, tensor in value.tensors().items()}
        return tensors

    def nested_states(self) -> "Iterator[MixerState]":
        """This state and every state nested in it."""
        yield self
        for value in self._fields().values():
            if isinstance(value, MixerState):
                yield from value.nested_states()

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy in which `change(name, tensor)` replaces each tensor."""
        changed: dict[str, Any] = {}
        for name, value in self._fields().items():
            if isinstance(value, Tensor):
                changed[name] = change(name, value)
            elif isinstance(value, MixerState):
                changed[name] = value.map(lambda inner, tensor, name=name: change(f"{name}.{inner}", tensor))  # type: ignore[misc]
        return replace(self, **changed)  # type: ignore[type-var]

    def join(self, others: Sequence[Self]) -> Self:
        """A copy with the rows of this state and then those of the others. All have the same sizes but the batch."""
        joined: dict[str, Any] = {}
        for name, value in self._fields().items():
            values = [getattr(other, name) for other in others]
            if isinstance(value, Tensor):
                joined[name] = torch.cat((value, *values))
            elif isinstance(value, MixerState):
                joined[name] = value.join(values)
        return replace(self, **joined)  # type: ignore[type-var]

    def can_roll_back(self, tokens: int, table: "PositionTable") -> bool:
        """Whether the last `tokens` of each row can be removed. A recurrent state cannot: it keeps no earlier state."""
        return tokens == 0

    def rolled_back(self, table: "PositionTable", freed: Callable[[int], Tensor]) -> Self:
        """The state without the removed tokens.

        freed(slots) is bool [B, slots], True at the slots of removed tokens in a buffer of that size.
        """
        return self  # right for a state that does not depend on the tokens

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
