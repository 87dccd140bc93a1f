"""Limits on the number of layers of a design, and the sentence that refuses more."""

MAX_LAYERS = 4096
MAX_DISTINCT_LAYERS = 128  # each takes about 20 ms to build and measure


def too_many_layers(depth: int) -> str | None:
    """Return why a design of `depth` layers is refused, or None if it is not."""
    count = f"{depth}" if depth < 2**64 else "more than 2^64"
    return f"stands for {count} layers; at most {MAX_LAYERS} are built" if depth > MAX_LAYERS else None
