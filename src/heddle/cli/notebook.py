"""Results as tables of a notebook: HTML without style of its own, so that it follows the notebook's theme."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table whose every text is escaped. Numbers stand at the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td style="text-align: right">{value:,}</td>' if isinstance(value, int) else _cell_of_float(value)
    return f"<td>{escape(str(value))}</td>"


def _cell_of_float(value: float) -> str:
    return f'<td style="text-align: right">{value:,.4g}</td>'
