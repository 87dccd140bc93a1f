"""The layout of a call: the position, the document and the padding of every token. It replaces attention masks.

A layout also carries static facts (equal rows, document lengths), so that a kernel is chosen without reading a value
from the device. Constructors that make the tensors know the facts. `Layout.of` computes them from tensors, and refuses
invalid tensors; see `layout_facts`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.errors import ConfigError
from heddle.numerics.attention.mask import AttentionMask, ScoreBiasFunction
from heddle.numerics.attention.softmax import AttentionBackend
from heddle.numerics.transfer import tensor_of, to_device

if TYPE_CHECKING:
    from heddle.parts.position_table import CacheView


# What makes a layout valid: which tensors fit together, which values they hold, and the static facts that follow.
#
# In each row, apart from padding: the tokens of a document are adjacent, their positions are consecutive from any first
# position, and segment ids never decrease. So every mixer sees the same documents, whether it compares segment ids
# (softmax) or resets its state where they change (recurrences).


MAX_POSITION = 2**30  # of positions and segment ids: a state stores them as int32


class LayoutFacts(NamedTuple):
    """The facts of a layout that kernels are chosen by; see `Layout` for their meaning."""

    start: int | None
    doc_lengths: tuple[tuple[int, ...], ...]
    max_position: int
    has_padding: bool


def check_layout_tensors(positions: Tensor, segment_ids: Tensor | None, coordinates: Tensor | None) -> None:
    """Raise ConfigError if the tensors of a layout do not fit each other. Reads no value."""
    if positions.dim() != 2:
        raise ConfigError(f"layout: positions have shape {list(positions.shape)}; expected [batch, length]")
    shape = list(positions.shape)
    if segment_ids is not None and list(segment_ids.shape) != shape:
        raise ConfigError(
            f"layout: segment_ids have shape {list(segment_ids.shape)}, positions {shape}; expected the same shape"
        )
    if coordinates is not None and list(coordinates.shape) != [*shape, 2]:
        raise ConfigError(
            f"layout: coordinates have shape {list(coordinates.shape)}; expected {[*shape, 2]}, x and y of each token"
        )
    if coordinates is not None and (coordinates.dtype == torch.bool or coordinates.is_complex()):
        raise ConfigError(f"layout: coordinates are {coordinates.dtype}; expected integers or floating-point numbers")
    for name, ids in (("positions", positions), ("segment_ids", segment_ids)):
        if ids is not None and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
            raise ConfigError(f"layout: {name} are {ids.dtype}; expected integers, as int64")
    for name, tensor in (("segment_ids", segment_ids), ("coordinates", coordinates)):
        if tensor is not None and tensor.device != positions.device:
            raise ConfigError(f"layout: {name} are on {tensor.device}, positions on {positions.device}; use one device")


def layout_facts(positions: Tensor, segment_ids: Tensor | None) -> LayoutFacts:
    """The facts of positions and segment_ids int [B, T]. Both are copied to the host, in one device sync.

    Raises ConfigError that names the first invalid token.
    """
    tensors = positions[None] if segment_ids is None else torch.stack((positions, segment_ids.to(positions.dtype)))
    table = tensors.detach().cpu().numpy()
    position, segment = table[0], table[-1] if segment_ids is not None else np.zeros_like(table[0])
    is_token = position >= 0
    _check_range(position, segment, is_token)
    continues = _check_order(position, segment, is_token)
    is_start = is_token & ~continues
    rows = np.nonzero(is_token)[0]
    starts = np.append(np.nonzero(is_start[is_token])[0], len(rows))  # of documents, counted in tokens of all rows
    doc_lengths: list[list[int]] = [[] for _ in position]
    for row, doc_length in zip(rows[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True):
        doc_lengths[row].append(doc_length)
    has_padding = not bool(is_token.all())
    first = position[:, 0].tolist() if position.size and not has_padding else []
    is_causal = len(set(first)) == 1 and all(len(row) == 1 for row in doc_lengths)
    max_position = int(position.max()) if position.size else -1
    return LayoutFacts(first[0] if is_causal else None, tuple(map(tuple, doc_lengths)), max_position, has_padding)


def _check_range(position: np.ndarray, segment: np.ndarray, is_token: np.ndarray) -> None:
    """Raises ConfigError for an invalid position or segment id."""
    is_wrong = (position < -1) | (position > MAX_POSITION)
    if is_wrong.any():
        _refuse(is_wrong, position, "position {value}", f"positions are from 0 to {MAX_POSITION}, or −1 for padding")
    is_wrong = is_token & ((segment < 0) | (segment > MAX_POSITION))
    if is_wrong.any():
        _refuse(is_wrong, segment, "segment id {value}", f"segment ids are from 0 to {MAX_POSITION}")


def _check_order(position: np.ndarray, segment: np.ndarray, is_token: np.ndarray) -> np.ndarray:
    """bool [B, T], True at a token that continues the document of the token before it.

    Raises ConfigError if a document reappears, or its positions are not consecutive.
    """
    index = np.where(is_token, np.arange(position.shape[1]), -1)
    newest = np.maximum.accumulate(index, axis=1) if position.size else index
    previous = np.concatenate((np.full_like(newest[:, :1], -1), newest[:, :-1]), axis=1)  # token before; −1: none
    column = np.maximum(previous, 0)
    last_position, last_segment = (np.take_along_axis(values, column, 1) for values in (position, segment))
    has_previous = is_token & (previous >= 0)
    is_wrong = has_previous & (segment < last_segment)
    if is_wrong.any():
        remedy = "keep the tokens of a document together, and give the next document a higher segment id"
        _refuse(is_wrong, segment, "segment id {value} follows {last}", remedy, last_segment)
    continues: np.ndarray = has_previous & (segment == last_segment)
    is_wrong = continues & (position != last_position + 1)
    if is_wrong.any():
        remedy = "positions of a document are consecutive; give segment_ids to mark where a document ends"
        _refuse(is_wrong, position, "position {value} follows {last}", remedy, last_position)
    return continues


def _refuse(
    is_wrong: np.ndarray, values: np.ndarray, what: str, remedy: str, last: np.ndarray | None = None
) -> NoReturn:
    row, token = (int(index[0]) for index in np.nonzero(is_wrong))
    text = what.format(value=int(values[row, token]), last=None if last is None else int(last[row, token]))
    raise ConfigError(f"layout: {text} at token {token} of row {row}; {remedy}")


# What cross-attention reads: the hidden states of an encoder, or any other sequence, with its padding mask.


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """Keys are projected from `keys` [B, S, width], values from `values` [B, S, width] (None: from `keys` as well).

    is_token: bool [B, S], False at padding; None when there is no padding.
    """

    keys: Tensor
    values: Tensor | None = None
    is_token: Tensor | None = None

    def __post_init__(self) -> None:
        shape = list(self.keys.shape)
        if self.keys.dim() != 3:
            raise ConfigError(f"encoder_output: keys have shape {shape}; expected [batch, length, width]")
        if self.values is not None and self.values.shape[:2] != self.keys.shape[:2]:
            raise ConfigError(
                f"encoder_output: values have shape {list(self.values.shape)}, keys {shape}; "
                "batch and length must be equal"
            )
        if self.is_token is not None and self.is_token.shape != self.keys.shape[:2]:
            raise ConfigError(f"encoder_output: is_token has shape {list(self.is_token.shape)}; expected {shape[:2]}")

    def check(self, width: int, rows: int) -> None:
        """Raise ConfigError unless keys and values have this width and this number of rows."""
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor is not None and tensor.shape[2] != width:
                raise ConfigError(
                    f"encoder_output: {name} are {tensor.shape[2]} wide, but encoder_width = {width}; make them equal"
                )
        if self.keys.shape[0] != rows:
            raise ConfigError(f"encoder_output: has {self.keys.shape[0]} rows, the call has {rows}; they must be equal")

    def clean(self) -> tuple[Tensor, Tensor]:
        """The inputs of the key and the value projection, zero at padding: 0 · NaN would reach results or gradients."""
        values = self.keys if self.values is None else self.values
        if self.is_token is None:
            return self.keys, values
        padding = ~self.is_token[..., None]
        return self.keys.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)


V = TypeVar("V")


class HandedOver:
    """What layers hand to later ones within a call, by layer index.

    per_layer: what the embedding hands to each layer [B, T, layers, dim] (`embedding.per_layer`).
    tokens: the ids of the call, int64 [B, T], for layers that read them.
    value_rows: what value embeddings looked up for later layers, by layer index.
    biases: the score biases of tables that later layers share, by layer index.
    An object, not a dictionary: FSDP copies the dictionaries of a layout for each layer.
    """

    def __init__(self) -> None:
        self.by_layer: dict[int, Any] = {}
        self.per_layer: Tensor | None = None
        self.tokens: Tensor | None = None
        self.value_rows: dict[int, Tensor] = {}
        self.biases: dict[int, ScoreBiasFunction] = {}


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions int64 [B, T] (−1 is padding) and each token's document, segment_ids int64 [B, T].

    segment_ids None: each row is one document; with a state, the one that the row is in.
    start: the first position, if every row is one document at positions start, start + 1, … (see `causal`).
    doc_lengths: the lengths of each row's documents, in order, without padding. None: not known, or given by `start`.
    max_position: no position is larger. None: not known, or given by `start`.
    has_padding: False only if no position is −1.
    is_checked: whether tensors and facts are known to be valid. A model checks any other layout, as `of` does.
    cache_view: set by a model that carries a state.
    encoder_output: what cross-attention reads, unless a state holds its projection already.
    coordinates: x and y of each token [B, T, 2], for positions in the plane. Causality still follows `positions`.
    The coordinates of padding are ignored.
    token_types: the type of each token, int64 [B, T] (BERT's segments); None: type 0. Types of padding are ignored.
    attention_backend: computes the softmax attention of `attention` mixers in this call instead of heddle.
    handed_over: what layers hand to later ones; a new object for each call of a model that shares keys or values. None:
    nothing is handed over.
    """

    positions: Tensor
    segment_ids: Tensor | None = None
    start: int | None = None
    doc_lengths: tuple[tuple[int, ...], ...] | None = None
    max_position: int | None = None
    has_padding: bool = True
    is_checked: bool = False
    cache_view: "CacheView | None" = None
    encoder_output: EncoderOutput | None = None
    coordinates: Tensor | None = None
    token_types: Tensor | None = None
    attention_backend: AttentionBackend | None = None
    handed_over: HandedOver | None = field(default=None, repr=False)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_layout_tensors(self.positions, self.segment_ids, self.coordinates)

    @staticmethod
    def of(
        positions: Tensor,
        segment_ids: Tensor | None = None,
        coordinates: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> "Layout":
        """The layout of a copy of these tensors, checked on the host in one device sync; on `device` if it is given.

        positions int [B, T]: −1 is padding, which may be anywhere; within a document positions are consecutive, from
        any first position. segment_ids int [B, T]: equal for the tokens of a document, higher for the next one in the
        row; ignored at padding. None: each row is one document. Raises ConfigError that names the first invalid token.
        """
        raw = Layout(positions, segment_ids, coordinates=coordinates)
        target = positions.device if device is None else device
        ids = None if segment_ids is None else segment_ids.to(torch.int64)
        facts = layout_facts(positions.to(torch.int64), ids)
        return replace(
            raw,
            positions=to_device(positions.to(torch.int64, copy=True), target),  # copies, so that later changes of the
            segment_ids=None if ids is None else to_device(ids.clone(), target),  # tensors do not change the layout
            coordinates=None if coordinates is None else to_device(coordinates, target),
            is_checked=True,
            **facts._asdict(),
        )

    def checked(self) -> "Layout":
        """The same layout, checked as in `of` unless it is known to be valid."""
        if self.is_checked:
            return self
        layout = Layout.of(self.positions, self.segment_ids, self.coordinates)
        names = ("encoder_output", "token_types", "attention_backend")
        return replace(layout, **{name: getattr(self, name) for name in names})

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Layout":
        """The layout of some rows, or of some adjacent tokens: `function` selects them from each tensor.

        Of the facts it keeps only `has_padding`.
        """
        optional = (self.segment_ids, self.coordinates, self.token_types)
        segment_ids, coordinates, token_types = (None if x is None else function(x) for x in optional)
        return Layout(
            function(self.positions),
            segment_ids,
            has_padding=self.has_padding,
            is_checked=self.is_checked,
            coordinates=coordinates,
            token_types=token_types,
        )

    @staticmethod
    def causal(batch: int, length: int, start: int = 0, device: torch.device | str | None = None) -> "Layout":
        """One document per row, at positions from `start` on, without padding."""
        if not 0 <= start <= MAX_POSITION:
            raise ConfigError(f"layout: start = {start} must be from 0 to {MAX_POSITION}")
        positions = torch.arange(start, start + length, device=device).expand(batch, length)
        return Layout(positions, start=start, has_padding=False, is_checked=True)

    @staticmethod
    def padded(
        lengths: Sequence[int],
        length: int | None = None,
        side: str = "left",
        device: torch.device | str | None = None,
        start: int = 0,
    ) -> "Layout":
        """Rows of different lengths, padded on the "left" or "right" to `length` (default: the longest row).

        start: the position of each row's first token.
        """
        width = max(lengths, default=0) if length is None else length
        if side not in ("left", "right") or not lengths or max(lengths) > width or min(lengths) < 0:
            raise ConfigError(
                f"layout: cannot pad rows of {list(lengths)} tokens to {width} on the side '{side}'; give a length "
                "that fits each row, and left or right"
            )
        index = torch.arange(width, device=device).expand(len(lengths), width)
        count = tensor_of(lengths, torch.int64, device)[:, None]
        positions = index - (width - count) if side == "left" else index
        is_token = positions >= 0 if side == "left" else index < count
        if not 0 <= start <= MAX_POSITION:
            raise ConfigError(f"layout: start = {start} must be from 0 to {MAX_POSITION}")
        return Layout(
            torch.where(is_token, positions + start, -1),
            doc_lengths=tuple((size,) if size else () for size in lengths),
            max_position=start + max(lengths) - 1 if any(lengths) else -1,
            is_checked=True,
        )

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
            bound = "to the same length in each row" if length is None else f"to at most {length}"
            raise ConfigError(f"layout: doc_lengths {rows} must be positive and sum {bound}")
        if all(len(row) == 1 for row in rows) and not any(unused):
            return Layout.causal(len(rows), width, device=device)
        # Built on the CPU, where many small tensors are cheap, then moved at once.
        doc_positions = [torch.arange(size, device="cpu") for row in rows for size in row]
        doc_ids = torch.tensor([doc_id for row in rows for doc_id in range(len(row))], device="cpu")
        sizes = torch.tensor([size for row in rows for size in row], device="cpu")
        is_token = torch.arange(width, device="cpu") < width - torch.tensor(unused, device="cpu")[:, None]
        positions = torch.full(is_token.shape, -1, device="cpu").masked_scatter_(is_token, torch.cat(doc_positions))
        segment_ids = torch.zeros_like(positions).masked_scatter_(is_token, torch.repeat_interleave(doc_ids, sizes))
        positions, segment_ids = to_device(torch.stack((positions, segment_ids)), device)
        return Layout(
            positions,
            segment_ids,
            doc_lengths=tuple(map(tuple, rows)),
            max_position=max(map(max, rows)) - 1,
            has_padding=any(unused),
            is_checked=True,
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
    def text_lengths(self) -> tuple[tuple[int, ...], ...]:
        """The final lengths of each row's documents, which some rotary embeddings depend on.

        Without a state the length of each document, in order. With a state one number for each row, from `init_state`.
        Raises ConfigError with a state that was created without a length.
        """
        if self.cache_view is not None:
            return tuple((length,) for length in self.cache_view.after.final_lengths)
        if self.start is not None:
            return ((self.length,),) * self.batch
        if self.doc_lengths is not None:
            return self.doc_lengths
        return self.cached("text lengths", lambda: layout_facts(self.positions, self.segment_ids).doc_lengths)

    @property
    def row_tokens(self) -> tuple[int, ...] | None:
        """The number of tokens of each row, without padding, if it is known on the host."""
        if self.start is not None or not self.has_padding:
            return (self.length,) * self.batch
        return None if self.doc_lengths is None else tuple(map(sum, self.doc_lengths))

    @property
    def packed_lengths(self) -> tuple[tuple[int, ...], ...] | None:
        """`doc_lengths` if the documents of each row follow each other without padding, else None."""
        return None if self.has_padding else self.doc_lengths

    @property
    def padding(self) -> Tensor | None:
        """bool [B, T], True at padding; None if there is certainly none."""
        return self.cached("padding", lambda: self.positions < 0) if self.has_padding else None

    @property
    def dense_segment_ids(self) -> Tensor:
        """`segment_ids`, or zeros [B, T] if each row is one document."""
        return torch.zeros_like(self.positions) if self.segment_ids is None else self.segment_ids

    @property
    def call_segment_ids(self) -> Tensor | None:
        """The document of each token, counted up within this call, int64 [B, T]; 0 continues the state's document.

        Without a state 0 is the row's first document. Padding has the id of the token before it. None if every token
        continues one document.
        """
        single = self.segment_ids is None if self.cache_view is None else self.cache_view.after.contiguous
        return None if single else self.cached("call segment ids", self._call_segment_ids)

    def _call_segment_ids(self) -> Tensor:
        ids = self.dense_segment_ids
        if self.cache_view is not None:
            last = self.cache_view.before.last_token[:, 1:]
        else:  # the segment id of the row's first token
            first = None if self.padding is None or not self.length else self.padding.int().argmin(1, keepdim=True)
            last = ids[:, :1] if first is None else ids.gather(1, first)
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

    def with_token_types(self, token_types: Tensor) -> "Layout":
        """The same layout with the type of each token, integers [B, T], for designs with `embedding.token_types`."""
        return replace(self, token_types=token_types, cache={})

    @property
    def axial_positions(self) -> Tensor:
        """x and y of each token [B, T, 2]: its coordinates, or its position twice if none are set. Padding has 0."""
        if self.coordinates is None:
            return self.positions.clamp(min=0)[..., None].expand(-1, -1, 2)
        return self.coordinates if self.padding is None else self.coordinates.masked_fill(self.padding[..., None], 0)

    def cached(self, key: Any, make: Callable[[], V]) -> V:
        """`make()`, computed for the first caller and stored for the other layers."""
        if key not in self.cache:
            # A layout used in inference may be used in training afterwards; a graph of one call has no use for it.
            with nullcontext() if is_compiling() else torch.inference_mode(False):
                self.cache[key] = make()
        value: V = self.cache[key]
        return value

    def attention_mask(self, window: int | None, causal: bool, chunked: bool = False) -> AttentionMask:
        """The mask between the tokens of this call, without a state. chunked: whether `window` is of chunks."""
        mask = self.cached(("attention mask", window, causal), lambda: self._attention_mask(window, causal))
        return self.in_chunks(mask, window) if chunked and window is not None else mask

    def in_chunks(self, mask: AttentionMask, width: int) -> AttentionMask:
        """A mask of this call, whose window is `width`, restricted to chunks of `width` positions."""
        return mask.cached("chunks", lambda: mask.in_chunks(width, self._chunk_lengths(width)))

    def _chunk_lengths(self, width: int) -> tuple[tuple[int, ...], ...] | None:
        """The lengths of the chunks of a call without a state whose rows are one document each; else None."""
        if self.start is None or self.cache_view is not None:
            return None
        ends = [*range(self.start // width * width + width, self.start + self.length, width), self.start + self.length]
        lengths = tuple(end - start for start, end in pairwise([self.start, *ends]))
        return (lengths,) * self.batch if self.length else None

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
            doc_lengths=self.packed_lengths,
            may_have_padding=self.has_padding,
            adjacent=True,
        )
