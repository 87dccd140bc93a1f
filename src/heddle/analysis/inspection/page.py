"""The page of `heddle inspect`: every head's weights in one file that loads nothing, and a table without scripts."""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from heddle.analysis.comparison.frame import LOGO, document
from heddle.analysis.comparison.style import CSS
from heddle.analysis.comparison.wording import MISSING, context_name, scaled, size
from heddle.analysis.inspection.collect import LONG, View
from heddle.analysis.inspection.style import EXTRA_CSS, SCRIPT

WORDS = (
    (
        "Weight",
        "How much of what a head reads for one token comes from another. A row of a map is the token that reads, a "
        "column the token that is read. The weights of a row sum to 1, with a sink to less. Darker is more (in the "
        "dark look brighter), on a scale of square roots, so that small weights show; numbers are up to 0.004 off.",
    ),
    (
        "Grey corners",
        "What a head cannot see: later tokens, or tokens beyond its window. They are not small weights.",
    ),
    (
        "Group",
        "Heads under one line read the same keys and values, so only one pair is kept for all of them.",
    ),
    (
        "Latent",
        "Keys and values are kept as one short vector a token and made again for each head.",
    ),
    (
        "Sink",
        "A learned weight that a head may give to no token at all.",
    ),
    (
        "State",
        "What the layer keeps in memory between tokens, for one text. A window's state stops growing.",
    ),
    (
        "What a map does not say",
        "Weights are not explanations: values may be small or cancel, and other layers move what was read.",
    ),
)


@dataclass(frozen=True)
class Subject:
    """Whose heads on what: the model's name, its parameters, the text's tokens as words, the version of heddle."""

    name: str
    parameters: int
    words: Sequence[str]
    version: str


def page(subject: Subject, views: Sequence[View]) -> str:
    """The whole page as one HTML document; the same input gives the same bytes."""
    heads = sum(view.maps.heads for view in views if view.maps is not None)
    facts = [
        f"{len(views)} layers",
        f"{heads} heads",
        f"{scaled(subject.parameters)} parameters",
        f"{len(subject.words)} tokens",
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    threads = "".join(f'<i style="background:var(--series-{number})"></i>' for number in (1, 2, 0))
    body = (
        f'<div class="threads" aria-hidden="true">{threads}</div><div class="wrap">'
        f'<header><div class="brand">{LOGO}<strong>heddle inspect</strong><ul class="facts">{items}</ul></div>'
        f"<h1>What {heads} heads of {escape(subject.name)} look at</h1></header><main>"
        f"{_text(subject.words)}{_maps()}{_table(views, len(subject.words))}{_words()}</main>"
        f'<footer class="small">heddle {escape(subject.version)}. Weights are exact before they are rounded here; '
        "the model ran its fast kernels beside them.</footer></div>"
    )
    data = json.dumps(_data(subject, views), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="weights">{data}</script>',
        f"<script>{SCRIPT}</script>",
    )
    return document(f"heddle inspect: {subject.name}", CSS + EXTRA_CSS, body, scripts)


def _text(words: Sequence[str]) -> str:
    pieces = "".join(
        f'<span class="token" data-token="{i}">{escape(visible(word))}</span>' for i, word in enumerate(words)
    )
    return f'<section class="card passage"><h2>The text, token by token</h2><p class="tokens">{pieces}</p></section>'


def visible(word: str) -> str:
    """A token as it is shown: line ends and tabs get a sign, and so do spaces alone and an empty token."""
    bare = word if word.strip() else word.replace(" ", "·")
    shown = bare.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    return shown if shown else "∅"


def _maps() -> str:
    return (
        '<section><h2>Every head</h2><noscript><p class="small">The maps need JavaScript; the table follows.</p>'
        '</noscript><p class="small needs-script" hidden>A square is a head: its rows read, its columns are read. '
        'Press one to see it large. <span id="ramp"></span></p><div class="maps" id="maps"></div></section>'
        '<dialog id="large" aria-labelledby="large-title"><div class="head"><div><h3 id="large-title"></h3>'
        '<p class="small" id="large-facts"></p></div><div class="turn">'
        '<button type="button" id="before">← head</button><button type="button" id="after">head →</button>'
        '<button type="button" id="close" aria-label="Close">✕</button></div></div>'
        '<div class="sides"><canvas id="matrix"></canvas><div><p id="pair" aria-live="polite"></p>'
        '<p class="tokens" id="shaded"></p><p class="small">Press a token to see what it looks at; the arrow keys go '
        "to another head or layer.</p></div></div></dialog>"
    )


def _table(views: Sequence[View], length: int) -> str:
    """The layers in numbers, readable without scripts."""
    names = ("layer", "heads", "groups", "sees", "looks back", "itself", "first token", "no token")
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    states = "".join(f'<th scope="col">state at {context_name(n)}</th>' for n in (length, LONG))
    rows = []
    for index, view in enumerate(views):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(view))
        what = f"{index}<small>{escape(view.mixer)}</small>"
        rows.append(f'<tr><th scope="row">{what}</th>{cells}</tr>')
    note = "Means over a layer's heads and all tokens but the first, which can look at nothing else."
    return (
        f'<section class="card layers"><h2>Layer by layer</h2><p class="small">{note}</p><div class="scroll">'
        f'<table class="data"><thead><tr>{heads}{states}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        "</div></section>"
    )


def _cells(view: View) -> list[str]:
    state = [MISSING] * 2 if view.state is None else [size(bytes_) for bytes_ in view.state]
    maps = view.maps
    if maps is None:
        return [MISSING, MISSING, view.sees, *[MISSING] * 4, *state]
    return [
        str(maps.heads),
        view.latent or str(maps.groups),
        view.sees,
        MISSING if maps.distance is None else f"{maps.distance:.1f} tokens",
        MISSING if maps.itself is None else f"{maps.itself:.0%}",
        f"{maps.first:.0%}",
        f"{maps.sink:.0%}" if maps.sink > 1e-6 else MISSING,
        *state,
    ]


def _words() -> str:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in WORDS)
    return f'<div class="lists"><section class="card"><h2>In plain words</h2><dl>{terms}</dl></section></div>'


def _data(subject: Subject, views: Sequence[View]) -> dict[str, Any]:
    """What the script draws: weights as bytes, deflated, in base64."""
    layers = []
    for view in views:
        layer: dict[str, Any] = {"kind": view.mixer.split(" ")[0], "sees": view.sees, "latent": view.latent}
        if view.maps is not None:
            packed = base64.b64encode(zlib.compress(view.maps.codes, 9)).decode("ascii")
            layer |= {"heads": view.maps.heads, "groups": view.maps.groups, "keys": view.maps.keys, "codes": packed}
            layer |= {"reach": view.reach, "causal": view.causal}
        layers.append(layer)
    return {"tokens": [visible(word) for word in subject.words], "layers": layers}
