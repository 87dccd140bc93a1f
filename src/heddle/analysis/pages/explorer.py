"""The explorer: choose kinds and options, and see what follows, as one HTML document."""

import re
from dataclasses import asdict
from functools import cache
from html import escape
from importlib import import_module
from typing import Any

from markupsafe import Markup

from heddle.analysis.explorer.choices import SLOTS, kinds_of, model_fields
from heddle.analysis.explorer.formulas import formulas_of, model_formulas
from heddle.analysis.explorer.mistakes import MISTAKES
from heddle.analysis.explorer.published import explorer_design, published_designs
from heddle.analysis.pages.formulas import DIAGRAM, pieces_of
from heddle.analysis.pages.render import render
from heddle.model.config import ModelConfig
from heddle.model.limits import MAX_DISTINCT_LAYERS
from heddle.parts.positions.learned import LearnedConfig

BLOCK = re.compile(r"\n\s*\n")
CODE = re.compile(r"`([^`]+)`")


def explorer_page(slot: str | None = None, config: ModelConfig | None = None) -> str:
    """The page of a slot, or of a whole design; the same input gives the same bytes.

    config: the design that it shows at first. Formulas are typeset where latex2mathml is installed.
    """
    slots = {name: kinds_of(name) for name in SLOTS}
    pages = list(SLOTS) if slot is None else [slot]
    kinds = [kind for name in pages for kind in slots[name]]
    start = _start() if config is None else explorer_design(config) | {"tokens": _context(config), "bytes": 2}
    if slot == "positions" and config is None:
        start["layers"][0]["mixer"]["position"] = {"kind": "rope"}
    if slot == "scalings" and config is None:
        yarn = next(kind.first for kind in kinds_of("scalings") if kind.kind == "yarn")
        start["layers"][0]["mixer"]["position"] = {"kind": "rope", "scaling": dict(yarn)}
        start["tokens"] = 32768
    subject = "a whole design" if slot is None else f"the {SLOTS[slot]} of a layer"
    return render(
        "explorer.html",
        title="heddle explore" + ("" if slot is None else f": {slot}"),
        subject=subject,
        heading=f"What follows from the choice of {'a design' if slot is None else SLOTS[slot]}",
        kind_count=len(kinds),
        data={
            "slots": {name: [_kind_data(kind) for kind in each] for name, each in slots.items()},
            "pages": pages,
            "whole": slot is None,
            "about": {name: {kind.kind: docstring_html(kind.source) for kind in slots[name]} for name in pages},
            "fields": {place: list(map(asdict, fields)) for place, fields in model_fields().items()},
            "most_layers": MAX_DISTINCT_LAYERS,
            "models": published_designs(),
            "mistakes": [asdict(mistake) for mistake in MISTAKES],
            "start": {"slot": pages[0], "layer": 0, "design": start},
        },
        formulas=Markup(_script()),
    )


@cache
def _script() -> str:
    """The formulas of all kinds as a JavaScript object."""
    entries = []
    for slot in SLOTS:
        formulas = ((kind.kind, formulas_of(slot, kind.kind)) for kind in kinds_of(slot))
        kinds = ",".join(f"{name}:{'null' if each is None else each.script()}" for name, each in formulas)
        entries.append(f"{slot}:{{{kinds}}}")
    return f"{{{','.join(entries)},model:{model_formulas().script()}}}"


def _kind_data(kind: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(kind).items() if key not in ("source", "slot")}


def _context(config: ModelConfig) -> int:
    """The tokens that the page shows at first: 4096, or the learned positions where there are fewer."""
    position = config.embedding.position
    return min(4096, position.length) if isinstance(position, LearnedConfig) else 4096


def _start() -> dict[str, Any]:
    """A small design."""
    mixer = next(kind.first for kind in kinds_of("mixers") if kind.kind == "attention")
    return {
        "vocab_size": 32000,
        "width": 512,
        "tokens": 4096,
        "bytes": 2,
        "layers": [{"count": 8, "mixer": dict(mixer), "feedforward": {"kind": "gated", "hidden": 1536}}],
        "residual": {"kind": "pre_norm"},
        "norm": {"kind": "rms"},
        "embedding": {},
        "head": {"tied": True},
    }


@cache
def docstring_html(source: str) -> str:
    """A docstring as HTML, with its formulas as MathML."""
    return "".join(_block(block) for block in BLOCK.split(source) if block.strip())


def _block(block: str) -> str:
    plain = escape(block, quote=False)
    drawn = DIAGRAM.search(block) is not None
    if not drawn and not block.startswith("    "):
        return "<p>" + CODE.sub(r"<code>\1</code>", plain) + "</p>"
    lines = None if drawn else _typeset(block)
    if lines is None:
        return f"<pre>{plain}</pre>"
    return f'<div class="formula">{"".join(f"<div>{line}</div>" for line in lines)}</div>'


def _typeset(block: str) -> list[str] | None:
    """The lines of a formula as HTML; None where it is no formula, or where nothing can typeset it."""
    lines = pieces_of(block)
    if lines is None:
        return None
    try:
        convert = import_module("latex2mathml.converter").convert
    except ImportError:
        return None
    return [
        "".join(convert(piece.text) if piece.is_formula else f"<span>{escape(piece.text)}</span>" for piece in line)
        for line in lines
    ]
