"""Draws the committed results: added loss over the share of the state, before and after healing, for both designs.

python examples/conversion/figure.py figure.html
"""

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smaller_caches import DESIGNS, HERE, STATE_SHARES

from heddle.lab.pages.figures.svg import Chart, Scale, Series, Value, scaled_lines, symlog_ticks, value_range
from heddle.lab.pages.render import DesignStyle, environment

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


def chart(rows: Iterable[dict[str, Any]], design: str) -> Chart:
    """The chart of one design."""
    series = lines(rows, design)
    y_scale = Scale(-LINEAR / 2, value_range(series)[1], lambda value: math.asinh(value / LINEAR))
    x_scale = Scale(0.1, 1.1, math.log2)
    return Chart(
        label=f"Added bits per byte over the state of {design}",
        x_title="state, relative to the original’s",
        y_title="bits per byte added, stretched around 0",
        x_ticks=[(x_scale.percent(1 / divisor), f"1/{divisor}") for divisor in (2, 4, 8)],
        y_ticks=symlog_ticks(y_scale),
        lines=scaled_lines(series, x_scale, y_scale),
        dotted=[(100 - y_scale.percent(0.0), "the original’s loss")],
    )


def main() -> None:
    """Write the page."""
    rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    titles = {"llama16": "Llama’s shape", "qwen16": "Qwen3’s shape: query-key norms"}
    template = environment().from_string((HERE / "figure.html").read_text(encoding="utf-8"))
    charts = [(titles[design], chart(rows, design)) for design in DESIGNS]
    Path(sys.argv[1]).write_text(template.render(charts=charts), encoding="utf-8")


if __name__ == "__main__":
    main()
