"""`--help` of a program of the repository prints what it does, and starts nothing."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source import ROOT

# Started by other programs only, with words that no person types.
INNER = {"tests/forked.py", "tools/same_sections.py"}


def is_program(file: Path) -> bool:
    """Whether a file asks for its own name outside a function."""
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in _tree(file).body)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


PROGRAMS = [
    str(file.relative_to(ROOT))
    for folder in ("tools", "tests", "tests/accelerator")
    for file in sorted((ROOT / folder).glob("*.py"))
    if is_program(file) and str(file.relative_to(ROOT)) not in INNER
]


class StartedError(Exception):
    """A program has begun to work."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_prints_and_starts_nothing(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise StartedError(program)

    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT / Path(program).parent), *sys.path])
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage:")


def test_the_programs_are_found() -> None:
    assert {"tests/covering.py", "tests/golden_runs.py", "tools/package.py", "tools/make_docs.py"} <= set(PROGRAMS)
