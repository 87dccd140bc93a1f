"""Random choices of the explorer: designs of one layer, of which some are refused."""

import random
from collections.abc import Iterator
from typing import Any

from heddle.lab.explore.choices import Field, kinds_of

WIDTHS = (48, 64, 96)
INTEGERS = {
    "heads": (2, 4, 8), "window": (3, 16, 500), "head_dim": (6, 8, 16), "value_dim": (4, 24), "rotary_dim": (4, 8, 40),
    "kv_rank": (16, 24), "query_rank": (8, 40), "nope_dim": (8, 12), "rope_dim": (4, 6, 8), "experts": (4, 8, 12),
    "top_k": (1, 2, 3), "groups": (1, 2, 4), "top_groups": (1, 2), "hidden": (24, 40), "shared": (1, 2),
    "norms": (1, 2), "buckets": (3, 8, 32), "max_distance": (9, 128), "length": (600, 900), "streams": (2, 4),
    "state_size": (8, 16), "block_size": (1, 2, 3), "altup_streams": (2, 4),
    "compress_ratio": (2, 4, 5, 40), "block": (2, 8, 64), "local": (0, 1, 2), "first": (0, 1),
}  # fmt: skip
TEXT = 96  # tokens


def random_part(draw: random.Random, slot: str, choices: tuple[str, ...], depth: int = 0) -> dict[str, Any]:
    """A part of a slot as plain data."""
    known = {kind.kind: kind for kind in kinds_of(slot)}
    nested = {"pair", "cross_attention"} if depth else set()
    kind = known[draw.choice([name for name in choices if name not in nested])]
    part: dict[str, Any] = {"kind": kind.kind}
    for field in kind.fields:
        required = field.name in kind.first
        if (required and field.default is None) or draw.random() < 0.22:
            part[field.name] = _value(draw, field, depth)
    return part


def _value(draw: random.Random, field: Field, depth: int) -> Any:
    if field.type == "part":
        return random_part(draw, field.slot, field.choices, depth + 1)
    if field.type == "boolean":
        return draw.random() < 0.5
    if field.type == "choice":
        return {"false": False, "true": True}.get(word := draw.choice(field.choices), word)
    if field.type == "integer":
        return draw.choice(INTEGERS.get(field.name, (1, 2, 4, 8)))
    return 0.5 if field.name in {"dropout", "offset", "rotated_share", "eps", "sparsity"} else 4.0


def random_repeat(draw: random.Random) -> dict[str, Any]:
    """One layer, or three with weights of their own or shared ones."""
    repeat = {"repeat": draw.choice((1, 3))}
    return repeat | ({"shared": True} if repeat["repeat"] == 3 and draw.random() < 0.4 else {})


def random_designs(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Designs as plain data: every kind of every slot in turn, the others at random."""
    draw = random.Random(seed)
    kinds = {
        slot: tuple(kind.kind for kind in kinds_of(slot)) for slot in ("mixers", "feedforwards", "residuals", "norms")
    }
    for index in range(count):
        parts = {}
        for slot, choices in kinds.items():
            parts[slot] = random_part(draw, slot, (choices[index % len(choices)],))
        for name in ("drop_path", "drop_path_first", "dropout"):
            parts["residuals"].pop(name, None)
        yield {
            "vocab_size": 50,
            "width": draw.choice(WIDTHS),
            "layers": [random_repeat(draw) | {"mixer": parts["mixers"], "feedforward": parts["feedforwards"]}],
            "residual": parts["residuals"],
            "norm": parts["norms"],
            "embedding": {"position": random_part(draw, "positions", ("learned", "sinusoidal"))},
            "head": {"tied": draw.random() < 0.5, "bias": draw.random() < 0.5},
        }
