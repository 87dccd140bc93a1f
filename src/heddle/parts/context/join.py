"""Join tables of positions: the rows of several states as one batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.position_table import PositionTable


def join_tables(tables: Sequence[PositionTable]) -> PositionTable:
    """A table with the rows of all, in order. Where it keeps every token it has the slots of the largest.

    Raises ConfigError for tables that were created with different lengths or rollbacks.
    """
    first = tables[0]
    for name in ("lookback", "cache_length", "rollback"):
        values = sorted({str(getattr(table, name)) for table in tables})
        if len(values) > 1:
            raise ConfigError(f"join: the states have {name} {' and '.join(values)}; create them alike")
    size = max(table.size for table in tables)
    positions = torch.cat([_with_slots(table.positions, size, -1) for table in tables])
    segment_ids = torch.cat([_with_slots(table.segment_ids, size, 0) for table in tables])
    text_lengths = None
    if any(table.text_lengths is not None for table in tables):
        text_lengths = tuple(length for table in tables for length in table.final_lengths)
    newest = [table.max_position for table in tables]
    facts: dict[str, Any] = {
        "contiguous": all(table.contiguous for table in tables),
        "rollback_left": min(table.rollback_left for table in tables),
        "peak_tokens": max(table.peak_tokens for table in tables),
        "max_position": None if None in newest else max(value for value in newest if value is not None),
        "text_lengths": text_lengths,
    }
    counts = torch.cat([table.token_counts for table in tables])
    last = torch.cat([table.last_token for table in tables])
    table = replace(first, positions=positions, segment_ids=segment_ids, token_counts=counts, last_token=last, **facts)
    return table.counted()


def _with_slots(values: Tensor, size: int, unused: int) -> Tensor:
    """values [B, slots] with `size` slots; the added ones hold `unused`."""
    added = values.new_full((values.shape[0], size - values.shape[1]), unused)
    return torch.cat((values, added), dim=1)
