"""Where each token stands: positions, documents, padding. Replaces every mask argument.

A layout carries the static facts that kernels choose by, so that choosing never reads a value from the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.numerics.attention.visibility import Visibility

if TYPE_CHECKING:
    from heddle.parts.context.position_table import Past

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Memory:
    """What cross-attention reads: keys come of `keys` [B, S, width], values of `values` (None: of the same).

    real: bool [B, S], False at padding; None when there is none.
    """

    keys: Tensor
    values: Tensor | None = None
    real: Tensor | None = None

    def __post_init__(self) -> None:
        shape = list(self.keys.shape)
        if self.keys.dim() != 3:
            raise ConfigError(f"memory: keys have shape {shape}; expected [batch, length, width]")
        if self.values is not None and self.values.shape[:2] != self.keys.shape[:2]:
            raise ConfigError(
                f"memory: values have shape {list(self.values.shape)}, keys {shape}; rows and lengths must be equal"
            )
        if self.real is not None and self.real.shape != self.keys.shape[:2]:
            raise ConfigError(f"memory: real has shape {list(self.real.shape)}; expected {shape[:2]}")

    def check(self, width: int, rows: int) -> None:
        """Raises ConfigError where a design that reads a memory so wide, in a call of so many rows, cannot read it."""
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor is not None and tensor.shape[2] != width:
                raise ConfigError(f"memory: {name} are {tensor.shape[2]} wide, the design reads memory_width = {width}")
        if self.keys.shape[0] != rows:
            raise ConfigError(f"memory: has {self.keys.shape[0]} rows, the call has {rows}; they must be equal")

    def clean(self) -> tuple[Tensor, Tensor]:
        """What keys and what values are made of, zero at padding: 0 · NaN would reach a result or a gradient."""
        values = self.keys if self.values is None else self.values
        if self.real is None:
            return self.keys, values
        padding = ~self.real[..., None]
        return self.keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions int64 [B, T] (−1 is padding) and documents int64 [B, T] (None: one a row).

    start: every row stands at start, start + 1, …, in one document (`causal`). pieces: the lengths of the
    documents of each row (`packed`), where no padding follows them. longest: the longest of these, padding or not.
    has_padding: some position may be −1. past: set by a model that carries a state.
    memory: what cross-attention reads, where no state holds it already. places: x and y of each token [B, T, 2] for
    positions in the plane, beside the order that `positions` tell and causality goes by; padding's mean nothing.
    """

    positions: Tensor
    documents: Tensor | None = None
    start: int | None = None
    pieces: tuple[tuple[int, ...], ...] | None = None
    longest: int | None = None
    has_padding: bool = True
    past: "Past | None" = None
    memory: Memory | None = None
    places: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.positions.dim() != 2:
            raise ConfigError(f"layout: positions have shape {list(self.positions.shape)}; expected [batch, length]")
        if self.documents is not None and self.documents.shape != self.positions.shape:
            raise ConfigError(
                f"layout: documents have shape {list(self.documents.shape)}, positions "
                f"{list(self.positions.shape)}; expected the same shape"
            )
        if self.places is not None:
            expected = [*self.positions.shape, 2]
            if list(self.places.shape) != expected:
                raise ConfigError(
                    f"layout: places have shape {list(self.places.shape)}; expected {expected}, x and y of each token"
                )
            if self.places.dtype == torch.bool or self.places.is_complex():
                raise ConfigError(f"layout: places are {self.places.dtype}; expected whole or floating-point numbers")

    @staticmethod
    def causal(batch: int, length: int, start: int = 0, device: torch.device | str | None = None) -> "Layout":
        """One document a row, from position `start` on, no padding."""
        positions = torch.arange(start, start + length, device=device).expand(batch, length)
        return Layout(positions, start=start, has_padding=False)

    @staticmethod
    def padded(
        lengths: Sequence[int],
        length: int | None = None,
        side: str = "left",
        device: torch.device | str | None = None,
    ) -> "Layout":
        """Rows of different lengths, padded on the "left" or "right" to `length` (default: the longest)."""
        width = max(lengths, default=0) if length is None else length
        if side not in ("left", "right") or not lengths or max(lengths) > width or min(lengths) < 0:
            raise ConfigError(f"layout: cannot pad rows of {list(lengths)} tokens to {width} on the side '{side}'")
        index = torch.arange(width, device=device).expand(len(lengths), width)
        count = torch.tensor(list(lengths), device=device)[:, None]
        positions = index - (width - count) if side == "left" else index
        real = positions >= 0 if side == "left" else index < count
        return Layout(torch.where(real, positions, -1), has_padding=True)

    @staticmethod
    def packed(
        lengths: Sequence[Sequence[int]], length: int | None = None, device: torch.device | str | None = None
    ) -> "Layout":
        """Documents one after another in each row; lengths of one row's documents sum to the row's length.

        With a `length` given they may sum to less: the rest of the row is padding.
        """
        rows = [list(row) for row in lengths]
        width = sum(rows[0]) if rows and length is None else length or 0
        rest = [width - sum(row) for row in rows]
        uneven = min(rest, default=-1) < 0 or (length is None and any(rest))
        if uneven or any(not row or min(row) <= 0 for row in rows):
            bound = "to the same length in each row" if length is None else f"at most to {length}"
            raise ConfigError(f"layout: packed lengths {rows} must be positive and sum {bound}")
        if all(len(row) == 1 for row in rows) and not any(rest):
            return Layout.causal(len(rows), width, device=device)
        # Made on the CPU, where many small tensors are cheap, and moved as two.
        made = [torch.arange(size, device="cpu") for row in rows for size in row]
        numbers = torch.tensor([number for row in rows for number in range(len(row))], device="cpu")
        sizes = torch.tensor([size for row in rows for size in row], device="cpu")
        real = torch.arange(width, device="cpu") < width - torch.tensor(rest, device="cpu")[:, None]
        positions = torch.full(real.shape, -1, device="cpu").masked_scatter_(real, torch.cat(made))
        documents = torch.zeros_like(positions).masked_scatter_(real, torch.repeat_interleave(numbers, sizes))
        pieces = None if any(rest) else tuple(tuple(row) for row in rows)
        longest = max(map(max, rows))
        place = torch.get_default_device() if device is None else device
        return Layout(positions.to(place), documents.to(place), None, pieces, longest, has_padding=any(rest))

    @property
    def batch(self) -> int:
        """Rows."""
        return self.positions.shape[0]

    @property
    def length(self) -> int:
        """Tokens in each row, padding included."""
        return self.positions.shape[1]

    @property
    def text_length(self) -> int:
        """How long a text of this call may be at most, in tokens, from static facts alone.

        With a state that is its capacity, without one the longest packed document, or else the row, padding included.
        Raises ConfigError with a state that declared no capacity.
        """
        if self.past is not None:
            if self.past.after.capacity is None:
                raise ConfigError("state: declares no capacity, on which a rotation depends; make it with one")
            return self.past.after.capacity
        return self.length if self.longest is None else self.longest

    @property
    def padding(self) -> Tensor | None:
        """bool [B, T], True at padding; None when there is none for certain."""
        return self.once("padding", lambda: self.positions < 0) if self.has_padding else None

    @property
    def numbers(self) -> Tensor:
        """The documents, int64 [B, T]; zeros where each row is one."""
        return torch.zeros_like(self.positions) if self.documents is None else self.documents

    @property
    def segments(self) -> Tensor | None:
        """Each token's document within this call, int64 [B, T], counted up; 0 goes on with that of the state.

        Padding counts with the token before it. None when every token goes on in one document.
        """
        one = self.documents is None if self.past is None else self.past.after.ordered
        return None if one else self.once("segments", self._segments)

    def _segments(self) -> Tensor:
        documents = self.numbers
        last = documents[:, :1] if self.past is None else self.past.before.last[:, 1:]
        if self.padding is not None:  # padding takes the document of the real token before it: it ends nothing
            index = torch.arange(self.length, device=documents.device).expand_as(documents)
            newest = torch.where(self.padding, -1, index).cummax(1).values
            documents = torch.where(newest < 0, last, documents.gather(1, newest.clamp(min=0)))
        return (documents != torch.cat((last, documents[:, :-1]), dim=1)).cumsum(1)

    def with_memory(self, memory: Memory) -> "Layout":
        """The same layout, beside a memory for cross-attention."""
        return replace(self, memory=memory, memo={})

    def with_places(self, places: Tensor) -> "Layout":
        """The same layout, each token at a place (x, y) of the plane: whole or fractional numbers [B, T, 2]."""
        return replace(self, places=places, memo={})

    @property
    def coordinates(self) -> Tensor:
        """x and y of each token [B, T, 2]: its place, or its position twice where none were given; 0 at padding."""
        if self.places is None:
            return self.positions.clamp(min=0)[..., None].expand(-1, -1, 2)
        return self.places if self.padding is None else self.places.masked_fill(self.padding[..., None], 0)

    def once(self, key: Any, make: Callable[[], V]) -> V:
        """Make a value the first time it is asked for (tables shared by all layers)."""
        if key not in self.memo:
            with torch.inference_mode(False):  # a table made in inference must serve training with the same layout
                self.memo[key] = make()
        value: V = self.memo[key]
        return value

    def seen(self, window: int | None, causal: bool) -> Visibility:
        """Visibility among the tokens of this call, no state."""
        return self.once(("seen", window, causal), lambda: self._visibility(window, causal))

    def _visibility(self, window: int | None, causal: bool) -> Visibility:
        ordered = self.start is not None
        return Visibility(
            self.positions,
            self.positions,
            self.documents,
            self.documents,
            window=window,
            causal=causal,
            ordered=ordered,
            everything=ordered and (self.length == 1 or (not causal and window is None)),
            pieces=self.pieces,
            ragged=self.has_padding,
        )
