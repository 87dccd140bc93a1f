"""A cache for transformers with a single layer, which holds the state of the whole heddle model.

Assisted decoding removes rejected tokens from the cache with `crop`. The state is rolled back if it can be. If not, a
fork of the state was made before those tokens were read; the model continues from the fork and reads the accepted
tokens again.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from heddle.errors import ConfigError
from heddle.exchange.transformers.masks import CachedTokens
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.layout import Layout

# What calls and outputs of transformers name a cache, the newer name first: `cache` came with 5.24.
CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})

# Tokens that ring buffers keep beyond their window when tokens may be removed. For more at once, the state is forked.
ROLLBACK_SLACK = 64


class ModelInputs(NamedTuple):
    """The inputs of one call: tokens [B, T] or embeddings [B, T, width], and their layout."""

    tokens: Tensor
    layout: Layout | None

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Apply a function to every tensor."""
        if self.layout is None:
            return ModelInputs(function(self.tokens), None)
        return ModelInputs(function(self.tokens), self.layout.map_tensors(function))

    def first_tokens(self, length: int) -> "ModelInputs":
        """The first `length` tokens of each row."""
        return self.map_tensors(lambda x: x[:, :length])


class HeddleCacheLayer(CacheLayerMixin):
    """The state of a model that has read `seq_length` columns (tokens and padding), at most `max_cache_len`.

    is_token: bool [B, seq_length], False at padding; None if there is no padding. pending: inputs that count as read,
    but that the state will read again at the next call, because `crop` went back to a fork.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: State | None = None
        self.seq_length = 0
        self.is_token: Tensor | None = None
        self.pending: list[ModelInputs] = []
        self._commit()

    def _commit(self) -> None:
        """Forget the fork: `crop` will not remove what was read so far."""
        self.fork: State | None = None
        self.inputs_since_fork: list[ModelInputs] = []
        self.length_since_commit = 0

    def read_pending(self, decoder: Decoder) -> CachedTokens:
        """Read the pending inputs, then return the tokens that the cache has read."""
        pending, self.pending = self.pending, []
        is_token, self.seq_length = self.is_token, self.seq_length - _total_length(pending)
        self.is_token = None if is_token is None else is_token[:, : self.seq_length]
        for inputs in pending:
            end = self.seq_length + inputs.tokens.shape[1]
            self.run_decoder(decoder, inputs, None if is_token is None else is_token[:, self.seq_length : end])
        return CachedTokens(self.seq_length, self.is_token, None if self.state is None else self.state.table)

    def run_decoder(self, decoder: Decoder, inputs: ModelInputs, is_token: Tensor | None) -> Tensor:
        """Run the model on the inputs of a call. is_token: bool [B, T], False at padding (None: no padding)."""
        batch, length = inputs.tokens.shape[:2]
        if self.state is None:
            self.state = self._init_state(decoder, batch, length, is_token)
        if self.record_past:
            if self.fork is None and not self.state.can_always_roll_back(self.length_since_commit + length):
                self.fork = self.state.fork()
            if self.fork is not None:
                self.inputs_since_fork.append(inputs)
            self.length_since_commit += length
        hidden: Tensor
        hidden, self.state = decoder(inputs.tokens, inputs.layout, self.state)
        if is_token is not None or self.is_token is not None:
            cached_is_token = _ones(batch, self.seq_length, inputs.tokens) if self.is_token is None else self.is_token
            new_is_token = _ones(batch, length, inputs.tokens) if is_token is None else is_token
            self.is_token = torch.cat((cached_is_token, new_is_token), dim=1)
        self.seq_length += length
        return hidden

    def _init_state(self, decoder: Decoder, batch: int, length: int, is_token: Tensor | None) -> State:
        """An empty state. If tokens may be removed, its ring buffers have slack for a rollback.

        Where rotations depend on the final length of a row's text, the padding of the first call is left out of it.
        Raises ConfigError if that call reads only padding of a row, so that more of it may follow (chunked prefill).
        """
        text_lengths = None
        if decoder.length_dependent and self.max_cache_len is not None and is_token is not None:
            padding = length - is_token.sum(1)
            if bool((padding == length).any()):
                raise ConfigError(
                    f"prefill_chunk_size: the first {length} columns of a row are all padding, so the length of its "
                    "text, on which a rotary embedding depends, is not known yet; use larger chunks, or leave it out"
                )
            text_lengths = (self.max_cache_len - padding).clamp(min=1).tolist()
        can_roll_back = self.record_past and decoder.init_state(batch, self.max_cache_len or 1).can_roll_back(1)
        rollback = ROLLBACK_SLACK if can_roll_back else 0
        return decoder.init_state(batch, self.max_cache_len, rollback=rollback, text_lengths=text_lengths)

    def crop(self, max_length: int) -> None:
        """Remove all columns beyond `max_length`; if it is not positive, remove the last −max_length columns.

        Raises ConfigError if the state cannot go back so far.
        """
        removed = -max_length if max_length <= 0 else max(0, self.seq_length - max_length)
        if removed > self.seq_length:
            raise ConfigError(f"crop: cannot remove {removed} columns from a cache of {self.seq_length}")
        remaining = self.seq_length - removed
        pending_length = _total_length(self.pending)
        self.pending = _truncate(self.pending, max(0, pending_length - removed))
        if removed > pending_length and self.state is not None:
            self._roll_back(removed - pending_length)
        self.seq_length = remaining
        self.is_token = None if self.is_token is None else self.is_token[:, :remaining]
        self._commit()

    def _roll_back(self, length: int) -> None:
        """Remove the last `length` columns that the state has read."""
        assert self.state is not None
        token_counts: Any = length if self.is_token is None else self.is_token[:, -length:].sum(1)
        if self.fork is None or self.state.can_roll_back(length):
            self.state = self.state.rollback(token_counts)
            return
        length_since_fork = _total_length(self.inputs_since_fork)
        if length > length_since_fork:
            raise ConfigError(f"crop: the state can go back {length_since_fork} columns, not {length}; fork it before")
        self.state, self.pending = self.fork, _truncate(self.inputs_since_fork, length_since_fork - length)

    def select_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order; rows may repeat."""
        if self.state is None:
            return
        rows = rows.to(self.state.table.token_counts.device)
        if torch.equal(rows, torch.arange(self.state.table.batch, device=rows.device)):
            return
        self.state = self.state.select(rows)
        self.fork = None if self.fork is None else self.fork.select(rows)
        self.inputs_since_fork = [inputs.map_tensors(lambda x: x[rows]) for inputs in self.inputs_since_fork]
        self.pending = [inputs.map_tensors(lambda x: x[rows]) for inputs in self.pending]
        self.is_token = None if self.is_token is None else self.is_token[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows of the surviving beams."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.select_rows(torch.arange(max(0, self.batch_size)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows by index or by a bool for each."""
        self.select_rows(torch.arange(max(0, self.batch_size), device=indices.device)[indices])

    def activate_past_recording(self) -> None:
        """Make it possible to remove the columns read since the last `crop`."""
        self.record_past = True

    @property
    def batch_size(self) -> int:
        """The number of rows; −1 before the first call."""
        return -1 if self.state is None else self.state.table.batch

    def get_seq_length(self) -> int:
        """The number of columns that were read."""
        return self.seq_length

    def get_max_length(self) -> int:
        """The maximum number of columns; −1 if unlimited."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of columns of a mask for the next call, and the first column."""
        return self.seq_length + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refused, as `update` is."""
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refused: heddle's mixers update their states themselves."""
        raise ConfigError("cache: heddle's cache takes no keys and values; use it with a Heddle model")


class HeddleCache(Cache):
    """The cache of a heddle model. max_cache_len: the maximum number of columns; None is unlimited."""

    def __init__(self, max_cache_len: int | None = None) -> None:
        super().__init__(layers=[HeddleCacheLayer(max_cache_len)])


def given_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache of a call that accepts it under two names. Raises ConfigError if both are set."""
    if cache is not None and past_key_values is not None:
        raise ConfigError(f"{' and '.join(CACHE_NAMES)}: are two names of one argument; give one of them")
    return past_key_values if cache is None else cache


def heddle_layer_of(cache: Any) -> HeddleCacheLayer:
    """The heddle layer of a cache; an empty dynamic or static cache of transformers gets one.

    Raises ConfigError for any other cache.
    """
    if isinstance(cache, DynamicCache | StaticCache) and not cache.offloading and not isinstance(cache, QuantizedCache):
        is_heddle = len(cache.layers) == 1 and isinstance(cache.layers[0], HeddleCacheLayer)
        if not is_heddle and not any(layer.is_initialized for layer in cache.layers):
            length = cache.get_max_length() if isinstance(cache, StaticCache) else None
            cache.layers[:] = [HeddleCacheLayer(length)]
    layer = cache.layers[0] if isinstance(cache, Cache) and cache.layers else None
    if not isinstance(layer, HeddleCacheLayer):
        kind = type(cache).__name__
        raise ConfigError(f"{CACHE_NAME}: is a {kind}, offloaded, quantized or of another model; use HeddleCache()")
    return layer


def _ones(batch: int, length: int, like: Tensor) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool, device=like.device)


def _total_length(all_inputs: list[ModelInputs]) -> int:
    return sum(inputs.tokens.shape[1] for inputs in all_inputs)


def _truncate(all_inputs: list[ModelInputs], length: int) -> list[ModelInputs]:
    """The inputs of the first `length` columns."""
    result = []
    for inputs in all_inputs:
        if length > 0:
            result.append(inputs.first_tokens(length) if inputs.tokens.shape[1] > length else inputs)
        length -= inputs.tokens.shape[1]
    return result
