"""A comparison's report on disk: report.json with every number, and report.html, one file, no network."""

import json
import math
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from heddle.comparison import wording
from heddle.comparison.figures import figures, styles
from heddle.comparison.recall_section import recall_section
from heddle.comparison.sections import design_section, explanation_section, facts, figure_section
from heddle.comparison.style import CSS, SCRIPT
from heddle.comparison.summary import named, summary_table
from heddle.errors import MachineError

# nothing may be loaded from anywhere, even by a mistake in this page or in plotly
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# three threads each way, over and under in turn
LOGO = (
    '<svg viewBox="0 0 26 26" fill="none" stroke-width="3.4" aria-hidden="true">'
    '<path d="M7 1V10M7 16V25M19 1V10M19 16V25" stroke="var(--series-1)"/>'
    '<path d="M13 1V4M13 10V16M13 22V25" stroke="var(--series-2)"/>'
    '<path d="M1 7H4M10 7H16M22 7H25M1 19H4M10 19H16M22 19H25M1 13H10M16 13H25" stroke="var(--ink)"/></svg>'
)


def write_report(report: dict[str, Any], folder: Path) -> Path:
    """Writes report.json and report.html into `folder`, each whole or not at all; returns the page's path.

    The same report gives the same bytes. Numbers that are not finite become null. Raises MachineError where
    the folder cannot be written.
    """
    clean = _finite(report)
    text = json.dumps(clean, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "report.json", text)
        _write(folder / "report.html", page(clean))
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


def _write(path: Path, text: str) -> None:
    """Temporary name, fsync, rename: a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def page(report: wording.Report) -> str:
    """The whole report as one HTML document."""
    threads = "".join(f'<i style="background:var(--{style[0]})"></i>' for style in styles(report).values())
    body = (
        f'<div class="threads" aria-hidden="true">{threads}</div><div class="wrap">'
        f'<header><div class="brand">{LOGO}<strong>heddle compare</strong>{facts(report)}</div>'
        f"{_verdict(report)}</header>{_warnings(report)}<main>"
        f'<section class="summary card" aria-label="Summary">{summary_table(report)}</section>'
        f"{figure_section(report)}{recall_section(report)}{design_section(report)}{explanation_section(report)}</main>"
        f'<footer class="small">heddle {escape(str(report["heddle"]))}, {escape(str(report["created"]))}. '
        "report.json beside this page holds every number.</footer></div>"
    )
    title = "heddle compare: " + wording.listing(design["name"] for design in report["designs"])
    # inside a script "<" would let a name end it; JSON has another spelling for it
    data = json.dumps(figures(report), separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>{body}\n"
        f'<script type="application/json" id="figure-data">{data}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script></body></html>\n"
    )


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
