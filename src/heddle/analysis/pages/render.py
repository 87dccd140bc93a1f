"""Render a template to one self-contained HTML document: styles, scripts and data are embedded in it."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle import __version__
from heddle.analysis.comparison.formatting import format_budget, format_bytes, format_number, format_percent, join_names

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
    """The text of a file in templates/. All values are escaped, except the files and JSON that the templates embed."""
    return environment().get_template(template).render(**context)


@cache
def environment() -> "Environment":
    """The jinja2 environment of all pages.

    Besides what jinja2 has, templates may use `static(name)`, which embeds a file of static/, `version`, the FILTERS,
    and the filter `script_json`, which embeds data in a script element.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    created = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    created.globals |= {"static": lambda name: Markup(static(name)), "version": __version__}
    created.filters |= FILTERS | {"script_json": lambda data: Markup(script_json(data))}
    return created


def static(name: str) -> str:
    """The text of a file in static/."""
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """JSON for a script element. "<" is written as an escape, so that no string in the data can end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
