"""What a mixer or a feed-forward carries from call to call: a frozen dataclass of tensors, copied row by row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch import device_type
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent import fla
from heddle.numerics.recurrent.chunked_sums import CallLayout
from heddle.numerics.transfer import to_device
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.position_table import INITIAL_SLOTS, CacheView, PositionTable

if TYPE_CHECKING:
    from heddle.parts.position_table import PositionTable


@dataclass(frozen=True, eq=False)
class StateSpec:
    """What a part needs to know to make an empty state.

    batch: rows. cache_length: the maximum number of tokens of a row (None: the state grows). encoder_output: what
    cross-attention reads. rollback: how many tokens can be removed at a time; ring buffers have that many extra slots.
    """

    batch: int
    cache_length: int | None
    dtype: torch.dtype
    device: torch.device | str
    encoder_output: EncoderOutput | None = None
    rollback: int = 0


class MixerState:
    """Base class of the states of mixers and feed-forwards, which are dataclasses.

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
        """A copy with the rows of this state, then of the others. All sizes but the batch must be equal."""
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


@dataclass(frozen=True, eq=False)
class ConvolvedState(MixerState):
    """The state of a part with short convolutions: its own, if it has one, and conv_state [B, kernel − 1, channels]."""

    own: MixerState | None
    conv_state: Tensor


@dataclass(frozen=True, eq=False)
class LayerState(MixerState):
    """The states of a layer whose feed-forward has one. Other layers have only their mixer's state."""

    mixer: MixerState | None
    feedforward: MixerState

    def can_roll_back(self, tokens: int, table: "PositionTable") -> bool:
        """Whether both states can."""
        mixer_can = self.mixer is None or self.mixer.can_roll_back(tokens, table)
        return mixer_can and self.feedforward.can_roll_back(tokens, table)

    def rolled_back(self, table: "PositionTable", freed: Callable[[int], Tensor]) -> "LayerState":
        """Both states without the removed tokens."""
        mixer = None if self.mixer is None else self.mixer.rolled_back(table, freed)
        return LayerState(mixer, self.feedforward.rolled_back(table, freed))


# States of recurrent mixers: one matrix for each head, whatever the sequence length.


@dataclass(frozen=True, eq=False)
class RecurrentState(MixerState):
    """kv_sums [B, H, d_k, d_v]: the (decayed) sums of the outer products k vᵀ, in at least float32."""

    kv_sums: Tensor

    @staticmethod
    def empty(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> "RecurrentState":
        """The state before the first token; shape is (batch, heads, key width, value width)."""
        return RecurrentState(at_least_float32(torch.zeros(shape, dtype=dtype, device=device)))


@dataclass(frozen=True, eq=False)
class ConvRecurrentState(MixerState):
    """The state of a recurrence after a short convolution.

    recurrent_state [B, heads, d_k, d_v], in at least float32. conv_state [B, conv_kernel − 1, channels]: the last
    inputs of the convolution. curvature [B, key_heads, 1, d_k] of a preconditioned delta rule, as recurrent_state.
    """

    recurrent_state: Tensor
    conv_state: Tensor
    curvature: Tensor | None = None

    @staticmethod
    def empty(spec: StateSpec, shape: tuple[int, int, int], conv_shape: tuple[int, int]) -> "ConvRecurrentState":
        """The state before the first token; the shapes are those above without the batch."""
        recurrent_state, conv_state = (
            torch.zeros((spec.batch, *inner), dtype=spec.dtype, device=spec.device) for inner in (shape, conv_shape)
        )
        return ConvRecurrentState(at_least_float32(recurrent_state), conv_state)


def call_layout(layout: Layout) -> CallLayout:
    """The layout as the recurrent operations read it, computed once for all layers."""

    def make() -> CallLayout:
        cumulative_tokens = None if layout.padding is None else (~layout.padding).cumsum(1)
        return CallLayout(cumulative_tokens, layout.call_segment_ids, call_cu_seqlens(layout))

    return layout.cached("call layout", make)


def call_cu_seqlens(layout: Layout) -> tuple[Tensor, Tensor] | None:
    """0 and the ends of the documents of all rows, int64 [N + 1]: on the device and on the host.

    None if each row is one document, if the host does not know the lengths, or if no library on the device reads them.
    """
    if is_compiling() or device_type(layout.positions) != "cuda" or fla.functions() is None:
        return None
    lengths = layout.packed_lengths
    if lengths is None or layout.call_segment_ids is None:
        return None

    def make() -> tuple[Tensor, Tensor]:
        ends = torch.tensor([0, *accumulate(chain.from_iterable(lengths))], device="cpu")
        return to_device(ends, layout.positions.device), ends

    return layout.cached("cu_seqlens", make)


def without_padding(x: Tensor, layout: Layout) -> Tensor:
    """Heads x [B, H, T, d], zero at padding."""
    return x if layout.padding is None else x.masked_fill(layout.padding[:, None, :, None], 0.0)


# The keys and values that a softmax mixer caches: of every token, or of the last few in a ring buffer.
#
# The tensors [B, G, slots, d] are written in place; unused slots are zero. A call of several tokens on a ring buffer
# attends over [cached keys ; new keys] and is written afterwards, so that calls of any length are exact. A single token
# is written first.


@dataclass(frozen=True, eq=False)
class KVCache(MixerState):
    """keys [B, G, slots, d_k], values [B, G, slots, d_v]. ring: whether slots are reused for later tokens."""

    keys: Tensor
    values: Tensor
    ring: bool

    @staticmethod
    def empty(shape: tuple[int, int, int, int], max_cached: int | None, spec: StateSpec) -> "KVCache":
        """shape is (batch, groups, key width, value width). The last `max_cached` tokens are cached, or all (None)."""
        batch, groups, d_k, d_v = shape
        limits = [limit for limit in (max_cached, spec.cache_length) if limit is not None]
        slots = max(1, min(limits)) if limits else INITIAL_SLOTS
        ring = max_cached is not None and (spec.cache_length is None or max_cached < spec.cache_length)
        keys = torch.zeros(batch, groups, slots, d_k, dtype=spec.dtype, device=spec.device)
        values = torch.zeros(batch, groups, slots, d_v, dtype=spec.dtype, device=spec.device)
        return KVCache(keys, values, ring)

    def join(self, others: "Sequence[KVCache]") -> "KVCache":
        """As in `MixerState`. Caches that keep every token get the slots of the largest."""
        slots = max(cache.keys.shape[2] for cache in (self, *others))
        return MixerState.join(self._grown(slots), [cache._grown(slots) for cache in others])

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Any number of tokens, but at most `rollback_left` once a ring buffer has overwritten slots."""
        return not self.ring or table.peak_tokens <= self.keys.shape[2] or tokens <= table.rollback_left

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> "KVCache":
        """The slots of removed tokens become zero, as if never written."""
        unused = freed(self.keys.shape[2])[:, None, :, None]
        self.keys.masked_fill_(unused, 0.0)
        self.values.masked_fill_(unused, 0.0)
        return self

    def extend(
        self, k: Tensor, v: Tensor, layout: Layout, window: int | None
    ) -> tuple[Tensor, Tensor, AttentionMask, "KVCache"]:
        """Add a call's keys and values [B, G, T, d]; returns all keys, all values, their mask and the new cache."""
        view = layout.cache_view
        assert view is not None
        cache = self if self.ring else self._grown(view.after.size)
        if layout.padding is not None:  # padding is neither written nor seen
            unused = layout.padding[:, None, :, None]
            k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
        if cache.ring and layout.length > 1:
            return cache._extend_ring(k, v, layout, window)
        slots = cache.keys.shape[2]
        mapping = view.slot_mapping(slots)
        mapping.write(cache.keys, k)
        mapping.write(cache.values, v)
        used = min(view.after.max_tokens, slots)
        keys, values = cache.keys[:, :, :used], cache.values[:, :, :used]
        return keys, values, _mask_of_cache(view, layout, window, slots, used), cache

    def _extend_ring(
        self, k: Tensor, v: Tensor, layout: Layout, window: int | None
    ) -> tuple[Tensor, Tensor, AttentionMask, "KVCache"]:
        view = layout.cache_view
        assert view is not None
        slots = self.keys.shape[2]
        used = min(view.before.max_tokens, slots)
        old_k, old_v = self._in_order(self.keys, view), self._in_order(self.values, view)
        keys, values = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        mask = view.cached(
            ("ring mask", slots, window), lambda: _mask_of_ring_and_call(view, layout, window, slots, used)
        )
        mapping = view.slot_mapping(slots)
        mapping.write(self.keys, k)
        mapping.write(self.values, v)
        return keys, values, mask, self

    def _in_order(self, buffer: Tensor, view: CacheView) -> Tensor:
        """The used slots of a ring buffer: oldest first if rows have equal lengths, else in slot order."""
        slots, max_tokens = buffer.shape[2], view.before.max_tokens
        if max_tokens <= slots or not view.equal_lengths:
            return buffer[:, :, : min(max_tokens, slots)]
        oldest = max_tokens % slots
        return torch.cat((buffer[:, :, oldest:], buffer[:, :, :oldest]), dim=2)

    def _grown(self, slots: int) -> "KVCache":
        old_slots = self.keys.shape[2]
        if slots <= old_slots:
            return self
        keys, values = (
            torch.cat((x, x.new_zeros(*x.shape[:2], slots - old_slots, x.shape[3])), dim=2)
            for x in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)


def _mask_of_cache(view: CacheView, layout: Layout, window: int | None, slots: int, used: int) -> AttentionMask:
    """The mask over slots into which the call's tokens are already written."""

    def make() -> AttentionMask:
        positions, segment_ids = view.ring(slots, after=True)
        contiguous = view.after.contiguous
        wrapped = view.after.max_tokens > slots  # a full ring buffer is in slot order; a single query sees all of it
        single_query = layout.length == 1 and contiguous
        return AttentionMask(
            layout.positions,
            positions[:, :used],
            None if contiguous else layout.dense_segment_ids,
            None if contiguous else segment_ids[:, :used],
            window=window,
            contiguous=contiguous and not wrapped,
            all_visible=single_query and (window is None or used <= window),
            doc_lengths=layout.packed_lengths if view.before.max_tokens == 0 and layout.length == used else None,
            # Unused slots are zero already. Zeroing them again is for safety; in a pinned state, each step would copy
            # its whole cache for it.
            may_have_padding=not view.equal_lengths and not view.after.is_pinned,
        )

    return view.cached(("cache mask", slots, used, window), make)


def _mask_of_ring_and_call(view: CacheView, layout: Layout, window: int | None, slots: int, used: int) -> AttentionMask:
    """The mask over [the used slots of a ring buffer ; the call's own tokens]."""
    positions, segment_ids = view.ring(slots, after=False)
    if view.equal_lengths and view.before.max_tokens > slots:
        oldest = view.before.max_tokens % slots
        positions, segment_ids = positions.roll(-oldest, 1), segment_ids.roll(-oldest, 1)
    contiguous = view.after.contiguous
    return AttentionMask(
        layout.positions,
        torch.cat((positions[:, :used], layout.positions), dim=1),
        None if contiguous else layout.dense_segment_ids,
        None if contiguous else torch.cat((segment_ids[:, :used], layout.dense_segment_ids), dim=1),
        window=window,
        contiguous=contiguous,
        doc_lengths=layout.packed_lengths if view.before.max_tokens == 0 else None,
        may_have_padding=not view.equal_lengths,
    )
