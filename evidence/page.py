"""docs/evidence.md from the saved results."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.row import Row

MAX_MEANS = 8  # of more trainings they are in the results alone
INTRODUCTION = """# What papers found, and what heddle finds

Each section trains small designs for minutes: do they agree with the papers, disagree, or not resolve the question?
Numbers are differences paired by seed, with intervals (Student's t, Bonferroni) that hold for all claims of a section
together with a probability of 95 %, at this size and budget, not at a paper's. They cover seed variance, not the
sampling error of the held-out text. The text is Python's standard library, with a vocabulary of 512 tokens.

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
    remark = f" {row.remark}" if row.remark else ""
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
        f"Means: {_means(data['runs'])}.{remark}" if len(row.trainings) <= MAX_MEANS else row.remark,
        "",
        f"`python -m evidence {name}`: {len(data['runs'])} runs, {len(seeds)} seeds, {minutes:.0f} minutes of one core "
        f"({data['cpu'].replace('(R)', '').removesuffix(' Processor')}, {data['date']}).",
        "",
    ]
    return "\n".join(lines)


def _means(runs: Sequence[Mapping[str, Any]]) -> str:
    """The mean numbers of each training: "full attention: 0.991; linear: 0.214"."""
    values: dict[str, dict[str, list[float | None]]] = {}
    for run in runs:
        for name, value in run["numbers"].items():
            values.setdefault(run["key"], {}).setdefault(name, []).append(value)
    texts = []
    for key, of_key in values.items():
        means = [_mean(numbers) if len(of_key) == 1 else f"{name} {_mean(numbers)}" for name, numbers in of_key.items()]
        texts.append(f"{key}: {', '.join(means)}")
    return "; ".join(texts)


def _mean(numbers: Sequence[float | None]) -> str:
    finite = [number for number in numbers if number is not None]
    text = f"{statistics.mean(finite):.3f}" if finite else ""
    diverged = len(numbers) - len(finite)
    return text if not diverged else f"{text} ({diverged} of {len(numbers)} diverged)".strip()


def _number(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
