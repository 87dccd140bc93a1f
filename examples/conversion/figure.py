"""Draws the committed results: added loss over the share of the state, before and after healing, for both designs.

python examples/conversion/figure.py figure.html
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smaller_caches import DESIGNS, HERE, STATE_SHARES

from heddle.lab.pages.conversion import stretch, stretched, stretched_axis
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure, log_range, value_range
from heddle.lab.pages.render import DesignStyle, environment, plotly_script

COUNTS = (8, 4, 2)
BUDGETS = [f"latent_attention,state_budget={share}%" for share in STATE_SHARES]
STYLES = {
    "contiguous, mean": DesignStyle("series-3", "dash", "square"),
    "default grouping": DesignStyle("series-1", "dash", "circle"),
    "latent attention": DesignStyle("series-2", "dash", "diamond"),
}
LINEAR = 0.02  # bits per byte; above, the scale is logarithmic
EXACT = {"stage": "converted", "state": 1.0, "added": 0.0, "least": 0.0, "most": 0.0}


def targets(method: str, stage: str) -> list[str]:
    """The conversions of one line. The default grouping is named in full before healing, by its count after."""
    if method == "latent attention":
        return BUDGETS
    if method == "default grouping":
        full = ",groups=similar-outputs,merge=least-squares" if stage == "converted" else ""
        return [f"kv_heads={count}{full}" for count in COUNTS]
    return [f"kv_heads={count},groups=contiguous,merge=mean" for count in COUNTS]


def lines(rows: Iterable[dict[str, Any]], design: str) -> list[Series]:
    """Added loss over the state, a line for each method and stage; bars reach from the best model to the worst."""
    by_target = {(row["target"], row["stage"]): row for row in rows if row["design"] == design}
    series = []
    for method, style in STYLES.items():
        for stage in ("converted", "healed"):
            points = [by_target[target, stage] for target in targets(method, stage) if (target, stage) in by_target]
            values = [Value(row["state"], row["added"], row["least"], row["most"]) for row in (EXACT, *points)]
            if points:
                drawn = DesignStyle(style.color, "dash" if stage == "converted" else "solid", style.marker)
                several = len(points) > 1
                values = values if several else values[1:]
                series.append(Series(f"{method}, {stage}", drawn, values, several, filled=stage == "healed"))
    return series


def chart(rows: Iterable[dict[str, Any]], design: str) -> Figure:
    """The figure of one design."""
    series = lines(rows, design)
    shares = {f"1/{divisor}": 1 / divisor for divisor in (8, 4, 2)} | {"all": 1.0}
    x_axis = axis("state, relative to the original’s") | {"type": "log", "range": log_range(0.1, 1.1)}
    x_axis |= {"tickvals": list(shares.values()), "ticktext": list(shares), "showgrid": False}
    y_axis = stretched_axis(-LINEAR / 2, 1.3 * value_range(series)[1], LINEAR)
    dotted = [(stretch(0.0, LINEAR), "the original’s loss")]
    return line_figure(stretched(series, LINEAR), x_axis, y_axis, dotted)


def main(file: Path) -> None:
    """Write the page."""
    rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    titles = {"llama16": "Llama’s shape", "qwen16": "Qwen3’s shape: query-key norms"}
    template = environment().from_string((HERE / "figure.html").read_text(encoding="utf-8"))
    figures = {design: chart(rows, design) for design in DESIGNS}
    page = template.render(titles=titles, figures=figures, plotly=plotly_script(), title="Smaller caches")
    file.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", type=Path)
    main(parser.parse_args().file)
