"""The layout of a call: the position, the document and the padding of every token. It replaces attention masks.

A layout also carries static facts (equal rows, document lengths), so that a kernel is chosen without reading a value
from the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.numerics.attention.backend import AttentionBackend
from heddle.numerics.attention.mask import AttentionMask
from heddle.parts.context.encoder_output import EncoderOutput

if TYPE_CHECKING:
    from heddle.parts.context.position_table import CacheView

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions int64 [B, T] (−1 is padding) and each token's document, segment_ids int64 [B, T] (None: one per row).

    start: the first position, if every row is one document at positions start, start + 1, … (see `causal`).
    doc_lengths: the lengths of each row's documents, if the row is packed without padding (see `packed`).
    max_doc_length: the longest of these documents, with or without padding.
    has_padding: False only if no position is −1.
    cache_view: set by a model that carries a state.
    encoder_output: what cross-attention reads, unless a state holds its projection already.
    coordinates: x and y of each token [B, T, 2], for positions in the plane. Causality still follows `positions`.
    The coordinates of padding are ignored.
    attention_backend: computes the softmax attention of `attention` mixers in this call in heddle's place.
    """

    positions: Tensor
    segment_ids: Tensor | None = None
    start: int | None = None
    doc_lengths: tuple[tuple[int, ...], ...] | None = None
    max_doc_length: int | None = None
    has_padding: bool = True
    cache_view: "CacheView | None" = None
    encoder_output: EncoderOutput | None = None
    coordinates: Tensor | None = None
    attention_backend: AttentionBackend | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.positions.dim() != 2:
            raise ConfigError(f"layout: positions have shape {list(self.positions.shape)}; expected [batch, length]")
        if self.segment_ids is not None and self.segment_ids.shape != self.positions.shape:
            raise ConfigError(
                f"layout: segment_ids have shape {list(self.segment_ids.shape)}, positions "
                f"{list(self.positions.shape)}; expected the same shape"
            )
        if self.coordinates is not None:
            expected = [*self.positions.shape, 2]
            if list(self.coordinates.shape) != expected:
                raise ConfigError(
                    f"layout: coordinates have shape {list(self.coordinates.shape)}; "
                    f"expected {expected}, x and y of each token"
                )
            if self.coordinates.dtype == torch.bool or self.coordinates.is_complex():
                raise ConfigError(
                    f"layout: coordinates are {self.coordinates.dtype}; expected whole or floating-point numbers"
                )

    @staticmethod
    def causal(batch: int, length: int, start: int = 0, device: torch.device | str | None = None) -> "Layout":
        """One document per row, at positions from `start` on, without padding."""
        positions = torch.arange(start, start + length, device=device).expand(batch, length)
        return Layout(positions, start=start, has_padding=False)

    @staticmethod
    def padded(
        lengths: Sequence[int],
        length: int | None = None,
        side: str = "left",
        device: torch.device | str | None = None,
    ) -> "Layout":
        """Rows of different lengths, padded on the "left" or "right" to `length` (default: the longest row)."""
        width = max(lengths, default=0) if length is None else length
        if side not in ("left", "right") or not lengths or max(lengths) > width or min(lengths) < 0:
            raise ConfigError(f"layout: cannot pad rows of {list(lengths)} tokens to {width} on the side '{side}'")
        index = torch.arange(width, device=device).expand(len(lengths), width)
        count = torch.tensor(list(lengths), device=device)[:, None]
        positions = index - (width - count) if side == "left" else index
        is_token = positions >= 0 if side == "left" else index < count
        return Layout(torch.where(is_token, positions, -1), has_padding=True)

    @staticmethod
    def packed(
        doc_lengths: Sequence[Sequence[int]], length: int | None = None, device: torch.device | str | None = None
    ) -> "Layout":
        """Documents one after another in each row. The document lengths of each row sum to the row's length.

        If `length` is given they may sum to less; the row is padded on the right.
        """
        rows = [list(row) for row in doc_lengths]
        width = sum(rows[0]) if rows and length is None else length or 0
        unused = [width - sum(row) for row in rows]
        uneven = min(unused, default=-1) < 0 or (length is None and any(unused))
        if uneven or any(not row or min(row) <= 0 for row in rows):
            bound = "to the same length in each row" if length is None else f"at most to {length}"
            raise ConfigError(f"layout: doc_lengths {rows} must be positive and sum {bound}")
        if all(len(row) == 1 for row in rows) and not any(unused):
            return Layout.causal(len(rows), width, device=device)
        # Built on the CPU, where many small tensors are cheap, then moved as two tensors.
        doc_positions = [torch.arange(size, device="cpu") for row in rows for size in row]
        doc_ids = torch.tensor([doc_id for row in rows for doc_id in range(len(row))], device="cpu")
        sizes = torch.tensor([size for row in rows for size in row], device="cpu")
        is_token = torch.arange(width, device="cpu") < width - torch.tensor(unused, device="cpu")[:, None]
        positions = torch.full(is_token.shape, -1, device="cpu").masked_scatter_(is_token, torch.cat(doc_positions))
        segment_ids = torch.zeros_like(positions).masked_scatter_(is_token, torch.repeat_interleave(doc_ids, sizes))
        exact_lengths = None if any(unused) else tuple(tuple(row) for row in rows)
        longest = max(map(max, rows))
        target = torch.get_default_device() if device is None else device
        return Layout(
            positions.to(target), segment_ids.to(target), None, exact_lengths, longest, has_padding=any(unused)
        )

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]

    @property
    def length(self) -> int:
        """Tokens in each row, padding included."""
        return self.positions.shape[1]

    @property
    def max_text_length(self) -> int:
        """The most tokens that a text of this call may have, from static facts alone.

        With a state this is its cache length. Without one it is the longest packed document, or else the row length,
        padding included. Raises ConfigError with a state that has no cache length.
        """
        if self.cache_view is not None:
            if self.cache_view.after.cache_length is None:
                raise ConfigError(
                    "state: has no cache_length, on which a rotary embedding depends; give init_state a cache_length"
                )
            return self.cache_view.after.cache_length
        return self.length if self.max_doc_length is None else self.max_doc_length

    @property
    def padding(self) -> Tensor | None:
        """bool [B, T], True at padding; None if there certainly is none."""
        return self.cached("padding", lambda: self.positions < 0) if self.has_padding else None

    @property
    def dense_segment_ids(self) -> Tensor:
        """`segment_ids` as a tensor in every case: zeros [B, T] where each row is one document."""
        return torch.zeros_like(self.positions) if self.segment_ids is None else self.segment_ids

    @property
    def call_segment_ids(self) -> Tensor | None:
        """The document of each token, counted up within this call, int64 [B, T]; 0 continues the state's document.

        Padding has the id of the token before it. None if every token continues one document.
        """
        single = self.segment_ids is None if self.cache_view is None else self.cache_view.after.contiguous
        return None if single else self.cached("call segment ids", self._call_segment_ids)

    def _call_segment_ids(self) -> Tensor:
        ids = self.dense_segment_ids
        last = ids[:, :1] if self.cache_view is None else self.cache_view.before.last_token[:, 1:]
        if self.padding is not None:  # padding takes the document of the token before it, so it ends no document
            index = torch.arange(self.length, device=ids.device).expand_as(ids)
            newest = torch.where(self.padding, -1, index).cummax(1).values
            ids = torch.where(newest < 0, last, ids.gather(1, newest.clamp(min=0)))
        return (ids != torch.cat((last, ids[:, :-1]), dim=1)).cumsum(1)

    def with_encoder_output(self, encoder_output: EncoderOutput) -> "Layout":
        """The same layout with an encoder output for cross-attention to read."""
        return replace(self, encoder_output=encoder_output, cache={})

    def with_coordinates(self, coordinates: Tensor) -> "Layout":
        """The same layout with x and y of each token in the plane: integers or floats [B, T, 2]."""
        return replace(self, coordinates=coordinates, cache={})

    @property
    def axial_positions(self) -> Tensor:
        """x and y of each token [B, T, 2]: its coordinates, or its position twice if none are set. Padding has 0."""
        if self.coordinates is None:
            return self.positions.clamp(min=0)[..., None].expand(-1, -1, 2)
        return self.coordinates if self.padding is None else self.coordinates.masked_fill(self.padding[..., None], 0)

    def cached(self, key: Any, make: Callable[[], V]) -> V:
        """`make()`, computed for the first caller and stored for the other layers."""
        if key not in self.cache:
            with torch.inference_mode(False):  # a layout used in inference may be used in training afterwards
                self.cache[key] = make()
        value: V = self.cache[key]
        return value

    def attention_mask(self, window: int | None, causal: bool) -> AttentionMask:
        """The mask between the tokens of this call, without a state."""
        return self.cached(("attention mask", window, causal), lambda: self._attention_mask(window, causal))

    def _attention_mask(self, window: int | None, causal: bool) -> AttentionMask:
        contiguous = self.start is not None
        return AttentionMask(
            self.positions,
            self.positions,
            self.segment_ids,
            self.segment_ids,
            window=window,
            causal=causal,
            contiguous=contiguous,
            all_visible=contiguous and (self.length == 1 or (not causal and window is None)),
            doc_lengths=self.doc_lengths,
            may_have_padding=self.has_padding,
        )
