"""docs/evidence.md from the saved results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.row import Row

INTRODUCTION = """# What papers found, and what heddle finds

Each section trains small designs for minutes: do they agree with the papers, disagree, or not resolve the question?
Numbers are differences paired by seed, with intervals (Student's t, Bonferroni) that hold for all claims of a section
together with a probability of 95 %, at this size and budget, not at a paper's. They cover seed variance, not the
sampling error of the held-out text. The text is Python's standard library, with a vocabulary of 512 tokens. The numbers
of each run, and its machine, are in `evidence/results`.

    make evidence                        # all sections, about an hour of one core; continues where it stopped
    python -m evidence recall_of_mixers  # one
"""


def write_page(page: Path, rows: Mapping[str, Row], folder: Path) -> None:
    """Write the page."""
    page.write_text(render_page(rows, folder), encoding="utf-8")


def render_page(rows: Mapping[str, Row], folder: Path) -> str:
    """The text of the page; rows without results are listed at its end."""
    files = {name: folder / f"{name}.json" for name in rows}
    sections = [_section(name, row, files[name]) for name, row in rows.items() if files[name].is_file()]
    others = [f"- {row.title}: `python -m evidence {name}`" for name, row in rows.items() if not files[name].is_file()]
    return "\n".join([INTRODUCTION, *sections, *(["## Not run yet", "", *others, ""] if others else [])])


def _section(name: str, row: Row, file: Path) -> str:
    lines = [f"## {row.title}", "", *(f"- {paper}" for paper in row.papers), ""]
    data = json.loads(file.read_text(encoding="utf-8"))
    lines += ["| claim | measured | |", "| --- | ---: | --- |"]
    for finding in data["findings"]:
        threshold = f" (above {_number(finding['threshold'])})" if finding["threshold"] else ""
        measured = f"{_number(finding['mean'])} ± {finding['half_width']:.3f} {finding['unit']}"
        word = f"**{finding['word']}**" if finding["word"] == "disagrees" else finding["word"]
        note = f"; {finding['note']}" if finding["note"] else ""
        lines.append(f"| {finding['claim']}{threshold} | {measured} | {word}{note} |")
    seeds, minutes = {run["seed"] for run in data["runs"]}, data["processor_seconds"] / 60
    lines += [
        "",
        *((row.remark, "") if row.remark else ()),
        f"`{name}`: {len(data['runs'])} runs, {len(seeds)} seeds, {minutes:.0f} minutes, {data['date']}"
        f"{_diverged(data['runs'])}.",
        "",
    ]
    return "\n".join(lines)


def _diverged(runs: Sequence[Mapping[str, Any]]) -> str:
    """`; 1 diverged`; nothing if every run has finite numbers."""
    count = sum(None in run["numbers"].values() for run in runs)
    return f"; {count} diverged" if count else ""


def _number(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
