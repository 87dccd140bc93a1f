"""The cache of transformers: one layer of ours, which holds the state of the whole model.

Where transformers takes tokens back (assisted decoding), a state is rewound; one that cannot be is forked before, and
reads again what stays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import CacheLayerMixin

from heddle.errors import ConfigError
from heddle.exchange.transformers.masks import Columns
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.context.layout import Layout

REWIND = 64  # tokens that rings keep besides, where tokens may be taken back; with more at once the state is forked


class Call(NamedTuple):
    """What one call read: tokens [B, T] or embeddings [B, T, width], and where they stand."""

    tokens: Tensor
    layout: Layout | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same with each tensor changed."""
        if self.layout is None:
            return Call(change(self.tokens), None)
        documents = None if self.layout.documents is None else change(self.layout.documents)
        changed = Layout(change(self.layout.positions), documents, has_padding=self.layout.has_padding)
        return Call(change(self.tokens), changed)

    def first(self, columns: int) -> "Call":
        """The first columns."""
        return self.map(lambda x: x[:, :columns])


class HeddleLayer(CacheLayerMixin):
    """A state, and how many columns (tokens and padding) it has read; `max_cache_len` is never exceeded.

    What a fork shall read again is `unread` until the next call, and counts as read.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None) -> None:
        super().__init__()
        self.capacity = max_cache_len
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: State | None = None
        self.columns = 0
        self.real: Tensor | None = None
        self.unread: list[Call] = []
        self._commit()

    def _commit(self) -> None:
        """Nothing before this moment will be taken back."""
        self.mark: State | None = None
        self.calls: list[Call] = []  # since the mark
        self.since = 0  # columns since the last commit

    def past(self, decoder: Decoder) -> Columns:
        """What was read, after reading what is unread."""
        unread, self.unread = self.unread, []
        real, self.columns = self.real, self.columns - _columns(unread)
        self.real = None if real is None else real[:, : self.columns]
        for call in unread:
            end = self.columns + call.tokens.shape[1]
            self.read(decoder, call, None if real is None else real[:, self.columns : end])
        return Columns(self.columns, self.real, None if self.state is None else self.state.table)

    def read(self, decoder: Decoder, call: Call, real: Tensor | None) -> Tensor:
        """Read a call's columns; returns hidden states. real: bool [B, T], which are no padding (None: all)."""
        batch, length = call.tokens.shape[:2]
        if self.state is None:
            self.state = self._start(decoder, batch)
        if self.record_past:
            if self.mark is None and not self.state.keeps(self.since + length):
                self.mark = self.state.fork()
            if self.mark is not None:
                self.calls.append(call)
            self.since += length
        hidden, self.state = decoder(call.tokens, call.layout, self.state)
        if real is not None or self.real is not None:
            before = _ones(batch, self.columns, call.tokens) if self.real is None else self.real
            after = _ones(batch, length, call.tokens) if real is None else real
            self.real = torch.cat((before, after), dim=1)
        self.columns += length
        return hidden

    def _start(self, decoder: Decoder, batch: int) -> State:
        """An empty state; where tokens may be taken back, with slack for rings."""
        slack = REWIND if self.record_past and decoder.init_state(batch, self.capacity or 1).can_roll_back(1) else 0
        return decoder.init_state(batch, self.capacity, rewind=slack)

    def crop(self, columns: int) -> None:
        """Take back −columns, or all beyond the first `columns` where it is positive.

        Raises ConfigError where they were read too long ago for a state that cannot go back.
        """
        gone = -columns if columns <= 0 else max(0, self.columns - columns)
        if gone > self.columns:
            raise ConfigError(f"crop: cannot take back {gone} columns of a cache of {self.columns}")
        kept = self.columns - gone
        held = _columns(self.unread)
        self.unread = _first(self.unread, max(0, held - gone))
        if gone > held and self.state is not None:
            self._go_back(gone - held)
        self.columns = kept
        self.real = None if self.real is None else self.real[:, :kept]
        self._commit()

    def _go_back(self, gone: int) -> None:
        """Take back columns that the state has read."""
        assert self.state is not None
        counts: Any = gone if self.real is None else self.real[:, -gone:].sum(1)
        if self.mark is None or self.state.can_roll_back(gone):
            self.state = self.state.rewind(counts)
            return
        read = _columns(self.calls)
        if gone > read:
            raise ConfigError(f"crop: the state can take back the last {read} columns, not {gone}; fork it before")
        self.state, self.unread = self.mark, _first(self.calls, read - gone)

    def select(self, rows: Tensor) -> None:
        """Hold these rows, in this order."""
        if self.state is None:
            return
        rows = rows.to(self.state.table.counts.device)
        if torch.equal(rows, torch.arange(self.state.table.batch, device=rows.device)):
            return
        self.state = self.state.select(rows)
        self.mark = None if self.mark is None else self.mark.select(rows)
        self.calls = [call.map(lambda x: x[rows]) for call in self.calls]
        self.unread = [call.map(lambda x: x[rows]) for call in self.unread]
        self.real = None if self.real is None else self.real[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search's choice of rows."""
        self.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so often."""
        self.select(torch.arange(max(0, self.batch_size)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows, by number or by a bool for each."""
        self.select(torch.arange(max(0, self.batch_size), device=indices.device)[indices])

    def activate_past_recording(self) -> None:
        """From now on the columns read since the last `crop` can be taken back."""
        self.record_past = True

    @property
    def batch_size(self) -> int:
        """Rows; −1 before the first call."""
        return -1 if self.state is None else self.state.table.batch

    def get_seq_length(self) -> int:
        """Columns."""
        return self.columns

    def get_max_length(self) -> int:
        """Columns that it may hold; −1 for any number."""
        return -1 if self.capacity is None else self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and where they begin."""
        return self.columns + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refused as `update`."""
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refused: the parts of heddle keep their states themselves."""
        raise ConfigError("cache: is of heddle and takes no keys and values; use it with a Heddle model")


class HeddleCache(Cache):
    """The cache that a model of heddle makes; with `max_cache_len` it holds as many columns and no more."""

    def __init__(self, max_cache_len: int | None = None) -> None:
        super().__init__(layers=[HeddleLayer(max_cache_len)])


def layer_of(cache: Any) -> HeddleLayer:
    """Our layer in a cache, put into an empty dynamic or static one of transformers. Raises ConfigError for others."""
    if isinstance(cache, DynamicCache | StaticCache) and not cache.offloading and not isinstance(cache, QuantizedCache):
        ours = len(cache.layers) == 1 and isinstance(cache.layers[0], HeddleLayer)
        if not ours and not any(layer.is_initialized for layer in cache.layers):
            length = cache.get_max_length() if isinstance(cache, StaticCache) else None
            cache.layers[:] = [HeddleLayer(length)]
    layer = cache.layers[0] if isinstance(cache, Cache) and cache.layers else None
    if not isinstance(layer, HeddleLayer):
        kind = type(cache).__name__
        raise ConfigError(f"past_key_values: is a {kind}, offloaded, quantised or of another model; use HeddleCache()")
    return layer


def _ones(batch: int, length: int, like: Tensor) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool, device=like.device)


def _columns(calls: list[Call]) -> int:
    return sum(call.tokens.shape[1] for call in calls)


def _first(calls: list[Call], columns: int) -> list[Call]:
    """The calls that read the first columns."""
    found = []
    for call in calls:
        if columns > 0:
            found.append(call.first(columns) if call.tokens.shape[1] > columns else call)
        columns -= call.tokens.shape[1]
    return found
