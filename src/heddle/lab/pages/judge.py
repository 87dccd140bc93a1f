"""A judge's page, judge.html: the lineage of incumbents, the stream of proposals, and what was refused."""

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.lab.compare.tables import TextTable, format_signed
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure
from heddle.lab.pages.render import DesignStyle, design_styles, render_figures

PAGE_FILE = "judge.html"
VERDICTS = {"better": "accepted", "no clear difference": "no clear difference", "worse": "worse"}


def judge_page(summary: Mapping[str, Any]) -> str:
    """The page of what `judge("show")` returns, as one HTML document; the same summary gives the same bytes."""
    verdicts = summary["proposals"]
    judged = [verdict for verdict in verdicts if verdict.get("improvement", {}).get("mean") is not None]
    styles = design_styles(list(VERDICTS.values()), "accepted")
    figures = {}
    if judged:
        figures["stream"] = stream_figure(judged, styles)
    if any(verdict["incumbent"] for verdict in judged):
        figures["lineage"] = lineage_figure(judged, styles["accepted"])
    return render_figures(
        "judge.html",
        figures,
        title=f"heddle judge: {summary['incumbent']}",
        summary=summary,
        lineage=lineage_table(summary["first"], judged),
        stream=stream_table(verdicts),
        refused=TextTable(
            ["proposal", "rule", "smallest case"],
            [[_name(each), each["rule"], each["case"]] for each in verdicts if each["verdict"] == "refused"],
        ),
        removed=_removed(summary["final"]),
    )


def stream_figure(judged: Sequence[Mapping[str, Any]], styles: Mapping[str, DesignStyle]) -> Figure:
    """The improvement of each judged proposal over the incumbent of its time."""
    series = []
    for name, title in VERDICTS.items():
        values = [_value(verdict, 0.0) for verdict in judged if verdict["verdict"] == name]
        # apart, as an interval of no width would be drawn as a line
        parts = [[value for value in values if (value.low is None) == is_open] for is_open in (False, True)]
        for label, part in zip((title, ""), sorted(parts, key=len, reverse=True), strict=True):
            series.append(Series(label, styles[title], part, has_line=False, filled=name == "better"))
    return line_figure(series, _numbers(judged), axis("improvement, bits per byte"), [(0.0, "the incumbent")])


def lineage_figure(judged: Sequence[Mapping[str, Any]], style: DesignStyle) -> Figure:
    """The sum of the accepted improvements; an interval is only of the last step."""
    total, values = 0.0, [Value(0, 0.0, title="the first incumbent")]
    for verdict in judged:
        if verdict["incumbent"]:
            lead = {"mean": verdict["lead"], "low": None, "high": None} if "lead" in verdict else None
            values.append(_value(verdict | {"improvement": lead or verdict["improvement"]}, total))
            total += verdict.get("lead", verdict["improvement"]["mean"])
    return line_figure([Series("", style, values)], _numbers(judged), axis("improvement in all, bits per byte"))


def _numbers(judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The axis of proposals: whole numbers."""
    return axis("proposal") | ({"dtick": 1} if judged[-1]["number"] <= 12 else {})


def _value(verdict: Mapping[str, Any], before: float) -> Value:
    improvement = verdict["improvement"]
    low, high = (None if improvement[end] is None else before + improvement[end] for end in ("low", "high"))
    return Value(verdict["number"], before + improvement["mean"], low, high, verdict["sentence"])


def lineage_table(first: str, judged: Sequence[Mapping[str, Any]]) -> TextTable:
    """The incumbents in their order."""
    rows = [["0", first, "", "", "", ""]]
    rows += [
        [
            str(each["number"]), each["name"], _amount(each["improvement"]), str(each["pairs"]),
            "leads" if "lead" in each else f"{each['evidence']:.3g} of {each['needed']:.3g}",
            "; ".join(map(_size, each["sizes"])),
        ]
        for each in judged
        if each["incumbent"]
    ]  # fmt: skip
    return TextTable(["number", "incumbent", "improvement", "pairs", "evidence", "seen at"], rows)


def stream_table(verdicts: Sequence[Mapping[str, Any]]) -> TextTable:
    """Every proposal, newest first."""
    rows = [
        [
            _name(each), each["verdict"].replace(" ", "\N{NO-BREAK SPACE}"), str(each["against"]),
            _amount(each.get("improvement")), str(each.get("pairs", "")),
            f"{each['evidence']:.3g}" if "evidence" in each else "",
        ]
        for each in reversed(verdicts)
    ]  # fmt: skip
    return TextTable(["proposal", "verdict", "against", "improvement", "pairs", "evidence"], rows)


def _removed(final: Mapping[str, Any] | None) -> TextTable | None:
    """What the last incumbent loses without each change, on the sealed text."""
    if final is None:
        return None
    rows = [
        [f"{number} {each['name']}", each.get("reason") or _amount(each)] for number, each in final["removed"].items()
    ]
    return TextTable(["without", "loss"], rows)


def _name(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['number']} {verdict['name']}"


def _amount(improvement: Mapping[str, Any] | None) -> str:
    if improvement is None or improvement["mean"] is None:
        return ""
    mean, low, high = (_signed(improvement[name]) for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})" if low and high else mean


def _signed(value: float | None) -> str:
    return "" if value is None else format_signed(value, 4)


def _size(size: Mapping[str, Any]) -> str:
    parameters = "a trainer's own size" if size["parameters"] is None else f"{size['parameters']:,} parameters"
    return f"{parameters}, {size['tokens']:,} tokens"
