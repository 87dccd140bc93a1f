"""Render a template to one self-contained HTML document: styles, scripts and data are embedded in it."""

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle import __version__
from heddle.lab.compare.results import Report
from heddle.lab.compare.tables import format_budget, format_bytes, format_number, format_percent, join_names

if TYPE_CHECKING:
    from jinja2 import Environment


FOLDER = Path(__file__).parent
FILTERS = {
    "number": format_number,
    "bytes": format_bytes,
    "percent": format_percent,
    "budget": format_budget,
    "join_names": join_names,
}


def render(template: str, **context: Any) -> str:
    """Render a file in templates/ to HTML. All values are escaped, except the files and JSON that templates embed.

    A page extends base.html, which lets only the scripts of its block `scripts` run.
    """
    return environment().get_template(template).render(**context)


# Characters that reorder the text around them (Unicode's embeddings, overrides and isolates) are shown as code points,
# so that no name can look like another one. Marks of one character, which right-to-left texts need, stay.
BIDI_CONTROLS = {character: f"\\u{character:04x}" for character in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def render_figures(template: str, figures: Mapping[str, Any], scripts: bool = True, **context: Any) -> str:
    """Render a page with figures, which `figures.js` draws where the template has `plot(name, …)`.

    figures: plotly specifications by name; None if nothing was measured. scripts: False leaves plotly's 5 MB out, for
    an open page that only takes over newer content.
    """
    return render(template, figures=figures, plotly=plotly_script() if scripts else "", **context)


@cache
def plotly_script() -> str:
    """The source of plotly, about 5 MB."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


@cache
def environment() -> "Environment":
    """The jinja2 environment of all pages.

    Besides the builtins, templates may use `static(name)`, which embeds a file of static/, `version`, the FILTERS,
    the filter `script_json`, which embeds data in a script element, and `script_sources`, which only base.html needs.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    created = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: _page_text(value) if type(value) is str else value,
    )
    created.globals |= {"static": lambda name: Markup(static(name)), "version": __version__}
    created.filters |= FILTERS | {
        "script_json": lambda data: Markup(script_json(data)),
        "script_sources": lambda scripts: Markup(script_sources(str(scripts))),
    }
    return created


def _page_text(text: str) -> str:
    """A text with control characters shown, and no line break after "±"."""
    return text.translate(BIDI_CONTROLS).replace("± ", "±\u00a0")


def static(name: str) -> str:
    """The text of a file in static/."""
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """JSON for a script element. "<" is written as an escape, so that no string in the data can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return text.translate({character: f"\\{shown}" for character, shown in BIDI_CONTROLS.items()})


def script_sources(scripts: str) -> str:
    """The sources of a Content Security Policy (level 2) that lets only these script elements run.

    Each is the SHA-256 of an element's text. A browser reads every line break as "\\n".
    """
    elements = scripts.replace("\r\n", "\n").replace("\r", "\n").split("<script>")[1:]
    texts = [element.partition("</script>")[0] for element in elements]
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts) or "'none'"


# The color, line and marker of a design in all figures and tables of a page.


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


BASELINE_STYLE = DesignStyle("series-0", DASHES[0], MARKERS[0])


def numbered_style(index: int, dash: str) -> DesignStyle:
    """The style of a line beside the baseline's, by its number from 0: its color and its marker."""
    return DesignStyle(f"series-{1 + index % COLOR_COUNT}", dash, MARKERS[(index + 1) % len(MARKERS)])


def design_styles(names: Sequence[str], baseline: str) -> dict[str, DesignStyle]:
    """The style of each design by its name; the baseline always has the ink color, a solid line and circles."""
    others = [name for name in names if name != baseline]
    # 6 colors, 5 dashes and 8 markers change together: no two of 30 designs share both color and dash
    styles = {name: numbered_style(index, DASHES[(index + 1) % len(DASHES)]) for index, name in enumerate(others)}
    return {baseline: BASELINE_STYLE} | styles


def report_styles(report: Report) -> dict[str, DesignStyle]:
    """The styles of a comparison's designs."""
    return design_styles([design.name for design in report.designs], report.baseline)
