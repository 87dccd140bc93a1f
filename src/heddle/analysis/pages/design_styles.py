"""The color, line and marker by which all figures and tables of a page show a design."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COLOR_COUNT = 6
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "pentagon", "triangle-down", "star", "hexagon")
DASH_ARRAYS = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4"}  # of SVG
# of each marker: corners, rotation in degrees, radius of every second corner relative to the others
MARKER_SHAPES = {
    "square": (4, 45, 1.0),
    "diamond": (4, 0, 1.0),
    "triangle-up": (3, 0, 1.0),
    "triangle-down": (3, 180, 1.0),
    "pentagon": (5, 0, 1.0),
    "hexagon": (6, 0, 1.0),
    "star": (10, 0, 0.45),
}
SWATCH_CENTER = (17, 8)
MARKER_RADIUS = 6.5


@dataclass(frozen=True)
class DesignStyle:
    """How a design is drawn. color: the name of a CSS variable; dash, marker: names of plotly's."""

    color: str
    dash: str
    marker: str

    @property
    def dash_array(self) -> str:
        """The dash as SVG's stroke-dasharray; "" for a solid line."""
        return DASH_ARRAYS[self.dash]

    @property
    def marker_points(self) -> str:
        """The corners of the marker in a swatch, as SVG's points; "" for a circle."""
        if self.marker == "circle":
            return ""
        corners, rotation, inner_radius = MARKER_SHAPES[self.marker]
        points = []
        for corner in range(corners):
            angle = math.radians(rotation - 90 + 360 * corner / corners)
            radius = MARKER_RADIUS * (inner_radius if corner % 2 else 1)
            x, y = SWATCH_CENTER[0] + radius * math.cos(angle), SWATCH_CENTER[1] + radius * math.sin(angle)
            points.append(f"{x:.1f},{y:.1f}")
        return " ".join(points)


def design_styles(report: Mapping[str, Any]) -> dict[str, DesignStyle]:
    """The style of each design by its name; the baseline always has the ink color, a solid line and circles."""
    others = [design["name"] for design in report["designs"] if design["name"] != report["baseline"]]
    styles = {report["baseline"]: DesignStyle("series-0", DASHES[0], MARKERS[0])}
    for index, name in enumerate(others):
        # 6 colors, 5 dashes and 8 markers change together: no two of 30 designs share both color and dash
        dash, marker = DASHES[(index + 1) % len(DASHES)], MARKERS[(index + 1) % len(MARKERS)]
        styles[name] = DesignStyle(f"series-{1 + index % COLOR_COUNT}", dash, marker)
    return styles
