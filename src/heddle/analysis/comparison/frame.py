"""What every page that heddle writes shares: one file that loads nothing, its mark, and writing it whole or not."""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

# nothing may be loaded from anywhere, even by a mistake in a page or in a library it holds
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# three threads each way, over and under in turn
LOGO = (
    '<svg viewBox="0 0 26 26" fill="none" stroke-width="3.4" aria-hidden="true">'
    '<path d="M7 1V10M7 16V25M19 1V10M19 16V25" stroke="var(--series-1)"/>'
    '<path d="M13 1V4M13 10V16M13 22V25" stroke="var(--series-2)"/>'
    '<path d="M1 7H4M10 7H16M22 7H25M1 19H4M10 19H16M22 19H25M1 13H10M16 13H25" stroke="var(--ink)"/></svg>'
)


def document(title: str, style: str, body: str, scripts: Sequence[str]) -> str:
    """An HTML document; `scripts` are its script elements, `body` and they are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>{body}\n"
        + "\n".join(scripts)
        + "</body></html>\n"
    )


def write_whole(path: Path, text: str) -> None:
    """Temporary name, fsync, rename: a reader never meets half a file. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
