"""The state of a model: one table of positions for all layers, and what each mixer remembers."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.table import Table


@dataclass(eq=False)
class State:
    """A handle: a call consumes it and returns a new one over the same tensors.

    layers: each mixer's own state, None where a layer has none.
    """

    table: Table
    layers: list[Any]
    consumed: bool = field(default=False, repr=False)

    def take(self) -> "State":
        """Mark as consumed. Raises ConfigError if it was already: its tensors hold later tokens."""
        if self.consumed:
            raise ConfigError(
                "state: was consumed by an earlier call; continue with the state that call returned "
                "(hidden, state = model(tokens, state=state))"
            )
        self.consumed = True
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, batch first."""
        table = self.table
        named = {"table.positions": table.positions, "table.documents": table.documents}
        named |= {"table.counts": table.counts, "table.last": table.last}
        for index, layer in enumerate(self.layers):
            if layer is not None:
                named |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return named

    @property
    def bytes(self) -> int:
        """Bytes of every tensor, the table included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's own state."""
        per_layer = [{} if layer is None else layer.tensors() for layer in self.layers]
        return [sum(tensor.numel() * tensor.element_size() for tensor in named.values()) for named in per_layer]
