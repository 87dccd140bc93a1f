"""Results in a notebook: tables without style of their own, so that they follow its theme, and small gray images."""

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape

Cell = object  # text, a number, or an Image


class Image(str):
    """HTML of an image, which a table does not escape."""


def html_table(header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """A table whose every text is escaped. Numbers stand at the right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def gray_image(rows: Sequence[bytes], label: str) -> Image:
    """An image of rows of gray values, one byte a pixel, 0 black, 96 pixels wide. label: its description."""
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
