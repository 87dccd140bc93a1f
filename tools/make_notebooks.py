"""Write notebooks/*.ipynb from notebooks/*.py, whose cells begin with `# %%` (the percent format of jupytext).

    python tools/make_notebooks.py

The Python files are the source: they are read, linted and run as they are. The .ipynb files are for Jupyter and Colab.
"""

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
MARKDOWN = "# %% [markdown]"
CELL = "# %%"


def notebook(source: str) -> str:
    """The notebook of a Python file, as nbformat 4.5."""
    cells: list[dict[str, Any]] = []
    for line in source.splitlines():
        if line in (MARKDOWN, CELL):
            kind = "markdown" if line == MARKDOWN else "code"
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": []})
            if kind == "code":
                cells[-1] |= {"execution_count": None, "outputs": []}
        else:
            is_text = cells[-1]["cell_type"] == "markdown"
            cells[-1]["source"].append(line.removeprefix("#").removeprefix(" ") if is_text else line)
    for cell in cells:
        lines = "\n".join(cell["source"]).strip("\n").split("\n")
        cell["source"] = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file in sorted(FOLDER.glob("*.py")):
        file.with_suffix(".ipynb").write_text(notebook(file.read_text(encoding="utf-8")), encoding="utf-8")
