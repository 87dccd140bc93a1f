"""Alternating measurements: worker processes run one timed step in turn, so noise affects all of them alike.

A benchmark defines `sides`: for each name, a function from the case's arguments to a step that returns its seconds.
The first side is heddle's, the others are peers. Each side runs in a separate process, because settings of a process
(the allocator, how matrix products are computed) must not affect the other side.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from heddle.runtime import hardware, versions

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
THREADS = 2

Step = Callable[[], float]
Side = Callable[[dict[str, Any]], Step]


@dataclass(frozen=True)
class Case:
    """One comparison. `goal` is the smallest acceptable ratio of the first peer's seconds to heddle's."""

    name: str
    arguments: dict[str, Any]
    goal: float | None
    pairs: int = 15


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def peak_memory() -> float:
    """Peak memory of this program in MB (`getrusage` would include the process before it started this program)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class Worker:
    """A process that runs one side of one case, step by step."""

    def __init__(self, module: str, side: str, arguments: dict[str, Any]) -> None:
        command = [sys.executable, "-m", module, "--side", side, "--arguments", json.dumps(arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step()  # the first step warms up and is not counted

    def step(self) -> float:
        """Run one step and return its seconds. Raises RuntimeError if the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with exit status {self.process.wait()}")
        return float(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(side: Side, arguments: dict[str, Any]) -> None:
    """The loop of a worker: build once, then run one step for each line of the input."""
    step = side(arguments)
    for _ in sys.stdin:
        print(step(), flush=True)


def main(
    module: str,
    question: str,
    sides: Mapping[str, Side],
    cases: Sequence[Case],
    extra_rows: Callable[[], list[dict[str, Any]]] = list,
) -> None:
    """The command line of a benchmark: run the cases and `extra_rows`, or serve as the worker of one side."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--side", choices=sorted(sides), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="run the cases whose name contains this, and write nothing")
    options = parser.parse_args()
    if options.side:
        serve(sides[options.side], options.arguments)
        return
    rows = []
    for case in cases:
        if options.only in case.name:
            rows.append(compare(module, list(sides), case))
            show([rows[-1]])
    if not options.only:
        rows += extra_rows()
        show(rows[len(cases) :])
        write(module, question, rows)


def compare(module: str, sides: list[str], case: Case) -> dict[str, Any]:
    """Medians of one case.

    `ratio` is the median of the first peer's seconds over heddle's, with its quartiles. Other peers: `ratio to NAME`.
    """
    workers = [Worker(module, side, case.arguments) for side in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    try:
        for turn in range(case.pairs):
            for number in range(len(sides)):  # no side is always the first
                index = (number + turn) % len(sides)
                seconds[index].append(workers[index].step())
    finally:
        for worker in workers:
            worker.close()
    row: dict[str, Any] = {"case": case.name, "pairs": case.pairs}
    for side, side_seconds in zip(sides, seconds, strict=True):
        row[f"{side} seconds"] = statistics.median(side_seconds)
    ratios = [[peer / own for peer, own in zip(side_seconds, seconds[0], strict=True)] for side_seconds in seconds[1:]]
    row |= ratio_row(ratios[0], case.goal)
    for side, values in zip(sides[2:], ratios[1:], strict=True):
        summary = ratio_row(values, None)
        row |= {f"ratio to {side}": summary["ratio"], f"quartiles to {side}": summary["quartiles"]}
    return row


def ratio_row(ratios: Sequence[float], goal: float | None) -> dict[str, Any]:
    """The median ratio, its quartiles, the goal and whether it is met."""
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratio, ratio, ratio)
    row: dict[str, Any] = {"ratio": round(ratio, 3), "quartiles": [round(low, 3), round(high, 3)]}
    return row if goal is None else row | {"goal": f">= {goal}", "met": ratio >= goal}


def limit_row(name: str, value: float, limit: float, unit: str) -> dict[str, Any]:
    """A row for a single value that must not exceed a limit."""
    return {"case": name, "value": round(value, 3), "unit": unit, "goal": f"<= {limit}", "met": value <= limit}


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of calls of this process, run in turn. A first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            elapsed = timed(call)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per row."""
    for row in rows:
        columns = [str(row["case"]).ljust(40)]
        for key, value in row.items():
            if key not in ("case", "met"):
                columns.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
        if "met" in row:
            columns.append("met" if row["met"] else "NOT MET")
        print("  ".join(columns), flush=True)


def write(module: str, question: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write benchmarks/results/NAME.json."""
    package_versions = versions()
    for package in ("transformers",):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            continue
    name = module.rpartition(".")[2]
    content = {
        "question": question,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "threads": THREADS,
        "versions": package_versions,
        "results": list(rows),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
