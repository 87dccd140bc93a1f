"""The report's summary table as HTML: one row a design, its interval drawn against the baseline's zero."""

import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.figures import styles
from heddle.analysis.comparison.trades import recalled

DASH_ARRAYS = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}
# marker: corners, turn in degrees, how far the inner corners of a star lie from the middle
SHAPES = {
    "square": (4, 45, 1.0),
    "diamond": (4, 0, 1.0),
    "triangle-up": (3, 0, 1.0),
    "triangle-down": (3, 180, 1.0),
    "pentagon": (5, 0, 1.0),
    "hexagon": (6, 0, 1.0),
    "star": (10, 0, 0.45),
}


def swatch(style: tuple[str, str, str]) -> str:
    """A design's line and marker as a small picture."""
    colour, dash, marker = style
    dashes = f' stroke-dasharray="{DASH_ARRAYS[dash]}"' if DASH_ARRAYS[dash] else ""
    line = f'<path d="M0 8H34" stroke="var(--{colour})" stroke-width="2.5"{dashes}/>'
    if marker == "circle":
        shape = f'<circle cx="17" cy="8" r="5" fill="var(--{colour})"/>'
    else:
        corners, turn, inner = SHAPES[marker]
        places = []
        for corner in range(corners):
            angle = math.radians(turn - 90 + 360 * corner / corners)
            radius = 6.5 * (inner if corner % 2 and inner < 1 else 1)
            places.append(f"{17 + radius * math.cos(angle):.1f},{8 + radius * math.sin(angle):.1f}")
        shape = f'<polygon points="{" ".join(places)}" fill="var(--{colour})"/>'
    return f'<svg class="swatch" viewBox="0 0 34 16" aria-hidden="true">{line}{shape}</svg>'


def named(report: wording.Report, sentence: str) -> str:
    """A sentence as HTML in which every design's name is underlined in its colour."""
    chosen = styles(report)
    longest = sorted((design["name"] for design in report["designs"]), key=len, reverse=True)
    # a name inside a longer word or name is not that design
    pattern = r"(?<![\w-])(" + "|".join(re.escape(name) for name in longest) + r")(?![\w-])"
    made = []
    for place, piece in enumerate(re.split(pattern, sentence)):
        text = escape(piece)
        if place % 2:
            short = " short" if len(piece) < 30 else ""
            text = f'<span class="name{short}" style="--own:var(--{chosen[piece][0]})">{text}</span>'
        made.append(text)
    return "".join(made)


def costs(report: wording.Report) -> list[tuple[str, wording.Writer, dict[str, float | None]]]:
    """What the designs cost: (title, how to write it, value by design's name)."""
    designs = report["designs"]
    made: list[tuple[str, wording.Writer, dict[str, float | None]]] = [
        ("Training", wording.rate, {row["name"]: row["train_tokens_per_second"] for row in designs}),
        ("Peak memory", wording.size, {row["name"]: row["peak_memory_bytes"] for row in designs}),
    ]
    for title, key, write in (("State", "state_bytes", wording.size), ("Decode", "decode", wording.rate)):
        context = wording.shared_context(designs, key)
        place = "" if context is None else f" at {wording.context_name(context)}"
        made.append((title + place, write, {row["name"]: wording.at(row[key], context) for row in designs}))
    return made


def summary_table(report: wording.Report) -> str:
    """The table, lowest bits per byte first; it needs no script."""
    alone = len(report["designs"]) == 1
    spent = costs(report)
    heads = ['<th class="design-name">Design</th>', '<th class="loss">Bits per byte<small>less is better</small></th>']
    if not alone:
        ends = '<div class="ends"><span>← better</span><span>worse →</span></div>'
        heads.append(f'<th class="scale">{ends}</th>')
        heads.append(f"<th>Difference<small>to {escape(report['baseline'])}</small></th>")
    probes = list(report["recall"].items())[:1]
    for _, probe in probes:
        heads.append(
            f'<th class="cost">Recall, {probe["title"]}<small>blindly {wording.percent(probe["chance"])}</small></th>'
        )
    for title, write, _ in spent:
        aim = "less" if write is wording.size else "more"
        heads.append(f'<th class="cost">{title}<small>{aim} is better</small></th>')
    row_heads = "".join(heads).replace("<th", '<th scope="col" role="columnheader"')
    reach = _reach(report)
    rows = []
    for design in wording.ranked(report):
        colour = styles(report)[design["name"]][0]
        difference = "" if alone else _difference(report, design, reach)
        recall = "".join(_recall(design, name, probe) for name, probe in probes)
        bars = "".join(_cost(title, write, values, design["name"]) for title, write, values in spent)
        cells = _who(report, design) + _loss(design) + difference + recall + bars
        rows.append(f'<tr role="row" style="--own:var(--{colour})">{cells}</tr>')
    return (
        f'<table role="table" aria-label="Designs, lowest bits per byte first"><thead role="rowgroup">'
        f'<tr role="row">{row_heads}</tr></thead><tbody role="rowgroup">{"".join(rows)}</tbody></table>'
    )


def _reach(report: wording.Report) -> float:
    """The largest difference, with its interval, that the scale must hold on either side of zero."""
    ends = [abs(row[key]) for row in report["differences"] for key in ("mean", "low", "high") if row[key] is not None]
    return max(ends, default=0.0) * 1.08 or 1.0


def _who(report: wording.Report, design: wording.Design) -> str:
    size = wording.scaled(design["parameters"])
    note = f"{size} parameters"
    if design["active_parameters"] not in (None, design["parameters"]):
        note += f", {wording.scaled(design['active_parameters'])} active"
    picture = swatch(styles(report)[design["name"]])
    name = escape(design["name"])
    return (
        f'<th scope="row" role="rowheader"><div class="who">{picture}'
        f"<div><b>{name}</b><small>{note}</small></div></div></th>"
    )


def _loss(design: wording.Design) -> str:
    mean, half = wording.mean_of(design), wording.half_width(design["bits_per_byte"])
    over = (design["bits_per_byte"] or {}).get("over", "")
    note = f"± {half:.3f}, {over}" if half is not None else over
    number = f'<span class="big">{wording.bits(mean)}</span>'
    return f'<td role="cell" data-label="Bits per byte">{number}<small>{escape(note)}</small></td>'


def _difference(report: wording.Report, design: wording.Design, reach: float) -> str:
    if design["name"] == report["baseline"]:
        dot = "" if wording.mean_of(design) is None else _whisker(0.0, None, reach, True)
        return _scale(dot) + ('<td role="cell"><span class="word open">baseline</span></td>')
    row = wording.difference_of(report, design["name"])
    word = wording.judgement(row)
    # one seed is no firm word: it looks like the others that are not
    look = word if word in ("better", "worse") else "open"
    picture, method = "", ""
    if row is not None:
        method = f' title="{escape(row["method"])}"'
        if row["mean"] is not None:
            picture = _whisker(row["mean"], wording.half_width(row), reach, look != "open")
    number, base = wording.signed(row), escape(report["baseline"])
    return (
        f'{_scale(picture)}<td role="cell"{method} data-label="Difference to {base}">'
        f'<span class="figure-number">{number}</span><br><span class="word {look}">{word}</span></td>'
    )


def _scale(picture: str) -> str:
    return f'<td role="cell" class="scale" data-label="← better · worse →">{picture}</td>'


def _whisker(mean: float, half: float | None, reach: float, filled: bool) -> str:
    """A dot with its interval; the dot is filled where the difference is resolved over several seeds."""

    def place(value: float) -> str:
        return f"{50 + 50 * value / reach:.2f}%"

    dot = "var(--own)" if filled else "var(--card)"
    parts = []
    if half:
        low, high = place(mean - half), place(mean + half)
        parts.append(f'<line x1="{low}" x2="{high}" y1="13" y2="13"/>')
        parts += [f'<line x1="{end}" x2="{end}" y1="8" y2="18"/>' for end in (low, high)]
    parts.append(f'<circle cx="{place(mean)}" cy="13" r="6" fill="{dot}"/>')
    shapes = "".join(parts)
    return f'<svg class="whisker" aria-hidden="true" stroke="var(--own)" stroke-width="2.5">{shapes}</svg>'


def _recall(design: wording.Design, name: str, probe: Mapping[str, Any]) -> str:
    """The share of right answers, its bar to 100 %, and a line where picking blindly would be."""
    value = recalled(design, name)
    bar = ""
    if value is not None:
        marks = f"--part:{100 * value:.1f}%;--blind:{100 * probe['chance']:.1f}%"
        bar = f'<span class="bar blind" style="{marks}"><i></i></span>'
    number = f'<span class="figure-number">{wording.percent(value)}</span>'
    return f'<td role="cell" class="cost" data-label="Recall, {probe["title"]}">{number}{bar}</td>'


def _cost(title: str, write: wording.Writer, values: Mapping[str, float | None], name: str) -> str:
    value = values[name]
    largest = max((other for other in values.values() if other is not None), default=0.0)
    number = f'<span class="figure-number">{write(value)}</span>'
    bar = ""
    if value is not None and largest:
        bar = f'<span class="bar"><i style="--part:{100 * value / largest:.1f}%"></i></span>'
    return f'<td role="cell" class="cost" data-label="{title}">{number}{bar}</td>'
