"""The notebooks run from top to bottom, as scripts and as the cells of their .ipynb; both are the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.source import ROOT
from tools.make_notebooks import notebook

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
QUICK = {"choose_a_design", "parts_from_scratch"}  # the others train


def run(file: Path) -> dict[str, Any]:
    """Run the cells of a notebook in one namespace; each value that a cell ends with has a display, if it is ours."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(file.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, file.name, "exec"), namespace)
            last = source.rpartition("\n")[2]
            if last.isidentifier() and type(namespace[last]).__module__.startswith("heddle."):
                assert namespace[last]._repr_html_().startswith("<table>")
    return namespace


def test_there_are_four() -> None:
    assert [file.stem for file in NOTEBOOKS] == [
        "choose_a_design", "convert_a_model", "parts_from_scratch", "read_a_report",
    ]  # fmt: skip


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_notebook_is_that_of_the_script(file: Path) -> None:
    assert file.with_suffix(".ipynb").read_text(encoding="utf-8") == notebook(file.read_text(encoding="utf-8")), (
        "run python tools/make_notebooks.py"
    )


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=() if file.stem in QUICK else pytest.mark.soak) for file in NOTEBOOKS],
    ids=lambda file: file.stem,
)
def test_the_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(file)
