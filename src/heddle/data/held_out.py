"""Split the held-out text into two parts: one to choose training fields by, one for the final scores."""

from itertools import pairwise

import numpy as np

from heddle.data.token_file import TokenFile
from heddle.errors import DataError

_MAX_PIECES = 64
_PIECE_WINDOWS = 4  # a piece is at least so many sequence lengths
_PIECES_PER_TUNING_PIECE = 4  # every fourth piece is for tuning
MAX_TUNING_TOKENS, MAX_FINAL_TOKENS = 2**14, 2**16


def split_held_out(text: TokenFile, sequence_length: int, byte_lengths: np.ndarray) -> tuple[TokenFile, TokenFile]:
    """(for tuning, for the final scores): no token is in both.

    The text is cut into pieces of about equal length, if possible where a document begins; every fourth is for tuning.
    Of a long text each piece gives only its beginning. Equal arguments give equal parts.
    byte_lengths: int [vocab], the bytes of each token. Raises DataError for a text that is too short.
    """
    pieces = min(_MAX_PIECES, len(text) // (_PIECE_WINDOWS * sequence_length))
    if pieces < _PIECES_PER_TUNING_PIECE:
        needed = _PIECES_PER_TUNING_PIECE * _PIECE_WINDOWS * sequence_length
        raise DataError(
            f"the held-out text has {len(text)} tokens, and tuning needs {needed} at sequence_length "
            f"{sequence_length}: give more text, or a shorter sequence_length"
        )
    even = [len(text) * piece // pieces for piece in range(pieces + 1)]
    ends = [0, *(_at_document(text, end, len(text) // pieces // 2) for end in even[1:-1]), len(text)]
    spans = list(pairwise(ends))
    is_tuning = [piece % _PIECES_PER_TUNING_PIECE == 1 for piece in range(pieces)]
    parts = []
    for part, limit in ((True, MAX_TUNING_TOKENS), (False, MAX_FINAL_TOKENS)):
        chosen = [span for span, tuning in zip(spans, is_tuning, strict=True) if tuning == part]
        longest = limit // len(chosen) - 1  # an end token may be added
        shortened = [(start, min(stop, start + longest)) for start, stop in chosen]
        parts.append(text.select(shortened, byte_lengths))
    return parts[0], parts[1]


def _at_document(text: TokenFile, position: int, distance: int) -> int:
    """The nearest beginning of a document within a distance of the position; else the position itself."""
    index = int(np.searchsorted(text.offsets, position))
    near = [int(offset) for offset in text.offsets[max(0, index - 1) : index + 1]]
    nearest = min(near, key=lambda offset: abs(offset - position), default=position)
    return nearest if abs(nearest - position) < distance else position
