"""What a layout may be: which tensors fit each other, which values they hold, and the static facts that follow.

In each row, padding aside: the tokens of a document stand together, their positions go on by one from any first
position, and segment ids never fall. So every mixer reads the same documents, whether it compares segment ids (softmax)
or starts anew where they change (recurrences).
"""

from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from heddle.errors import ConfigError

MAX_POSITION = 2**30  # of positions and segment ids: a state stores them as int32


class LayoutFacts(NamedTuple):
    """The facts of a layout that kernels are chosen by; see `Layout` for what each means."""

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
        raise ConfigError(f"layout: coordinates are {coordinates.dtype}; expected whole or floating-point numbers")
    for name, ids in (("positions", positions), ("segment_ids", segment_ids)):
        if ids is not None and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
            raise ConfigError(f"layout: {name} are {ids.dtype}; expected whole numbers, int64")
    for name, tensor in (("segment_ids", segment_ids), ("coordinates", coordinates)):
        if tensor is not None and tensor.device != positions.device:
            raise ConfigError(f"layout: {name} are on {tensor.device}, positions on {positions.device}; move one")


def layout_facts(positions: Tensor, segment_ids: Tensor | None) -> LayoutFacts:
    """The facts of positions and segment_ids int [B, T]. Both are copied to the host, in one device sync.

    Raises ConfigError that names the first token which no layout can have.
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
    """Raises ConfigError for numbers that are no position or no segment id."""
    is_wrong = (position < -1) | (position > MAX_POSITION)
    if is_wrong.any():
        _refuse(is_wrong, position, "position {value}", f"a position is from 0 to {MAX_POSITION}, and −1 is padding")
    is_wrong = is_token & ((segment < 0) | (segment > MAX_POSITION))
    if is_wrong.any():
        _refuse(is_wrong, segment, "segment id {value}", f"segment ids are from 0 to {MAX_POSITION}")


def _check_order(position: np.ndarray, segment: np.ndarray, is_token: np.ndarray) -> np.ndarray:
    """bool [B, T], True at a token that continues the document of the token before it.

    Raises ConfigError if a document comes back, or its positions do not go on by one.
    """
    index = np.where(is_token, np.arange(position.shape[1]), -1)
    newest = np.maximum.accumulate(index, axis=1) if position.size else index
    previous = np.concatenate((np.full_like(newest[:, :1], -1), newest[:, :-1]), axis=1)  # token before; −1: none
    column = np.maximum(previous, 0)
    last_position, last_segment = (np.take_along_axis(values, column, 1) for values in (position, segment))
    has_previous = is_token & (previous >= 0)
    is_wrong = has_previous & (segment < last_segment)
    if is_wrong.any():
        remedy = "the tokens of a document stand together, and the next document has a higher segment id"
        _refuse(is_wrong, segment, "segment id {value} follows {last}", remedy, last_segment)
    continues: np.ndarray = has_previous & (segment == last_segment)
    is_wrong = continues & (position != last_position + 1)
    if is_wrong.any():
        remedy = "positions of a document go on by one; give segment_ids to mark where a document ends"
        _refuse(is_wrong, position, "position {value} follows {last}", remedy, last_position)
    return continues


def _refuse(
    is_wrong: np.ndarray, values: np.ndarray, what: str, remedy: str, last: np.ndarray | None = None
) -> NoReturn:
    row, token = (int(index[0]) for index in np.nonzero(is_wrong))
    text = what.format(value=int(values[row, token]), last=None if last is None else int(last[row, token]))
    raise ConfigError(f"layout: {text} at token {token} of row {row}; {remedy}")
