"""The charts of where the loss lies: over the position of a token, and over how frequent it is."""

from collections.abc import Sequence

from heddle.analysis.comparison.formatting import format_bits, format_difference, half_width, judgment
from heddle.analysis.comparison.lookup import Design, Report
from heddle.analysis.pages.design_styles import design_styles
from heddle.analysis.pages.figures.svg import Chart, Scale, Series, Value, line_chart

MAX_LINES = 8  # more lines are told by the table alone


def profile_chart(report: Report, name: str, labels: Sequence[str], x_title: str) -> Chart | None:
    """The difference to the baseline in each group, with its interval; with one design its bits per byte.

    name: "positions" or "frequencies". None where nothing was measured, or for too many designs.
    """
    designs = [design for design in report["designs"] if (design.get("loss_profile") or {}).get(name)]
    compares = len(report["designs"]) > 1
    shown = [design for design in designs if not compares or design["name"] != report["baseline"]]
    styles = design_styles(report)
    series = [
        Series(design["name"], styles[design["name"]], _values(design, name, labels, compares)) for design in shown
    ]
    series = [line for line in series if line.values]
    if not series or len(series) > MAX_LINES:
        return None
    x_scale = Scale(0, len(labels))
    ticks = [(100 * (index + 0.5) / len(labels), label) for index, label in enumerate(labels)]
    dotted = [(0.0, report["baseline"])] if compares else []
    y_title = f"bits per byte, difference to {report['baseline']}" if compares else "bits per byte"
    return line_chart(series, x_scale, ticks, (x_title, y_title), dotted=dotted)


def _values(design: Design, name: str, labels: Sequence[str], compares: bool) -> list[Value]:
    values = []
    for index, (row, label) in enumerate(zip(design["loss_profile"][name], labels, strict=True)):
        loss, difference = row["bits_per_byte"], row["difference"]
        title = f"{design['name']}, {label}: {format_bits(loss)} bits per byte"
        if compares and difference["mean"] is not None:
            half = half_width(difference) or 0.0
            title += f", {format_difference(difference)}, {judgment(difference)}"
            mean = difference["mean"]
            values.append(Value(index + 0.5, mean, mean - half, mean + half, title))
        elif not compares and loss is not None:
            values.append(Value(index + 0.5, loss, title=title))
    return values
