"""The state of a model: one table of positions for all layers, and what each mixer remembers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.context.position_table import PositionTable


@dataclass(eq=False)
class State:
    """A handle: a call consumes it and returns a new one over the same tensors.

    layers: each mixer's own state, None where a layer has none. design: the fingerprint of the model's config.
    """

    table: PositionTable
    layers: list[MixerState | None]
    design: str = ""
    consumed: bool = field(default=False, repr=False)

    def take(self) -> "State":
        """Mark as consumed. Raises ConfigError if it was already: its tensors hold later tokens."""
        self.check()
        self.consumed = True
        return self

    def fork(self) -> "State":
        """An independent copy; this handle stays good."""
        return self.select(torch.arange(self.table.batch, device=self.table.counts.device))

    def select(self, rows: Sequence[int] | Tensor) -> "State":
        """A copy that holds the named rows, in that order; a row may be named often (beams) or never.

        Raises ConfigError for a row that is not there. This handle stays good.
        """
        self.check()
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.table.counts.device)
        if index.dim() != 1 or index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= self.table.batch:
            raise ConfigError(f"select: rows {index.tolist()} must be numbers from 0 to {self.table.batch - 1}")
        copies = [None if layer is None else layer.map(lambda _, x: x.index_select(0, index)) for layer in self.layers]
        return State(self.table.select(index), copies, self.design)

    def can_roll_back(self, tokens: int) -> bool:
        """Whether `rewind` can take back that many tokens of every row now."""
        return self._goes_back(tokens, self.table)

    def keeps(self, tokens: int) -> bool:
        """Whether `rewind` can take back any next `tokens`, once they are read, however full the state is then."""
        return self._goes_back(tokens, replace(self.table, peak=sys.maxsize, spare=self.table.rewind))

    def _goes_back(self, tokens: int, table: PositionTable) -> bool:
        layers = [layer for layer in self.layers if layer is not None]
        return table.goes_back(tokens) and all(layer.goes_back(tokens, table) for layer in layers)

    def rewind(self, tokens: int | Sequence[int] | Tensor) -> "State":
        """Take back the last `tokens` of every row (or so many of each), in place; consumes this handle.

        Raises ConfigError if a row has fewer, or a layer cannot: a recurrence never, a ring no further than the
        `rewind` that its state was made with. Then this handle stays good; fork before, and replay instead.
        """
        self.check()
        counts = self.table.counts
        back = torch.as_tensor(tokens, device=counts.device)
        if back.dtype.is_floating_point or (back.dim() and back.shape != counts.shape):
            raise ConfigError(f"rewind: {tokens} is neither a whole number nor one for each of {len(counts)} rows")
        back = back.to(torch.int64).broadcast_to(counts.shape)
        most = int(back.max())
        if not self.can_roll_back(most):
            raise ConfigError(
                f"rewind: {self._blocker(most)} cannot take back {most} tokens; fork the state before and replay what "
                "shall stay, or, where only windows are in the way, make it with more rewind"
            )
        table, gone = self.table.rewound(back)
        self.consumed = True
        layers = [None if layer is None else layer.rewound(table, gone) for layer in self.layers]
        return State(table, layers, self.design)

    def _blocker(self, tokens: int) -> str:
        """What stands against going back."""
        for index, layer in enumerate(self.layers):
            if layer is not None and not layer.goes_back(tokens, self.table):
                return f"layer {index} ({type(layer).__name__})"
        return "the table of positions"

    def check(self) -> None:
        """Raises ConfigError if an earlier call consumed this handle."""
        if self.consumed:
            raise ConfigError(
                "state: was consumed by an earlier call; continue with the state that call returned "
                "(hidden, state = model(tokens, state=state))"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor, batch first."""
        named = {f"table.{name}": tensor for name, tensor in self.table.tensors().items()}
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
