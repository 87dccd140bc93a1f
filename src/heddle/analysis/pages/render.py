"""Render a template to one self-contained HTML document: styles, scripts and data are embedded in it."""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
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
    """The text of a file in templates/. All values are escaped, except the files and JSON that the templates embed.

    A page extends base.html, whose policy lets it run the scripts of its block `scripts` and nothing else.
    """
    return environment().get_template(template).render(**context)


@cache
def environment() -> "Environment":
    """The jinja2 environment of all pages.

    Besides what jinja2 has, templates may use `static(name)`, which embeds a file of static/, `version`, the FILTERS,
    the filter `script_json`, which embeds data in a script element, and `script_sources`, which base.html alone needs.
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
    created.filters |= FILTERS | {
        "script_json": lambda data: Markup(script_json(data)),
        "script_sources": lambda scripts: Markup(script_sources(str(scripts))),
    }
    return created


def static(name: str) -> str:
    """The text of a file in static/."""
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


def script_json(data: Any) -> str:
    """JSON for a script element. "<" is written as an escape, so that no string in the data can end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def script_sources(scripts: str) -> str:
    """The sources of a policy (Content Security Policy, level 2) that lets these script elements run and no other.

    Each is the SHA-256 of an element's text. A browser reads every line break as "\n".
    """
    elements = scripts.replace("\r\n", "\n").replace("\r", "\n").split("<script>")[1:]
    texts = [element.partition("</script>")[0] for element in elements]
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts) or "'none'"
