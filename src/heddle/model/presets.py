"""Presets: named designs as plain data, `preset:KIND-SIZE`.

Sizes: tiny (1–2 M parameters), small (≈ 15 M), medium (≈ 100 M). Kinds differ in their mixers only.
"""

from difflib import get_close_matches
from typing import Any, NamedTuple

from heddle.errors import ConfigError


class Size(NamedTuple):
    """The sizes that every kind of a preset shares."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int | None  # None: the tokenizer's
    window: int


SIZES = {
    "tiny": Size(width=128, depth=6, heads=4, kv_heads=2, hidden=352, vocab_size=None, window=64),
    "small": Size(width=384, depth=6, heads=6, kv_heads=2, hidden=1024, vocab_size=8192, window=128),
    "medium": Size(width=768, depth=12, heads=12, kv_heads=4, hidden=2048, vocab_size=32000, window=256),
}

KINDS = {
    "mha": "every head has its own keys and values",
    "gqa": "groups of heads share keys and values",
    "mqa": "all heads share one pair of keys and values",
    "local_global": "five layers see a window, one sees everything",
}


def names() -> list[str]:
    """All presets."""
    return [f"{kind}-{size}" for kind in KINDS for size in SIZES]


def preset(name: str) -> dict[str, Any]:
    """The plain data of a preset. Raises ConfigError for an unknown name, with the nearest one."""
    kind, _, size_name = name.rpartition("-")
    if kind not in KINDS or size_name not in SIZES:
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean 'preset:{near[0]}'? " if near else ""
        raise ConfigError(f"preset:{name}: unknown preset; {hint}choices: {', '.join(names())}")
    size = SIZES[size_name]
    design: dict[str, Any] = {} if size.vocab_size is None else {"vocab_size": size.vocab_size}
    return design | {
        "width": size.width,
        "norm": {"kind": "rms"},
        "residual": {"kind": "pre_norm"},
        "layers": _layers(kind, size),
        "head": {"tied": True},
    }


def _layers(kind: str, size: Size) -> list[dict[str, Any]]:
    groups = {"mha": size.heads, "mqa": 1}.get(kind, size.kv_heads)
    mixer = {"kind": "attention", "heads": size.heads, "kv_heads": groups, "position": {"kind": "rope"}}
    full = {"mixer": mixer, "feedforward": {"kind": "gated", "hidden": size.hidden}}
    if kind != "local_global":
        return [{"repeat": size.depth, **full}]
    local = {**full, "mixer": {**mixer, "window": size.window}}
    return [{"repeat": size.depth // 6, "layers": [{"repeat": 5, **local}, full]}]
