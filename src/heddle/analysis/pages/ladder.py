"""Write a ladder's page, ladder.html: one file that needs no network and no script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.analysis.ladder import tables
from heddle.analysis.ladder.verdict import ratios_text
from heddle.analysis.pages.design_styles import design_styles
from heddle.analysis.pages.figures.ladder import cost_chart, size_chart
from heddle.analysis.pages.render import render
from heddle.storage.atomic import write_file

PAGE_FILE = "ladder.html"


def write_ladder_page(report: Mapping[str, Any], folder: Path) -> Path:
    """Write ladder.html into a folder, whole or not at all; return its path. Raises MachineError."""
    write_file(folder / PAGE_FILE, ladder_page(report))
    return folder / PAGE_FILE


def ladder_page(report: Mapping[str, Any]) -> str:
    """The page as one HTML document; the same report gives the same bytes."""
    fit = report["fit"]
    return render(
        "ladder.html",
        report=report,
        title=f"heddle ladder: {', '.join(design['name'] for design in report['designs'])}",
        styles=design_styles(report),
        ratios=ratios_text(report),
        run_count=sum(rung["seeds"] for design in report["designs"] for rung in design["rungs"]),
        charts=[size_chart(report), cost_chart(report)]
        if any(_is_measured(each) for each in report["designs"])
        else [],
        rungs=[(design["name"], tables.rung_table(design)) for design in report["designs"]],
        predictions=tables.prediction_table(report) if report["predictions"] else None,
        best_sizes=tables.best_size_table(report) if report["best_sizes"] else None,
        costs=tables.cost_table(report) if report["equal_loss"] else None,
        held_out=tables.held_out_table(report) if report["held_out"] else None,
        parameters=None if fit is None else tables.fit_table(fit),
        forms=None if fit is None else tables.form_table(fit),
    )


def _is_measured(design: Mapping[str, Any]) -> bool:
    return any(rung["loss"] is not None for rung in design["rungs"])
