"""Limits on the sizes of a design, and the sentences that refuse more."""

from collections.abc import Iterator
from contextlib import contextmanager

from heddle.errors import ConfigError

MAX_LAYERS = 1024  # more take above two seconds to parse and to compare with families
MAX_DISTINCT_LAYERS = 128  # each takes about 20 ms to build and measure


def too_many_layers(depth: int) -> str | None:
    """Return why a design of `depth` layers is refused, or None if it is not."""
    count = f"{depth}" if depth < 2**64 else "more than 2^64"
    return f"stands for {count} layers; at most {MAX_LAYERS} are built" if depth > MAX_LAYERS else None


@contextmanager
def refuse_overflow() -> Iterator[None]:
    """Turn the error of a meta tensor with more than 2^63 bytes into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(f"design: cannot be built ({error}); choose smaller sizes") from None
