"""The state of a model: one table of positions, shared by all layers, and the state of each layer."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.notebook import html_table
from heddle.numerics.transfer import to_device
from heddle.parts.position_table import PositionTable, join_tables
from heddle.parts.states import MixerState


@dataclass(eq=False)
class State:
    """A handle to the state's tensors. A model call consumes the handle and returns a new one over the same tensors.

    layers: the state of each layer: its mixer's alone, or a `LayerState`; None where a layer has none. fingerprint: of
    the model's config.
    """

    table: PositionTable
    layers: list[MixerState | None]
    fingerprint: str = ""
    consumed: bool = field(default=False, repr=False)

    def consume(self) -> "State":
        """Mark the handle as consumed. Raises ConfigError if it already is: its tensors then hold later tokens."""
        self.check_not_consumed()
        self.consumed = True
        return self

    def fork(self) -> "State":
        """Return an independent copy. This handle stays valid."""
        return self.select(range(self.table.batch))

    def select(self, rows: Sequence[int] | Tensor) -> "State":
        """Return a copy with these rows, in this order. A row may be repeated (beam search) or left out.

        Raises ConfigError for a row that does not exist. This handle stays valid.
        """
        self.check_not_consumed()
        index = torch.as_tensor(rows, dtype=torch.int64).cpu()  # checked on the host: at most this tensor is waited for
        if index.dim() != 1 or index.numel() == 0 or int(index.min()) < 0 or int(index.max()) >= self.table.batch:
            raise ConfigError(f"rows: {index.tolist()} must be indices from 0 to {self.table.batch - 1}")
        target = to_device(index, self.table.token_counts.device)
        copies = [None if layer is None else layer.map(lambda _, x: x.index_select(0, target)) for layer in self.layers]
        return State(self.table.select(target, index.tolist()), copies, self.fingerprint)

    @staticmethod
    def join(states: "Sequence[State]") -> "State":
        """Return a copy with the rows of all states, in order: the inverse of `select`. The handles stay valid.

        Rows may have different lengths. Raises ConfigError for states of different designs, lengths or rollbacks.
        """
        if not states or len({state.fingerprint for state in states}) > 1:
            raise ConfigError("join: needs states of one design; give at least one, all of the same model")
        for state in states:
            state.check_not_consumed()
        table = join_tables([state.table for state in states])
        columns = zip(*(state.layers for state in states), strict=True)
        layers = [None if first is None else first.join(others) for first, *others in columns]
        return State(table, layers, states[0].fingerprint)

    def pinned(self, max_tokens: int) -> "State":
        """Fix the shapes of all decode steps until a row has `max_tokens`. Consumes this handle.

        Every call of one token then runs the same operations on tensors of the same shapes, whatever the state holds,
        so that one graph serves all of them. Attention reads `max_tokens` slots. Raises ConfigError if that is more
        than the state's cache length.
        """
        self.check_not_consumed()
        table = self.table.pinned(max_tokens)
        self.consumed = True
        return State(table, self.layers, self.fingerprint)

    def advance(self, read: Callable[["State"], "State"]) -> None:
        """Update a pinned state in place by `read`, a call of one token. This handle stays valid.

        No tensor moves in memory, so that a graph recorded over them finds the next state in them.
        """
        self.check_not_consumed()
        newer = read(replace(self))
        for target, source in zip(self.tensors().values(), newer.tensors().values(), strict=True):
            if target is not source:
                target.copy_(source)

    def can_roll_back(self, tokens: int) -> bool:
        """Whether `rollback` can remove this many tokens of every row now."""
        return self._can_roll_back_from(tokens, self.table)

    def can_always_roll_back(self, tokens: int) -> bool:
        """Whether `rollback` can remove the next `tokens` after they are read, however full the state is then."""
        full_table = replace(self.table, peak_tokens=sys.maxsize, rollback_left=self.table.rollback)
        return self._can_roll_back_from(tokens, full_table)

    def _can_roll_back_from(self, tokens: int, table: PositionTable) -> bool:
        layers = [layer for layer in self.layers if layer is not None]
        return table.can_roll_back(tokens) and all(layer.can_roll_back(tokens, table) for layer in layers)

    def rollback(self, tokens: int | Sequence[int] | Tensor) -> "State":
        """Remove the last `tokens` of every row (or one number for each row), in place. Consumes this handle.

        Raises ConfigError if a row has fewer tokens or a layer cannot roll back: a recurrence never can, a ring
        buffer at most by the `rollback` that the state was created with. This handle then stays valid; instead, fork
        the state beforehand and read the tokens again.
        """
        self.check_not_consumed()
        token_counts = self.table.token_counts
        if not isinstance(tokens, Tensor):  # already on the host: no need to wait for the device
            tokens = torch.as_tensor(tokens, device="cpu")
        removed = to_device(tokens, token_counts.device)
        if removed.dtype.is_floating_point or (removed.dim() and removed.shape != token_counts.shape):
            reason = f"{tokens} is neither a whole number nor one for each of {len(token_counts)} rows"
            raise ConfigError(f"rollback: {reason}")
        removed = removed.to(torch.int64).broadcast_to(token_counts.shape)
        most = int(tokens.max())
        if not self.can_roll_back(most):
            raise ConfigError(
                f"rollback: {self._blocker(most)} cannot take back {most} tokens; fork the state beforehand and "
                "read the tokens again, or, if only windows prevent it, create the state with a larger rollback"
            )
        table, removed_slots = self.table.rolled_back(removed, most)
        self.consumed = True
        layers = [None if layer is None else layer.rolled_back(table, removed_slots) for layer in self.layers]
        return State(table, layers, self.fingerprint)

    def _blocker(self, tokens: int) -> str:
        """Name the layer that cannot roll back."""
        for index, layer in enumerate(self.layers):
            if layer is not None and not layer.can_roll_back(tokens, self.table):
                return f"layer {index} ({type(layer).__name__})"
        return "the table of positions"

    def check_not_consumed(self) -> None:
        """Raise ConfigError if an earlier call consumed this handle."""
        if self.consumed:
            raise ConfigError(
                "state: was consumed by an earlier call; continue with the state that call returned "
                "(hidden, state = model(tokens, state=state))"
            )

    def _repr_html_(self) -> str:
        rows = []
        for index, (layer, size) in enumerate(zip(self.layers, self.layer_bytes, strict=True)):
            tensors = {} if layer is None else layer.tensors()
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            rows.append((index, "none" if layer is None else type(layer).__name__, shapes, size))
        caption = f"{self.table.batch} rows, {self.bytes:,} bytes" + (", consumed" if self.consumed else "")
        return html_table(("layer", "state", "tensors", "bytes"), rows, caption)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name. The first dimension of each is the batch."""
        named = {f"table.{name}": tensor for name, tensor in self.table.tensors().items()}
        for index, layer in enumerate(self.layers):
            if layer is not None:
                named |= {f"layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return named

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, the table of positions included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of each layer's state."""
        per_layer = [{} if layer is None else layer.tensors() for layer in self.layers]
        return [sum(tensor.numel() * tensor.element_size() for tensor in named.values()) for named in per_layer]
