"""The report's section on longer texts: bits per byte over the length read, and what a rising line means."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from itertools import takewhile
from typing import Any

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.figures import Figure, axis, design_line, plain_layout, styles
from heddle.analysis.comparison.summary import swatch

Row = Mapping[str, Any]  # a design at one multiple

CAPTION = (
    "The same text for every point. A bar is the 95 % interval of the change from the trained length, the upright line."
)
METHOD = (
    "Each trained model reads the same {stretches} of held-out text, of {length} tokens each ({documents}), "
    "cut into pieces of {context} tokens as in training, and again into longer pieces. A piece is read from position 0 "
    "and knows nothing of what stands before it. So the longer the pieces, the more of the text before it a token can "
    "see; nothing else differs. These are the longest documents, so the numbers are not those of the table above."
)
MEANINGS = (
    (
        "A falling line",
        "longer texts help the design. A little even where it looks back no further than in training: fewer tokens "
        "stand at the beginning of a piece, with next to nothing before them. A line that falls further than that of "
        "a small window uses what lies further back.",
    ),
    ("A level line", "what it gains by that it loses again, or there is nothing to gain."),
    (
        "A rising line",
        "it gets lost: at places, distances or amounts of text that training never showed it, it guesses worse than "
        "with less text.",
    ),
    ("A line that ends in a cross", "the design refuses the next length, or gives no finite number for it."),
)


def extrapolation_figure(report: wording.Report) -> Figure | None:
    """Bits per byte over the length of the pieces, a line a design; None where nothing was measured."""
    asked = report["extrapolation"]
    data: list[Figure] = []
    for design in report["designs"]:
        rows = list(takewhile(lambda row: row["bits_per_byte"] is not None, design["extrapolation"]))
        if rows:
            data.append(_line(report, design, rows))
            data += [_end(data[-1], after) for after in design["extrapolation"][len(rows) :][:1]]
    if not data:
        return None
    context, marks = asked["context"], [asked["context"] * multiple for multiple in asked["multiples"]]
    words = [f"{wording.context_name(mark)}<br>{mark // context} ×" for mark in marks]
    # half a doubling of room on either side
    spread = [marks[0] / 2**0.5, marks[-1] * 2**0.5]
    layout = plain_layout(axis("tokens of a piece, and times the trained context"), axis("bits per byte"))
    layout["xaxis"] |= {"type": "log", "tickvals": marks, "ticktext": words, "range": _logs(spread)}
    line = {"color": "soft", "width": 1.25, "dash": "dot"}
    layout["shapes"] = [{"type": "line", "yref": "paper", "x0": context, "x1": context, "y0": 0, "y1": 1, "line": line}]
    place = {"x": _logs([context])[0], "yref": "paper", "y": 1, "xanchor": "left", "yanchor": "top", "xshift": 4}
    layout["annotations"] = [place | {"text": "trained", "showarrow": False, "font": {"color": "soft", "size": 12}}]
    return {"data": data, "layout": layout}


def _logs(values: Iterable[float]) -> list[float]:
    return [math.log10(value) for value in values]


def _line(report: wording.Report, design: wording.Design, rows: list[Row]) -> Figure:
    """The means; from the first on by their changes, so that a seed that gave no number moves no point."""
    context, first = report["extrapolation"]["context"], rows[0]["bits_per_byte"]
    points, words, halves = [], [], []
    for row in rows:
        change = row["change"]
        moved = row["bits_per_byte"] if change is None or change["mean"] is None else first + change["mean"]
        points.append((row["multiple"] * context, moved))
        words.append(f"{wording.bits(moved)} bits per byte in pieces of {row['multiple'] * context}{_spoken(row)}")
        halves.append(wording.half_width(change) or 0.0)
    line = design_line(report, design, points, words)
    bar = {"type": "data", "array": halves, "color": line["line"]["color"], "thickness": 1.5, "width": 4}
    return line | {"error_y": bar}


def _spoken(row: Row) -> str:
    if row["change"] is None:
        return ""
    lost = f", {row['not_finite']} seeds not finite" if row["not_finite"] else ""
    return f"<br>{wording.signed(row['change'])}, {wording.judgement(row['change'])}{lost}"


def _end(line: Figure, row: Row) -> Figure:
    """A cross on a line's last point, which says why there is no next."""
    cross = {"color": line["marker"]["color"], "symbol": "x", "size": 11}
    text = f"at {row['multiple']} × {wording.lacking(row)}"
    end = {key: value for key, value in line.items() if key != "error_y"}
    return end | {"mode": "markers", "x": line["x"][-1:], "y": line["y"][-1:], "marker": cross, "text": [text]}


def extrapolation_section(report: wording.Report) -> str:
    """Nothing where it was not asked for or the text is too short, of which the explanations tell."""
    asked = report["extrapolation"]
    if not asked["multiples"]:
        return ""
    many = asked["documents"]
    method = METHOD.format(
        stretches=f"{asked['stretches']} stretch{'es' * (asked['stretches'] > 1)}",
        length=asked["context"] * asked["multiples"][-1],
        documents=f"of {many} documents" if many > 1 else "all of one document",
        context=asked["context"],
    )
    note = f" Not as long as asked for: {asked['note']}." if asked["note"] else ""
    meanings = "".join(f"<dt>{term}</dt><dd>{escape(text)}</dd>" for term, text in MEANINGS)
    title = "Bits per byte over the length of the text"
    plot = '<div class="plot needs-script" id="plot-extrapolation" role="img" aria-label="Longer texts" hidden></div>'
    without = '<noscript><p class="small">The figure needs JavaScript; its numbers follow.</p></noscript>'
    return (
        '<section><h2>Longer texts than in training</h2><div class="grid">'
        f'<figure class="card"><figcaption><div><h3>{title}</h3></div><p class="small">{CAPTION}</p></figcaption>'
        f"{plot}{without}</figure>"
        f'<div class="card longer"><dl>{meanings}</dl><p class="small">{escape(method + note)}</p></div>'
        f'<div class="card longer whole">{_table(report)}{_refusals(report)}</div></div></section>'
    )


def _table(report: wording.Report) -> str:
    asked = report["extrapolation"]
    heads = "".join(
        f'<th scope="col">{multiple} ×<small>{"change" if multiple > 1 else "bits per byte"}</small></th>'
        for multiple in asked["multiples"]
    )
    rows = []
    for design in report["designs"]:
        cells = "".join(f"<td>{_cell(row)}</td>" for row in design["extrapolation"])
        picture = swatch(styles(report)[design["name"]])
        name = f'<div class="who">{picture}{escape(design["name"])}</div>'
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table class="data" aria-label="Change of bits per byte by design and length"><thead>'
        f'<tr><th scope="col">design</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(row: Row) -> str:
    change = row["change"]
    if row["bits_per_byte"] is None:
        return wording.lacking(row)
    if change is None:
        return wording.bits(row["bits_per_byte"])
    lost = f", {row['not_finite']} not finite" if row["not_finite"] else ""
    return (
        f'<span title="{escape(change["method"])}">{wording.signed(change)}</span>'
        f"<br><small>{wording.judgement(change)}{lost}</small>"
    )


def _refusals(report: wording.Report) -> str:
    """Each design's first refusal, in its own words."""
    items = []
    for design in report["designs"]:
        row = next((row for row in design["extrapolation"] if row["refusal"] is not None), None)
        if row is not None:
            said = f"{design['name']} refuses {row['multiple']} ×: {row['refusal']}."
            items.append(f'<p class="small">{escape(said)}</p>')
    return "".join(items)
