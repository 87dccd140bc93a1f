"""transformers' masks and positions -> a layout, or None where tokens simply go on; what no layout says is refused.

A mask counts columns: the tokens of a row and its padding, those in the cache first. Without a mask, position ids
that do not go on by one begin a new document, as in packed rows; beside a mask they may not.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout
from heddle.parts.context.position_table import PositionTable

LARGE = -1e4  # additive masks hide with numbers below


class Columns(NamedTuple):
    """What a cache has read: so many columns, which of them are real [B, columns] (None: all), and where rows stand."""

    size: int = 0
    real: Tensor | None = None
    table: PositionTable | None = None

    def last(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Position and document [B, 1] of each row's newest token, −1 and 0 where it has none."""
        if self.table is None:
            return torch.full((batch, 1), -1, device=device), torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return self.table.last[:, :1], self.table.last[:, 1:]


class Reading(NamedTuple):
    """The layout of new columns (None: they go on), and which are real, bool [B, T] (None: all)."""

    layout: Layout | None
    real: Tensor | None


def read(tokens: Tensor, mask: Tensor | None, positions: Tensor | None, past: Columns) -> Reading:
    """What a mask (2-D or 4-D) and position ids [B or 1, T] say of tokens [B, T, …] after `past`.

    Raises ConfigError for what no layout can say, naming the argument and the place.
    """
    batch, length = tokens.shape[:2]
    if positions is not None:
        if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
            raise ConfigError(f"position_ids: have shape {list(positions.shape)}; expected {[batch, length]}")
        positions = positions.to(tokens.device, torch.int64).expand(batch, length)
        if length and int(positions.min()) < 0:
            raise ConfigError("position_ids: hold negative numbers; padding is told by attention_mask")
    if mask is None:
        return Reading(_plain(positions, past), None)
    if not isinstance(mask, Tensor):
        raise ConfigError("attention_mask: is a table of masks; give one tensor, [batch, length] or 4-D")
    if mask.dim() == 4:
        return _pairs(_seen(mask, batch, length, past), positions, past)
    if mask.shape != (batch, past.size + length):
        expected = [batch, past.size + length]
        raise ConfigError(f"attention_mask: has shape {list(mask.shape)}; expected {expected}, the cache's columns too")
    seen = mask.to(tokens.device).bool()
    _check_past(seen[:, : past.size], past)
    real = seen[:, past.size :]
    if bool(real.all()):
        if positions is not None:
            _check_steps(real, positions, past)
        return Reading(None if positions is None else _plain(positions, past), None)
    last, documents = past.last(batch, tokens.device)
    if positions is None:
        positions = last + real.cumsum(1)
    else:
        _check_steps(real, positions, past)
    documents = documents.expand(batch, length)
    return Reading(Layout(torch.where(real, positions, -1), documents if past.size else None), real)


def _plain(positions: Tensor | None, past: Columns) -> Layout | None:
    """Rows without padding."""
    if positions is None or positions.shape[1] == 0:
        return None
    batch, length = positions.shape
    if past.size:
        _check_steps(torch.ones_like(positions, dtype=torch.bool), positions, past)
        return None
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(starts.any()):
        first = positions[:, 0].tolist()
        if len(set(first)) == 1:
            return Layout.causal(batch, length, start=first[0], device=positions.device) if first[0] else None
        return Layout(positions, has_padding=False)
    starts = torch.nn.functional.pad(starts, (1, 0), value=True)
    if not bool(positions[starts].any()):
        ends = [[*row.nonzero()[:, 0].tolist(), length] for row in starts]
        return Layout.packed([[b - a for a, b in pairwise(row)] for row in ends], device=positions.device)
    return Layout(positions, starts.cumsum(1) - 1, has_padding=False)


def _check_past(seen: Tensor, past: Columns) -> None:
    """Raises ConfigError where a mask says otherwise of the cache's columns than the calls that read them."""
    same = bool(seen.all()) if past.real is None else torch.equal(seen, past.real)
    if not same:
        raise ConfigError(f"attention_mask: its first {past.size} columns are not those that the cache was read with")


def _check_steps(real: Tensor, positions: Tensor, past: Columns) -> None:
    """Raises ConfigError where the positions of a row's real tokens do not go on by one."""
    last, _ = past.last(positions.shape[0], positions.device)
    joined = torch.cat((last, torch.where(real, positions, -1)), dim=1)
    index = torch.arange(joined.shape[1], device=joined.device).expand_as(joined)
    newest = torch.where(joined >= 0, index, 0).cummax(1).values[:, :-1]
    before = joined.gather(1, newest)
    wrong = real & (before >= 0) & (positions != before + 1)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        reason = f"{int(positions[row, column])} follows {int(before[row, column])} in row {row}"
        raise ConfigError(
            f"position_ids: {reason}; beside an attention_mask or a cache, positions go on by one in each row"
        )


def _seen(mask: Tensor, batch: int, length: int, past: Columns) -> Tensor:
    """A 4-D mask as bool [B, T, columns], True where a token sees a column."""
    shape, wide = list(mask.shape), past.size + length
    if shape[0] not in (1, batch) or shape[2:] != [length, wide]:
        raise ConfigError(f"attention_mask: has shape {shape}; expected {[batch, 1, length, wide]}")
    if not mask.is_floating_point():
        seen = mask.bool()
    elif bool(((mask != 0) & (mask > LARGE)).any()):
        raise ConfigError("attention_mask: adds numbers other than 0 and large negative ones; heddle hides or shows")
    else:
        seen = mask == 0
    if bool((seen != seen[:, :1]).any()):
        raise ConfigError("attention_mask: differs between heads; heddle has one layout for all")
    return seen[:, 0].expand(batch, length, wide)


def _pairs(seen: Tensor, positions: Tensor | None, past: Columns) -> Reading:
    """The layout in which exactly these pairs [B, T, columns] see each other, rows of padding left out."""
    now = seen[:, :, past.size :]
    batch, length = now.shape[:2]
    ahead = torch.ones(length, length, dtype=torch.bool, device=now.device).triu(1)
    # A row of padding hides itself, or (where a softmax over nothing was avoided) sees what comes later.
    real = now.diagonal(dim1=1, dim2=2) & ~(now & ahead).any(2)
    index = torch.arange(length, device=now.device).expand(batch, length)
    newest = torch.where(real, index, -1).cummax(1).values
    before = torch.nn.functional.pad(newest[:, :-1], (1, 0), value=-1)  # the real token before each, −1: none
    follows = now.gather(2, before.clamp(min=0)[..., None])[..., 0] | (before < 0)
    starts = real & ~follows
    documents = starts.cumsum(1)
    shown = (documents[:, :, None] == documents[:, None, :]) & real[:, None, :] & ~ahead
    if past.size:
        held = torch.ones_like(seen[:, 0, : past.size]) if past.real is None else past.real
        shown = torch.cat(((documents == 0)[:, :, None] & held[:, None, :], shown), dim=2)
    _check_pairs(seen, shown, real, past)
    last, newest_document = past.last(batch, now.device)
    count = real.cumsum(1)
    counted = count - torch.where(starts, count, 0).cummax(1).values + torch.where(documents == 0, last, 0)
    if positions is not None:
        _check_within(positions, before, real & ~starts)
        counted = positions
    everything, numbers = bool(real.all()), documents + newest_document
    if bool(starts.any()):
        layout = Layout(torch.where(real, counted, -1), numbers, has_padding=not everything)
    elif everything:
        return Reading(_plain(positions, past), None)
    else:
        layout = Layout(torch.where(real, counted, -1), numbers if past.size else None)
    return Reading(layout, None if everything else real)


def _check_pairs(seen: Tensor, shown: Tensor, real: Tensor, past: Columns) -> None:
    """Raises ConfigError where a real token does not see what the nearest layout shows."""
    if past.table is not None and bool(past.table.last[:, 1].any()):
        raise ConfigError("attention_mask: 4-D, after a cache of several documents; give position_ids alone")
    wrong = (seen != shown) & real[:, :, None]
    if bool(wrong.any()):
        row, query, key = wrong.nonzero()[0].tolist()
        word = "shows" if bool(seen[row, query, key]) else "hides"
        raise ConfigError(
            f"attention_mask: {word} column {key} of row {row} to its token {query}, as no layout does; a 4-D mask is "
            "causal, padded, or of packed documents (windows belong to the design)"
        )


def _check_within(positions: Tensor, before: Tensor, real: Tensor) -> None:
    """Raises ConfigError where positions do not go on by one from the real token before, within a document."""
    wrong = real & (before >= 0) & (positions != positions.gather(1, before.clamp(min=0)) + 1)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ConfigError(f"position_ids: do not go on by one at token {column} of row {row}, within one document")
