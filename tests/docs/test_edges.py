"""docs/edges.md names tests that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "edges.md").read_text(encoding="utf-8")


def unknown_tests(page: str) -> Iterator[str]:
    """The tests that a page names and their files do not define."""
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", page):
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        yield from sorted(set(re.findall(r"\w+", names)) - defined)


def test_every_promise_names_a_test_that_exists() -> None:
    assert not list(unknown_tests(PAGE))
    assert PAGE.count(".py`: `test_") >= PAGE.count("\n| ") - 2 * PAGE.count("\n## ")


def test_a_test_that_was_renamed_is_noticed() -> None:
    assert list(unknown_tests(PAGE.replace("test_a_bomb_is_refused", "test_a_bomb"))) == ["test_a_bomb"]
