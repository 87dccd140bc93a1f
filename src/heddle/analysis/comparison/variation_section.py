"""The report's section on what varied: a figure and a row a value for each field, tables of two, and equal sizes."""

import html
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.figures import Figure, axis, design_line, plain_layout
from heddle.analysis.comparison.sections import data_table

Field = Mapping[str, Any]
EQUAL = {
    "parameters": ("parameters", "parameters"),
    "active-parameters": ("active_parameters", "parameters that a token meets"),
    "flops": ("flops_per_token", "forward FLOPs a token"),
}
BEYOND = (
    "Mean bits per byte of each pair of values, more coloured where it is lower. Below it, what both together do "
    "beyond the sum of what each does alone, beside the baseline's values: where it is resolved, one field cannot be "
    "chosen without the other."
)
DEEPEST = 45  # percent of colour at which text is still easy to read
SPREAD = 8  # from the least number to the greatest, beyond which their axis is logarithmic


def variation_figures(report: wording.Report) -> dict[str, Figure | None]:
    """Bits per byte over each varied field, by the names of their places."""
    return {f"varied-{place}": _figure(report, field) for place, field in enumerate(report["varied"]["fields"])}


def variation_section(report: wording.Report) -> str:
    """Nothing where nothing was varied or made equal."""
    cards = [_field_card(report, place, field) for place, field in enumerate(report["varied"]["fields"])]
    cards += [_interaction_card(table) for table in report["varied"]["interactions"]]
    equal = _equal(report)
    if not cards:
        return equal
    return f'<section><h2>What varied</h2><div class="grid">{"".join(cards)}</div></section>{equal}'


def _plain(words: str) -> str:
    """Words for plotly, which reads tags and %{…} in them."""
    return html.escape(words).replace("%{", "% {")


def centre(field: Field, value: Mapping[str, Any]) -> float | None:
    """Where a value is drawn: by its paired difference from the baseline's, so that its interval is right."""
    base = next(one["mean"] for one in field["values"] if one["label"] == field["baseline"])
    difference = value["difference"]
    if base is None or difference is None or difference["mean"] is None:
        return None if value["mean"] is None else float(value["mean"])
    return float(base + difference["mean"])


def _figure(report: wording.Report, field: Field) -> Figure | None:
    known = [value for value in field["values"] if centre(field, value) is not None]
    if not known:
        return None
    upright = all(value["number"] is not None for value in known)
    if upright:
        known = sorted(known, key=lambda value: value["number"])
    means = _places(known, [centre(field, value) for value in known], upright)
    data: list[Figure] = []
    if upright:
        line = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        data.append(line | {"line": {"color": "soft", "width": 1.5}, **means})
    shared = any(len(value["designs"]) > 1 for value in known)
    designs = {design["name"]: design for design in report["designs"]}
    for value in known:
        for design in (designs[name] for name in value["designs"]):
            mean = wording.mean_of(design)
            if mean is not None:
                dot = design_line(report, design, [(0.0, mean)], [f"{wording.bits(mean)} bits per byte"])
                dot["marker"] |= {"size": 9, "opacity": 0.5} if shared else {"size": 13}
                data.append(dot | {"mode": "markers"} | _places([value], [mean], upright))
    data.append(_bars(known, upright, shared) | means)
    layout = plain_layout(*_axes(field, known, upright))
    anchor = next((centre(field, value) for value in known if value["label"] == field["baseline"]), None)
    layout["shapes"] = [] if anchor is None else [_level(anchor, upright)]
    return {"data": data, "layout": layout}


def _places(values: Sequence[Mapping[str, Any]], means: Sequence[float | None], upright: bool) -> dict[str, Any]:
    """Numbers run along x with bits per byte above them; other values stand below each other."""
    if upright:
        return {"x": [value["number"] for value in values], "y": list(means)}
    return {"x": list(means), "y": [_plain(value["label"]) for value in values]}


def _bars(values: Sequence[Mapping[str, Any]], upright: bool, shared: bool) -> Figure:
    """The values' means with the intervals of their differences; without a mark of their own where a design is one."""
    halves = [wording.half_width(value["difference"]) or 0.0 for value in values]
    bar = {"type": "data", "array": halves, "color": "series-0", "thickness": 1.75, "width": 5}
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {
            "color": "series-0" if shared else "clear",
            "symbol": "line-ew" if upright else "line-ns",
            "size": 22,
        }
        | {"line": {"color": "series-0" if shared else "clear", "width": 3}},
        "error_y" if upright else "error_x": bar,
        "text": [_spoken(value) for value in values],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


def _spoken(value: Mapping[str, Any]) -> str:
    words = f"<b>{_plain(value['label'])}</b><br>{wording.bits(value['mean'])} bits per byte"
    if value["difference"] is None:
        return words
    return f"{words}<br>{wording.signed(value['difference'])}, {wording.judgement(value['difference'])}"


def _axes(field: Field, values: Sequence[Mapping[str, Any]], upright: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    loss, own = axis("bits per byte"), axis(_plain(field["title"]))
    if not upright:
        return loss, own | {"type": "category", "autorange": "reversed"}
    numbers = [value["number"] for value in values]
    wide = numbers[0] > 0 and numbers[-1] >= SPREAD * numbers[0]
    marks = {"tickvals": numbers, "ticktext": [_plain(value["label"]) for value in values]}
    return own | marks | {"type": "log" if wide else "linear"}, loss


def _level(anchor: float, upright: bool) -> dict[str, Any]:
    """The baseline's line."""
    line = {"type": "line", "line": {"color": "series-0", "width": 1.25, "dash": "dot"}}
    if upright:
        return line | {"xref": "paper", "x0": 0, "x1": 1, "y0": anchor, "y1": anchor}
    return line | {"yref": "paper", "y0": 0, "y1": 1, "x0": anchor, "x1": anchor}


def _field_card(report: wording.Report, place: int, field: Field) -> str:
    base, title = field["baseline"], escape(field["title"])
    most = max(len(value["designs"]) for value in field["values"])
    over = f"The mean of the {most} designs with each value. " if most > 1 else ""
    caption = f"{over}A bar is the interval of the difference to {base}; not resolved where it crosses the line."
    rows = []
    for value in field["values"]:
        is_base = value["label"] == base
        told = (
            ["", "baseline"]
            if is_base
            else [wording.signed(value["difference"]), wording.judgement(value["difference"])]
        )
        rows.append([value["label"], wording.bits(value["mean"]), *told])
    without = '<noscript><p class="small">The figure needs JavaScript; its numbers follow.</p></noscript>'
    plot = f'<div class="plot needs-script" id="plot-varied-{place}" role="img" aria-label="{title}" hidden></div>'
    if all(value["mean"] is None for value in field["values"]):
        plot, without = '<p class="empty">Nothing was measured for this figure.</p>', ""
    # one sentence for all values where they were measured alike
    methods = dict.fromkeys(value["difference"]["method"] for value in field["values"] if value["difference"])
    notes = "".join(f'<p class="small">{escape(method)}</p>' for method in methods)
    head = f'<figcaption><div><h3>{title}</h3></div><p class="small">{escape(caption)}</p></figcaption>'
    heads = [field["title"], "bits per byte", f"difference to {base}", ""]
    table = data_table(heads, rows, f"Bits per byte by {field['title']}")
    return f'<figure class="card">{head}{plot}{without}{table}{notes}</figure>'


def _interaction_card(table: Mapping[str, Any]) -> str:
    first, second = table["titles"]
    cells = {tuple(cell["values"]): cell for cell in table["cells"]}
    columns = list(dict.fromkeys(label for _, label in cells))
    means = [cell["mean"] for cell in cells.values() if cell["mean"] is not None]
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in columns)
    rows = []
    for label in dict.fromkeys(label for label, _ in cells):
        row = "".join(_interaction_cell(cells[label, column], means) for column in columns)
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{row}</tr>')
    name = f"{escape(first)} and {escape(second)}"
    return (
        f'<div class="card recall"><h3>{name}</h3><p class="small">{BEYOND}</p><div class="scroll">'
        f'<table class="data heat" aria-label="Bits per byte by {name}"><thead><tr><th scope="col">'
        f"{escape(first)} ↓ {escape(second)} →</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _interaction_cell(cell: Mapping[str, Any], means: Sequence[float]) -> str:
    """The deeper the lower, and beyond the sum of both: its interval and whether it is resolved."""
    depth = 0.0
    if cell["mean"] is not None and max(means) > min(means):
        depth = (max(means) - cell["mean"]) / (max(means) - min(means))
    note = ""
    beyond = cell["beyond"]
    if beyond is not None:
        word = "resolved" if beyond["resolved"] else "not resolved"
        note = f"<small>{wording.signed(beyond)}<br>{word if beyond['mean'] is not None else 'not measured'}</small>"
    return f'<td style="--heat:{DEEPEST * depth:.0f}%">{wording.bits(cell["mean"])}{note}</td>'


def equal_rows(report: wording.Report) -> tuple[str, list[list[str]]]:
    """What was made equal, in words, and of each design its name, width, size, and how far from the baseline's."""
    key, words = EQUAL[report["equal"]]
    base = next(design for design in report["designs"] if design["name"] == report["baseline"])
    rows = []
    for design in report["designs"]:
        given, trained = design["width"]["given"], design["width"]["trained"]
        width = str(trained) if given == trained else f"{given} → {trained}"
        apart = "baseline" if design is base else f"{design[key] / base[key] - 1:+.1%}".replace("-", "−")
        rows.append([design["name"], width, wording.scaled(design[key]), apart])
    return words, rows


def _equal(report: wording.Report) -> str:
    if not report["equal"]:
        return ""
    words, rows = equal_rows(report)
    told = (
        f"Every design was given the width at which it has as many {words} as {report['baseline']}, and hidden in "
        "proportion; where heads allow too few widths, hidden alone makes up for what is left."
    )
    table = data_table(["design", "width", words, "apart"], rows, "Widths of equal size")
    card = f'<div class="card recall"><p class="small">{escape(told)}</p>{table}</div>'
    return f"<section><h2>Equal size</h2>{card}</section>"
