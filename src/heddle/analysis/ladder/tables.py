"""Rows and columns that the terminal and the page of a ladder share: rungs, predictions, fits, the self-test."""

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.analysis.comparison.formatting import NO_VALUE, format_bits, format_number, format_percent
from heddle.analysis.comparison.tables import TextTable
from heddle.analysis.ladder.verdict import format_interval

Report = Mapping[str, Any]


def rung_table(design: Mapping[str, Any]) -> TextTable:
    """A row for each size of a design."""
    rows = []
    for rung in design["rungs"]:
        half = None if rung["interval"] is None else (rung["interval"][1] - rung["interval"][0]) / 2
        loss = format_bits(rung["loss"]) + ("" if half is None else f" ± {half:.3f}")
        rows.append(
            [
                format_number(rung["parameters"]),
                str(rung["width"]),
                format_number(rung["tokens"]),
                f"{rung['training_flops']:.2e}",
                f"{rung['learning_rate']:.2g}",
                f"{rung['seeds']} of {len(rung['runs'])}",
                loss,
            ]
        )
    header = ["parameters", "width", "tokens", "training FLOPs", "rate", "seeds", "bits per byte"]
    return TextTable(header, rows, f"Sizes of {design['name']}")


def prediction_table(report: Report) -> TextTable:
    """A row for each design: the loss at the target, its intervals, and what each form of the fit says."""
    predictions = report["predictions"]
    forms = list(dict.fromkeys(form["form"] for each in predictions for form in each["forms"]))
    rows = []
    for each in predictions:
        by_form = {form["form"]: format_bits(form["loss"]) for form in each["forms"]}
        intervals = [NO_VALUE if each[key] is None else format_interval(each[key]) for key in ("curve", "measurement")]
        rows.append([each["design"], format_bits(each["loss"]), *intervals, *(by_form.get(f, NO_VALUE) for f in forms)])
    header = ["design", "predicted", "of the curve", "of a measurement", *forms]
    tokens = f" and {format_number(report['target_tokens'])} tokens" if report["law"] == "L(N, D)" else ""
    return TextTable(header, rows, f"Bits per byte at {format_number(report['target'])} parameters{tokens}")


def best_size_table(report: Report) -> TextTable:
    """A row for each design: the size with the least loss for the budget, its tokens and its loss."""
    rows = []
    for each in report["best_sizes"]:
        low = f"under {format_number(each['least'])}" if each["low"] is None else format_number(each["low"])
        high = f"over {format_number(each['most'])}" if each["high"] is None else format_number(each["high"])
        ratio = None if each["size"] is None else each["tokens"] / each["size"]
        numbers = [format_number(value) for value in (each["tokens"], ratio)]
        ends = NO_VALUE if each["reason"] else f"{low} to {high}"
        rows.append([each["design"], format_number(each["size"]), ends, *numbers, format_bits(each["loss"])])
    header = ["design", "best size", "95 % interval", "tokens", "per parameter", "bits per byte"]
    return TextTable(header, rows, f"The best size for {report['target_flops']:.2e} training FLOPs, 6·N·D")


def cost_table(report: Report) -> TextTable:
    """A row for each other design: the FLOPs for the loss of the baseline at the target."""
    rows = []
    for each in report["equal_loss"]:
        ends = ["no lower end" if each["low"] is None else f"{each['low']:.2f}"]
        ends.append("no upper end" if each["high"] is None else f"{each['high']:.2f}")
        ratio = NO_VALUE if each["ratio"] is None else f"{each['ratio']:.2f} ×"
        rows.append([each["design"], ratio, " to ".join(ends)])
    title = f"the FLOPs of {report['baseline']} for its loss at {format_number(report['target'])} parameters"
    return TextTable(["design", title, "95 % interval"], rows, "Cost of equal loss")


def fit_table(fit: Mapping[str, Any]) -> TextTable:
    """A row for each design: E and γ of the power law with E; of L(N, D) E, α, β and the power of the budget."""
    rows = [[name, *map(_parameter, values.values())] for name, values in fit["parameters"].items()]
    names = ["γ"] if len(rows[0]) == 3 else ["α", "β", "best N grows with C to the power of"]
    return TextTable(["design", "E, bits per byte", *names], rows, "The power law with E")


def form_table(fit: Mapping[str, Any]) -> TextTable:
    """A row for each form: its share of the draws, how far points lie from its curve, its degrees of freedom."""
    rows = []
    for form in fit["forms"]:
        deviation = f"{100 * form['deviation']:.2f} %"
        name = form["form"] + _designs_of(form, fit)
        rows.append([name, format_percent(form["weight"]), deviation, str(form["degrees_of_freedom"])])
    return TextTable(["form", "share", "points off the curve by", "degrees of freedom"], rows, "Forms of the fit")


def _designs_of(form: Mapping[str, Any], fit: Mapping[str, Any]) -> str:
    """The design that a form was fitted to, where each has its own."""
    names = list(form["coefficients"])
    return "" if len(names) == len(fit["parameters"]) else f" ({', '.join(names)})"


def held_out_table(report: Report) -> TextTable:
    """A row for each design: its largest size, predicted from the smaller ones, and measured."""
    rows = [
        [
            test["design"],
            format_number(test["size"]),
            format_bits(test["loss"]),
            format_interval(test["measurement"]),
            format_bits(test["measured"]),
            "within" if test["within"] else "outside",
        ]
        for test in report["held_out"]
    ]
    header = ["design", "largest size", "predicted", "95 % interval", "measured", ""]
    return TextTable(header, rows, "The largest size, predicted from the others")


def _parameter(values: Sequence[float] | None) -> str:
    return NO_VALUE if values is None else f"{values[0]:.3f} ({values[1]:.3f} to {values[2]:.3f})"
