"""Parse the pages of docs/ into fenced blocks: files to save, Python code to run, and `heddle` commands."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.source import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(?P<language>\w+)(?: file=(?P<file>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block. file: the name to save it under, or None. line: where its text starts in the page."""

    language: str
    file: str | None
    text: str
    line: int


def pages() -> list[str]:
    """The paths of all pages, relative to docs/, without translations."""
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if not path.match("*.zh.md"))


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        Block(match["language"], match["file"], match["text"], text.count("\n", 0, match.start()) + 2)
        for match in BLOCK.finditer(text)
    ]


def save(block: Block, folder: Path) -> Path:
    """Save a block under its file name."""
    assert block.file is not None
    path = folder / block.file
    path.write_text(block.text, encoding="utf-8")
    return path


def commands(block: Block) -> list[str]:
    """The `heddle` command lines of a block, without the word `heddle`."""
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.strip()]
    assert all(line.startswith("heddle ") for line in lines), f"line {block.line}: only heddle commands are checked"
    return [line.removeprefix("heddle ") for line in lines]
