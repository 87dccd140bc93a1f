"""What a mixer remembers between calls: a frozen dataclass of tensors, batch first, that can be copied row by row."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

if TYPE_CHECKING:
    from heddle.parts.context.position_table import PositionTable


class MixerState:
    """Base of the dataclasses; a field is a tensor [B, ...], another such state, None, or plain data."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state, batch first, by the name of its field."""
        found: dict[str, Tensor] = {}
        for name, value in self._fields().items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, MixerState):
                found |= {f"{name}.{inner}": tensor for inner, tensor in value.tensors().items()}
        return found

    def parts(self) -> "Iterator[MixerState]":
        """The state itself and every state within it."""
        yield self
        for value in self._fields().values():
            if isinstance(value, MixerState):
                yield from value.parts()

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """The same state with each named tensor changed."""
        made: dict[str, Any] = {}
        for name, value in self._fields().items():
            if isinstance(value, Tensor):
                made[name] = change(name, value)
            elif isinstance(value, MixerState):
                made[name] = value.map(lambda inner, tensor, name=name: change(f"{name}.{inner}", tensor))  # type: ignore[misc]
        return replace(self, **made)  # type: ignore[type-var]

    def goes_back(self, tokens: int, table: "PositionTable") -> bool:
        """Whether the last `tokens` of each row can be taken back; a recurrence has forgotten what was before."""
        return tokens == 0

    def rewound(self, table: "PositionTable", gone: Callable[[int], Tensor]) -> Self:
        """The state without the tokens taken back; `gone(slots)` is bool [B, slots], slot = arrival mod slots."""
        return self  # of a state that does not depend on the tokens

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
