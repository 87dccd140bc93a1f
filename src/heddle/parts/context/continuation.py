"""Whether a call can follow the tokens of a state: in the document of a row's newest token, or in a later one."""

from typing import NoReturn

from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout


def is_no_continuation(token_counts: Tensor, last_token: Tensor, layout: Layout, arrivals: Tensor) -> Tensor:
    """int64 [B], 1 for a row whose first new token can follow neither in its document nor as a later document.

    token_counts [B] and last_token [B, 2] are those of a position table, arrivals [B, T] of the call's tokens.
    """
    position, segment = _first_tokens(layout, arrivals)
    last_position, last_segment = last_token.unbind(1)
    is_same = segment == last_segment
    is_wrong = (segment < last_segment) | (is_same & (position != last_position + 1))
    return (is_wrong & (arrivals.amax(1) >= 0) & (token_counts > 0)).long()


def refuse_layout(last_token: Tensor, layout: Layout, arrivals: Tensor, is_wrong: Tensor) -> NoReturn:
    """Raise ConfigError that names the first row that is wrong, and its first new token."""
    row = int(is_wrong.argmax())
    position, segment = (int(values[row]) for values in _first_tokens(layout, arrivals))
    last_position, last_segment = last_token[row].tolist()
    is_earlier = segment < last_segment
    name, value, last = ("segment id", segment, last_segment) if is_earlier else ("position", position, last_position)
    raise ConfigError(
        f"layout: {name} {value} in row {row} follows {last}, the state's newest; a call goes on in the document "
        "of that token, at the next position, or begins one with a higher segment id"
    )


def _first_tokens(layout: Layout, arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """Position and segment id [B] of the first new token of each row."""
    first = (arrivals >= 0).int().argmax(1, keepdim=True)
    return layout.positions.gather(1, first)[:, 0], layout.dense_segment_ids.gather(1, first)[:, 0]
