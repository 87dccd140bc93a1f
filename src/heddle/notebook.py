"""HTML for notebooks: unstyled tables, which follow the notebook's theme, and small grayscale images."""

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape

Cell = object  # text, a number, or an Image


class Image(str):
    """HTML of an image, which a table does not escape."""


def html_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """An HTML table with all text escaped and numbers right-aligned."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def gray_image(rows: Sequence[bytes], label: str) -> Image:
    """A grayscale PNG in an <img>, shown 96 pixels wide. rows: one byte per pixel, 0 is black. label: its alt text."""
    width, height = len(rows[0]), len(rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    address = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
    return Image(
        f'<img src="{address}" alt="{escape(label)}" title="{escape(label)}" width="96" '
        'style="image-rendering: pixelated; margin: 1px">'
    )


def _cell(value: Cell) -> str:
    if isinstance(value, Image):
        return f"<td>{value}</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return f'<td style="text-align: right">{text}</td>'
    return f"<td>{escape(str(value))}</td>"
