"""Addresses of the explorer that somebody else wrote: markup, names of prototypes, absurd numbers, and what is no data.

A value that got through would set `window.RAN`, or be found in the page by its mark.
"""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

MARK = "RAN"
IMAGE = f'"><img src=x onerror=window.{MARK}=1>'
LARGEST = 2**31 - 1  # of heddle's integers

# What stands where something else belongs. Each is wrong in every place.
VALUES: dict[str, Any] = {
    "image": IMAGE,
    "script": f"</script><script>window.{MARK}=1</script>",
    "picture": f"<svg onload=window.{MARK}=1>",
    "quotes": f"' onfocus=window.{MARK}=1 autofocus x='",
    "address": f"javascript:window.{MARK}=1",
    "template": f"${{window.{MARK}=1}}",
    "entities": f"&lt;img src=x onerror=window.{MARK}=1&gt;",
    "plotly": f"%{{{MARK}}}<b>",
    "right to left": f"\u202e\u2066{MARK}\u2069\u200f",
    "null byte": f"\x00{MARK}",
    "huge string": MARK * 100_000,
    "list": [IMAGE],
    "list of lists": [[[IMAGE]]],
    "object": {"kind": IMAGE, IMAGE: IMAGE},
    "object with methods": {"toString": IMAGE, "valueOf": IMAGE, "toJSON": IMAGE, "length": 10**9, "0": IMAGE},
    "prototype": {"__proto__": {"kind": IMAGE}, "constructor": {"prototype": {"kind": IMAGE}}},
    "name of a prototype": "__proto__",
    "name of a constructor": "constructor",
    "name of a method": "hasOwnProperty",
    "negative": -1,
    "number as a string": "8",
}

# Places of a value, as paths from the whole choice.
PLACES: tuple[tuple[str | int, ...], ...] = (
    ("slot",), ("layer",), ("design",), ("pinned",), ("pinned", "width"), ("pinned", "layers", 0, "mixer", "kind"),
    *(("design", name) for name in ("width", "vocab_size", "tokens", "bytes", "layers", "residual", "norm")),
    *(("design", "residual", name) for name in ("kind", "multiplier", "streams")),
    *(("design", "norm", name) for name in ("kind", "eps", "bias", "cast")),
    *(("design", "layers", 0, name) for name in ("count", "mixer", "feedforward")), ("design", "layers", 0),
    *(("design", "layers", 0, "mixer", name) for name in ("kind", "heads", "window", "bias", "position", "norm")),
    *(("design", "layers", 0, "mixer", "position", name) for name in ("kind", "base", "layout", "scaling", "inv_freq")),
    *(("design", "layers", 0, "mixer", "position", "scaling", name) for name in ("kind", "factor", "short_factor")),
    *(("design", "layers", 0, "feedforward", name) for name in ("kind", "hidden", "activation")),
    *(("design", "embedding", name) for name in ("position", "token_types", "norm")),
    *(("design", "embedding", "position", name) for name in ("kind", "length")),
    *(("design", "head", name) for name in ("tied", "softcap", "transform")),
)  # fmt: skip


def at(place: tuple[str | int, ...], value: Any) -> str:
    """A choice that is the value in this place, and right elsewhere, as JSON."""
    position = {"kind": "rope", "scaling": {"kind": "yarn", "factor": 8.0, "original_length": 1024}}
    layer = {"count": 2, "mixer": {"kind": "attention", "heads": 8, "position": position}}
    learned = {"position": {"kind": "learned", "length": 8192}}
    design = {"width": 512, "layers": [layer], "residual": {"kind": "pre_norm"}, "norm": {"kind": "rms"}}
    design |= {"embedding": learned, "head": {"tied": True}, "vocab_size": 1000, "tokens": 4096, "bytes": 2}
    choice: dict[str, Any] = {"slot": "mixers", "layer": 0, "design": design, "pinned": {"layers": [{"mixer": {}}]}}
    inner: Any = choice
    for name in place[:-1]:
        inner = inner[name] if isinstance(name, int) else inner.setdefault(name, {})
    inner[place[-1]] = value
    return json.dumps(choice)


def mixer(**fields: Any) -> dict[str, Any]:
    """A choice of a mixer."""
    return {"design": {"layers": [{"count": 1, "mixer": fields}]}}


def nested(depth: int) -> dict[str, Any]:
    """A mixer of two mixers, and so on."""
    part: dict[str, Any] = {"kind": "attention", "heads": 8}
    for _ in range(depth):
        part = {"kind": "pair", "first": part, "second": {"kind": "attention", "heads": 8}}
    return mixer(**part)


def rope(**fields: Any) -> dict[str, Any]:
    """A choice of attention with a rotation."""
    return mixer(kind="attention", heads=8, position={"kind": "rope"} | fields)


def addresses() -> Iterator[tuple[str, str]]:
    """(name, what follows the page in its address) of whole addresses."""
    texts = {
        "half an escape": "%", "broken escapes": "%E0%A4%A", "a surrogate": "%ED%A0%80", "half an object": "%7B",
        "null": "null", "true": "true", "a number": "1e999", "a string": '"x"', "a list": "[]", "nothing": "{}",
        "a script": f"<script>window.{MARK}=1</script>", "an address": f"javascript:window.{MARK}=1",
        "escaped twice": "%257B%2522slot%2522%253A1%257D", "a mark of byte order": "\ufeff{}", "a null byte": "%00",
        "a long text": "x" * 500_000, "many lists": "%5B" * 20_000, "a doubled key": '{"slot":1,"slot":"mixers"}',
        "infinite numbers": '{"layer":1e999,"design":{"width":1e999,"tokens":-1e999,"layers":[{"count":1e999}]}}',
        "a prototype": '{"__proto__":{"slot":"x"},"design":{"__proto__":{"width":7},"constructor":1}}',
    }  # fmt: skip
    yield from ((name, text if "%" in text else quote(text)) for name, text in texts.items())
    choices = {
        "parts within parts": nested(200),
        "very many layers": {"design": {"layers": [{}] * 50_000}},
        "numbers without bound": rope(base=1e300, rotary_dim=10**300) | {"layer": 1e300},
        "a layer that is not there": {"layer": 10**6},
        "an empty part": mixer(),
        "no part": {"design": {"layers": [None, 3, "x", [IMAGE]]}},
        "the widest heads": mixer(kind="attention", heads=LARGEST, head_dim=LARGEST, position={"kind": "rope"}),
        "the widest rotation": rope(rotary_dim=LARGEST),
        "the steepest rotation": rope(base=1.7e308),
        "the flattest rotation": rope(base=5e-324),
        "the strongest scaling": rope(scaling={"kind": "linear", "factor": 1.7e308}),
        "the farthest bucket": mixer(
            kind="attention", heads=8, position={"kind": "relative_bias", "buckets": LARGEST, "max_distance": LARGEST}
        ),
        "the largest design": {
            "design": {
                "width": 2**20, "vocab_size": LARGEST, "tokens": 2**53 - 1,
                "layers": [
                    {
                        "count": LARGEST, "mixer": {"kind": "attention", "heads": 1, "head_dim": LARGEST - 1},
                        "feedforward": {
                            "kind": "moe", "experts": LARGEST, "top_k": LARGEST, "hidden": LARGEST, "shared": LARGEST
                        },
                    }
                ],
            }
        },
        "a million streams": {"design": {"residual": {"kind": "hyper_connections", "streams": 10**6}}},
        "no decays": mixer(kind="retention", heads=8, decay=[]),
        "refused and pinned": {"pinned": {"layers": [{"mixer": {"kind": "attention", "heads": 7}}]}},
    }  # fmt: skip
    yield from ((name, quote(json.dumps(choice))) for name, choice in choices.items())
    yield from ((f"{name} as a width", quote(at(("design", "width"), value))) for name, value in VALUES.items())
