"""Write a comparison's report: report.json with every number, and report.html, a page that needs no network."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.analysis.comparison.formatting import join_names
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.comparison.resolution import resolution_table
from heddle.analysis.pages import experts, sections, summary
from heddle.analysis.pages.abilities import ability_tables, profile_cards
from heddle.analysis.pages.design_styles import design_styles
from heddle.analysis.pages.figures.effects import effect_figures
from heddle.analysis.pages.figures.lengths import length_figure
from heddle.analysis.pages.figures.overview import overview_figures
from heddle.analysis.pages.figures.tuning import tuning_figures
from heddle.analysis.pages.render import render
from heddle.analysis.pages.tuning import tuning_section
from heddle.errors import MachineError
from heddle.storage.atomic import write_file

WRITE_REMEDY = "free some space or choose another folder"
LONG_VERDICT = 160  # characters; a longer first sentence is set in smaller type


def write_report(report: dict[str, Any], folder: Path) -> Path:
    """Write report.json and report.html into a folder, each completely or not at all; return the page's path.

    The same report gives the same bytes. Numbers that are not finite become null. Raises MachineError where the folder
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    write_file(folder / "report.json", report_json(report), WRITE_REMEDY)
    write_file(folder / "report.html", report_page(report), WRITE_REMEDY)
    return folder / "report.html"


def report_json(report: Report) -> str:
    """The text of report.json."""
    return json.dumps(_finite(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same data with None for every number that JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_page(report: Report, revision: int | None = None) -> str:
    """The report as one HTML document.

    revision: of a page that `LivePage` serves, and that asks for newer ones; None for a file, which asks for nothing.
    """
    return render("report.html", **report_context(_finite(report)), plotly=plotly_script(), revision=revision)


def plotly_script() -> str:
    """The source of plotly, about 5 MB."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def report_context(report: Report) -> dict[str, Any]:
    """Everything that the templates show, as plain data: values are formatted, nothing is HTML."""
    verdict = [name_parts(report, sentence) for sentence in report["verdict"] or ["Nothing was compared."]]
    figures = overview_figures(report)
    return {
        "report": report,
        "title": "heddle compare: " + join_names(design["name"] for design in report["designs"]),
        "styles": design_styles(report),
        "verdict": verdict,
        "is_long_verdict": sum(len(text) for text, _ in verdict[0]) > LONG_VERDICT,
        "summary": summary.summary_table(report),
        "resolution": resolution_table(report),
        "overview": sections.overview_cards(report, figures),
        "effects": sections.effect_cards(report),
        "interactions": sections.interaction_tables(report),
        "equal_size": sections.equal_size(report),
        "tuning": tuning_section(report),
        "lengths": sections.length_rows(report),
        "refusals": sections.refusals(report),
        "recall": sections.recall_rows(report),
        "abilities": ability_tables(report),
        "profile": profile_cards(report),
        "experts": experts.expert_cards(report),
        "designs": sections.design_cards(report),
        "methods": sections.difference_methods(report),
        "figures": {**figures, **effect_figures(report), **tuning_figures(report), "lengths": length_figure(report)},
    }


def name_parts(report: Report, sentence: str) -> list[tuple[str, bool]]:
    """A sentence cut into (text, whether it is a design's name)."""
    longest_first = sorted((design["name"] for design in report["designs"]), key=len, reverse=True)
    # a name inside a longer word or name does not count
    pattern = r"(?<![\w-])(" + "|".join(re.escape(name) for name in longest_first) + r")(?![\w-])"
    return [(text, index % 2 == 1) for index, text in enumerate(re.split(pattern, sentence)) if text]
