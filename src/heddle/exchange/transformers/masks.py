"""Turn attention_mask and position_ids of transformers into a layout. Masks that no layout can express are refused.

The columns of a mask are the tokens of a row and its padding, those in the cache first. Without a mask, a position id
that does not follow the one before begins a new document, as in packed rows. With a mask, positions are consecutive.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.layout import Layout
from heddle.parts.position_table import PositionTable

MASKED_BELOW = -1e4  # a number below this in an additive mask hides a column


class CachedTokens(NamedTuple):
    """What a cache has read: the number of columns, and which are tokens, bool [B, length] (None: all).

    position_table: the positions and segment ids of the cached tokens.
    """

    length: int = 0
    is_token: Tensor | None = None
    position_table: PositionTable | None = None

    def last_tokens(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Position and segment id [B, 1] of each row's newest token; −1 and 0 if it has none."""
        if self.position_table is None:
            return torch.full((batch, 1), -1, device=device), torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return self.position_table.last_token[:, :1], self.position_table.last_token[:, 1:]


class LayoutAndMask(NamedTuple):
    """The layout of new columns (None: they continue the row), and which are tokens, bool [B, T] (None: all)."""

    layout: Layout | None
    is_token: Tensor | None


@torch.compiler.disable  # it checks values
def layout_from_inputs(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cached: CachedTokens
) -> LayoutAndMask:
    """The layout of tokens [B, T, …] after `cached`, from a mask (2-D or 4-D) and position ids [B or 1, T].

    Raises ConfigError for what no layout can express, naming the argument, the row and the column.
    """
    batch, length = tokens.shape[:2]
    if position_ids is not None:
        if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
            raise ConfigError(f"position_ids: have shape {list(position_ids.shape)}; expected {[batch, length]}")
        position_ids = position_ids.to(tokens.device, torch.int64).expand(batch, length)
        if length and int(position_ids.min()) < 0:
            raise ConfigError("position_ids: hold negative numbers; attention_mask marks padding")
    if attention_mask is None:
        return LayoutAndMask(_unpadded_layout(position_ids, cached), None)
    if not isinstance(attention_mask, Tensor):
        raise ConfigError("attention_mask: is a dict of masks; give one tensor, [batch, length] or 4-D")
    if attention_mask.dim() == 4:
        return _layout_from_pairs(_visible_pairs(attention_mask, batch, length, cached), position_ids, cached)
    if attention_mask.shape != (batch, cached.length + length):
        expected = [batch, cached.length + length]
        raise ConfigError(
            f"attention_mask: has shape {list(attention_mask.shape)}; expected {expected}, the cache's columns too"
        )
    visible = attention_mask.to(tokens.device).bool()
    _check_cached_mask(visible[:, : cached.length], cached)
    is_token = visible[:, cached.length :]
    if bool(is_token.all()):
        if position_ids is not None:
            _check_consecutive(is_token, position_ids, cached)
        return LayoutAndMask(None if position_ids is None else _unpadded_layout(position_ids, cached), None)
    last_positions, segment_ids = cached.last_tokens(batch, tokens.device)
    if position_ids is None:
        position_ids = last_positions + is_token.cumsum(1)
    else:
        _check_consecutive(is_token, position_ids, cached)
    segment_ids = segment_ids.expand(batch, length)
    return LayoutAndMask(
        Layout.of(torch.where(is_token, position_ids, -1), segment_ids if cached.length else None), is_token
    )


def _unpadded_layout(position_ids: Tensor | None, cached: CachedTokens) -> Layout | None:
    """The layout of rows without padding. position_ids None: they continue."""
    if position_ids is None or position_ids.shape[1] == 0:
        return None
    batch, length = position_ids.shape
    if cached.length:
        _check_consecutive(torch.ones_like(position_ids, dtype=torch.bool), position_ids, cached)
        return None
    is_start = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(is_start.any()):
        first = position_ids[:, 0].tolist()
        if len(set(first)) == 1:
            return Layout.causal(batch, length, start=first[0], device=position_ids.device) if first[0] else None
        return Layout.of(position_ids)
    is_start = torch.nn.functional.pad(is_start, (1, 0), value=True)
    if not bool(position_ids[is_start].any()):
        ends = [[*row.nonzero()[:, 0].tolist(), length] for row in is_start]
        return Layout.packed([[b - a for a, b in pairwise(row)] for row in ends], device=position_ids.device)
    return Layout.of(position_ids, is_start.cumsum(1) - 1)


def _check_cached_mask(visible: Tensor, cached: CachedTokens) -> None:
    """Raises ConfigError if the mask of the cached columns is not the one that they were read with."""
    is_same = bool(visible.all()) if cached.is_token is None else torch.equal(visible, cached.is_token)
    if not is_same:
        raise ConfigError(
            f"attention_mask: its first {cached.length} columns are not the mask that the cache was read with"
        )


def _check_consecutive(is_token: Tensor, position_ids: Tensor, cached: CachedTokens) -> None:
    """Raises ConfigError if the positions of a row's tokens are not consecutive."""
    last_positions, _ = cached.last_tokens(position_ids.shape[0], position_ids.device)
    positions = torch.cat((last_positions, torch.where(is_token, position_ids, -1)), dim=1)
    index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    previous_index = torch.where(positions >= 0, index, 0).cummax(1).values[:, :-1]
    previous = positions.gather(1, previous_index)
    is_wrong = is_token & (previous >= 0) & (position_ids != previous + 1)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        reason = f"{int(position_ids[row, column])} follows {int(previous[row, column])} in row {row}"
        raise ConfigError(
            f"position_ids: {reason}; with an attention_mask or a cache, positions must increase by one in each row"
        )


def _visible_pairs(attention_mask: Tensor, batch: int, length: int, cached: CachedTokens) -> Tensor:
    """A 4-D mask as bool [B, T, columns], True if a token sees a column."""
    shape, columns = list(attention_mask.shape), cached.length + length
    if shape[0] not in (1, batch) or shape[2:] != [length, columns]:
        raise ConfigError(f"attention_mask: has shape {shape}; expected {[batch, 1, length, columns]}")
    if not attention_mask.is_floating_point():
        visible = attention_mask.bool()
    elif bool(((attention_mask != 0) & (attention_mask > MASKED_BELOW)).any()):
        raise ConfigError(
            "attention_mask: adds values other than 0 and large negative numbers; heddle only hides or shows"
        )
    else:
        visible = attention_mask == 0
    if bool((visible != visible[:, :1]).any()):
        raise ConfigError("attention_mask: differs between heads; heddle has one layout for all")
    return visible[:, 0].expand(batch, length, columns)


def _layout_from_pairs(visible: Tensor, position_ids: Tensor | None, cached: CachedTokens) -> LayoutAndMask:
    """The layout in which exactly these pairs [B, T, columns] see each other. The pairs of padding do not matter."""
    new_pairs = visible[:, :, cached.length :]
    batch, length = new_pairs.shape[:2]
    is_later = torch.ones(length, length, dtype=torch.bool, device=new_pairs.device).triu(1)
    # Padding does not see itself; or it sees later columns, if the maker of the mask avoided rows without a column.
    is_token = new_pairs.diagonal(dim1=1, dim2=2) & ~(new_pairs & is_later).any(2)
    index = torch.arange(length, device=new_pairs.device).expand(batch, length)
    newest_token = torch.where(is_token, index, -1).cummax(1).values
    previous_token = torch.nn.functional.pad(newest_token[:, :-1], (1, 0), value=-1)  # −1: none
    sees_previous = new_pairs.gather(2, previous_token.clamp(min=0)[..., None])[..., 0] | (previous_token < 0)
    is_start = is_token & ~sees_previous
    segments = is_start.cumsum(1)
    expected = (segments[:, :, None] == segments[:, None, :]) & is_token[:, None, :] & ~is_later
    if cached.length:
        cached_is_token = (
            torch.ones_like(visible[:, 0, : cached.length]) if cached.is_token is None else cached.is_token
        )
        expected = torch.cat(((segments == 0)[:, :, None] & cached_is_token[:, None, :], expected), dim=2)
    _check_pairs(visible, expected, is_token, cached)
    last_positions, last_segment = cached.last_tokens(batch, new_pairs.device)
    count = is_token.cumsum(1)
    positions = count - torch.where(is_start, count, 0).cummax(1).values + torch.where(segments == 0, last_positions, 0)
    if position_ids is not None:
        _check_positions_in_documents(position_ids, previous_token, is_token & ~is_start)
        positions = position_ids
    no_padding, segment_ids = bool(is_token.all()), segments + last_segment
    if bool(is_start.any()):
        layout = Layout.of(torch.where(is_token, positions, -1), segment_ids)
    elif no_padding:
        return LayoutAndMask(_unpadded_layout(position_ids, cached), None)
    else:
        layout = Layout.of(torch.where(is_token, positions, -1), segment_ids if cached.length else None)
    return LayoutAndMask(layout, None if no_padding else is_token)


def _check_pairs(visible: Tensor, expected: Tensor, is_token: Tensor, cached: CachedTokens) -> None:
    """Raises ConfigError if the visible pairs of a token differ from the layout's."""
    if cached.position_table is not None and bool(cached.position_table.last_token[:, 1].any()):
        raise ConfigError("attention_mask: is 4-D, after a cache of several documents; give position_ids alone")
    is_wrong = (visible != expected) & is_token[:, :, None]
    if bool(is_wrong.any()):
        row, query, key = is_wrong.nonzero()[0].tolist()
        verb = "shows" if bool(visible[row, query, key]) else "hides"
        raise ConfigError(
            f"attention_mask: {verb} column {key} of row {row} to its token {query}, which no layout can express; "
            "a 4-D mask is causal, padded, or of packed documents (windows belong to the design)"
        )


def _check_positions_in_documents(position_ids: Tensor, previous_token: Tensor, is_checked: Tensor) -> None:
    """Raises ConfigError if positions are not consecutive within a document. is_checked: tokens that begin none."""
    is_wrong = (
        is_checked & (previous_token >= 0) & (position_ids != position_ids.gather(1, previous_token.clamp(min=0)) + 1)
    )
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise ConfigError(f"position_ids: do not increase by one at token {column} of row {row}, within one document")
