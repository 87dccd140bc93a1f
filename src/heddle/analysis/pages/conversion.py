"""Write a conversion's page, convert.html: one file that needs no network and no script."""

from pathlib import Path
from typing import Any

from heddle.analysis.conversion.results import CONVERTED, ConversionResults
from heddle.analysis.conversion.verdict import TOLERANCE, conversion_verdict
from heddle.analysis.pages import conversion_tables as tables
from heddle.analysis.pages.conversion_summary import model_styles, summary_rows
from heddle.analysis.pages.figures.conversion import decode_chart, layer_chart, position_chart, sweep_chart
from heddle.analysis.pages.render import render
from heddle.storage.atomic import write_file

PAGE_FILE = "convert.html"
REMEDY = "free some space or choose another folder"


def write_conversion_page(results: ConversionResults, folder: Path) -> Path:
    """Write convert.html into a folder, whole or not at all; return its path. Raises MachineError."""
    write_file(folder / PAGE_FILE, conversion_page(results), REMEDY)
    return folder / PAGE_FILE


def conversion_page(results: ConversionResults) -> str:
    """The page as one HTML document; the same results give the same bytes."""
    return render("conversion.html", **page_context(results))


def page_context(results: ConversionResults) -> dict[str, Any]:
    """Everything that the template shows, as plain data: values are formatted, nothing is HTML."""
    conversions = [model for model in results.models if model.stage == CONVERTED]
    has_recall = bool(results.original.needles)
    return {
        "results": results,
        "text": results.text,
        "title": f"heddle convert: {results.source or results.original.name}",
        "styles": model_styles(results),
        "verdict": conversion_verdict(results),
        "tolerance": f"{100 * TOLERANCE:g} %",
        "conversion_count": len(conversions),
        "summary": summary_rows(results),
        "sweep": sweep_chart(results),
        "sweep_table": tables.sweep_table(results),
        "positions": position_chart(results),
        "position_table": tables.position_table(results),
        "layers": layer_chart(results),
        "layer_tables": tables.layer_tables(results),
        "copying": tables.copying_table(results) if has_recall else None,
        "needles": tables.needle_table(results) if has_recall else None,
        "decode": decode_chart(results),
        "costs": tables.cost_tables(results),
        "speeds": tables.speed_tables(results),
    }
