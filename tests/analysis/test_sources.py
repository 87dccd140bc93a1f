"""Pages are made of templates, styles and scripts in files of their own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import heddle
from heddle.lab.pages import render

PACKAGE = Path(heddle.__file__).parent
LAB = PACKAGE / "lab"
MARKUP = {
    "an HTML tag": re.compile(r"(?<!\?P)</?[a-zA-Z][\w-]*(\s[^<>]*)?/?>|<!doctype", re.IGNORECASE),
    "an HTML attribute": re.compile(r"\b(class|style|href|aria-[a-z]+)=\"|&[a-z]+;"),
    "CSS": re.compile(r"[{;]\s*[a-z-]+\s*:\s*[^;{}]+;|var\(--|@media"),
    "JavaScript": re.compile(r"\bdocument\.|=>|\bconst \w|\bfunction\s*\("),
}


def strings(source: str) -> Iterator[str]:
    """Every string in a Python source but docstrings; an f-string's expressions are left out."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def markup_in(source: str) -> list[str]:
    """What of a page's languages stands in a Python source."""
    return [f"{kind}: {text}" for text in strings(source) for kind, pattern in MARKUP.items() if pattern.search(text)]


WRITERS = {  # what they make is markup or a script, from docstrings, formulas and costs; or they look for scripts
    "explore/formulas.py",
    "explore/page.py",
    "pages/render.py",
}
FILES = [file for file in sorted(LAB.rglob("*.py")) if str(file.relative_to(LAB)) not in WRITERS]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(LAB)))
def test_python_files_hold_no_markup(file: Path) -> None:
    assert markup_in(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        '"<b>bold</b>"',
        'f"<td>{value}</td>"',
        '"a<br>b"',
        "'<svg viewBox=\"0 0 1 1\"/>'",
        '"p { color: red; }"',
        '"(x) => x"',
    ],
)
def test_planted_markup_is_found(text: str) -> None:
    assert markup_in(f"value = 1\nshown = {text}\n")


def test_words_with_signs_are_no_markup() -> None:
    shown = '"1 < 2 and 3 > 2", "50 % of {x}", "a: b; c", "← better", r"(?P<x>a)"'
    assert markup_in(f'"""A docstring with <b>tags</b>."""\nx = {shown}\n') == []


def test_every_template_compiles_and_every_static_file_is_used() -> None:
    environment = render.environment()
    names = environment.list_templates()
    assert {"report.html", "inspect.html", "report/summary.html"} <= set(names)
    for name in names:
        environment.get_template(name)
    sources = "".join((render.FOLDER / "templates" / name).read_text(encoding="utf-8") for name in names)
    for file in (render.FOLDER / "static").iterdir():
        assert f'static("{file.name}")' in sources
