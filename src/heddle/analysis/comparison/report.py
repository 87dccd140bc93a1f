"""A comparison's report on disk: report.json with every number, and report.html, one file, no network."""

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.experts_section import experts_section
from heddle.analysis.comparison.extrapolation_section import extrapolation_figure, extrapolation_section
from heddle.analysis.comparison.figures import figures, styles
from heddle.analysis.comparison.frame import LOGO, document, write_whole
from heddle.analysis.comparison.recall_section import recall_section
from heddle.analysis.comparison.sections import design_section, explanation_section, facts, figure_section
from heddle.analysis.comparison.style import CSS, SCRIPT
from heddle.analysis.comparison.summary import named, summary_table
from heddle.analysis.comparison.variation_section import variation_figures, variation_section
from heddle.errors import MachineError


def write_report(report: dict[str, Any], folder: Path) -> Path:
    """Writes report.json and report.html into `folder`, each whole or not at all; returns the page's path.

    The same report gives the same bytes. Numbers that are not finite become null. Raises MachineError where
    the folder cannot be written.
    """
    clean = _finite(report)
    text = json.dumps(clean, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "report.json", text)
        write_whole(folder / "report.html", page(clean))
    except OSError as error:
        message = f"The report cannot be written to {folder}: {error.strerror}; choose another --out."
        raise MachineError(message) from error
    return folder / "report.html"


def _finite(value: Any) -> Any:
    """The same data with null for every number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page(report: wording.Report) -> str:
    """The whole report as one HTML document."""
    threads = "".join(f'<i style="background:var(--{style[0]})"></i>' for style in styles(report).values())
    body = (
        f'<div class="threads" aria-hidden="true">{threads}</div><div class="wrap">'
        f'<header><div class="brand">{LOGO}<strong>heddle compare</strong>{facts(report)}</div>'
        f"{_verdict(report)}</header>{_warnings(report)}<main>"
        f'<section class="summary card" aria-label="Summary">{summary_table(report)}</section>'
        f"{variation_section(report)}{figure_section(report)}{extrapolation_section(report)}{recall_section(report)}"
        f"{experts_section(report)}{design_section(report)}{explanation_section(report)}</main>"
        f'<footer class="small">heddle {escape(str(report["heddle"]))}, {escape(str(report["created"]))}. '
        "report.json beside this page holds every number.</footer></div>"
    )
    title = "heddle compare: " + wording.listing(design["name"] for design in report["designs"])
    # inside a script "<" would let a name end it; JSON has another spelling for it
    drawn = {**figures(report), **variation_figures(report), "extrapolation": extrapolation_figure(report)}
    data = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="figure-data">{data}</script>',
        f"<script>{get_plotlyjs()}</script>",
        f"<script>{SCRIPT}</script>",
    )
    return document(title, CSS, body, scripts)


def _verdict(report: wording.Report) -> str:
    first, *others = report["verdict"] or ["Nothing was compared."]
    rest = "".join(f'<p class="verdict">{named(report, sentence)}</p>' for sentence in others)
    look = ' class="long"' if len(first) > 160 else ""
    return f"<h1{look}>{named(report, first)}</h1>{rest}"


def _warnings(report: wording.Report) -> str:
    if not report["warnings"]:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in report["warnings"])
    return f'<aside class="warnings"><h2>Mind when reading</h2><ul>{items}</ul></aside>'
