"""The table of hazards in docs/gpu/hazards.md: each is mended and names a test, or is shown not to apply."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
TITLE = "# Hazards of GPUs, one by one"
STATES = ("mended", "does not apply")
NAMED = re.compile(r"`(test_\w+|tests/[\w/]+\.py)`")


def rows(page: str) -> list[tuple[str, str]]:
    """(hazard, state) of each row of the table."""
    section = page.split(TITLE)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [(hazard, state) for hazard, state in cells]


def names_of_tests() -> set[str]:
    """The test functions and the files of tests."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        names.add(path.relative_to(ROOT).as_posix())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return names


def faults(page: str) -> list[str]:
    """What is wrong with the table, in words."""
    known, wrong = names_of_tests(), []
    for hazard, state in rows(page):
        named = NAMED.findall(state)
        if not state.startswith(STATES):
            wrong.append(f"{hazard}: neither mended nor shown not to apply")
        if not named:
            wrong.append(f"{hazard}: no test is named")
        wrong += [f"{hazard}: there is no test {name}" for name in named if name not in known]
    return wrong


def page() -> str:
    return (ROOT / "docs/gpu/hazards.md").read_text(encoding="utf-8")


def test_each_hazard_names_a_test_that_exists() -> None:
    assert len(rows(page())) >= 19
    assert faults(page()) == []


def test_a_test_that_was_renamed_is_caught() -> None:
    """The planted bugs: a name that no test has, a row without a test, a row that says neither."""
    planted = page().replace("`test_no_tensor_of_t_by_s_elements`", "`test_no_tensor_of_s_by_t_elements`")
    assert any(fault.endswith("there is no test test_no_tensor_of_s_by_t_elements") for fault in faults(planted))
    text = f"{TITLE}\n\n| hazard | state |\n| --- | --- |\n| a | mended |\n| b | later; `test_a_test` |\n\n## Next\n"
    assert faults(text) == [
        "a: no test is named",
        "b: neither mended nor shown not to apply",
        "b: there is no test test_a_test",
    ]
