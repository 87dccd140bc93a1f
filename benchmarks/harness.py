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
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import (
    ROOT,
    THREADS,
    limit,
    machine_name,
    read_results,
    result_file,
    source_hash,
)
from heddle.lab.bench.run import Calibration, Quartiles, measure_in_rounds, quartiles_of, ratio_of
from heddle.runtime import hardware, versions

QUICK_PAIRS = 2
EQUAL = 1e-9  # the largest relative difference of two sides in float64
EQUAL_IN_FLOAT32 = 1e-4  # where a peer has no float64

Step = Callable[[], float]


class Measured(NamedTuple):
    """A step that returns its seconds, and some numbers that every side must compute alike.

    Before a case is timed its sides compute them in float64, where they must agree within EQUAL: sides with values have
    an argument "precision", of which "fp64" is one. Where a peer has no float64, they agree in float32.
    """

    step: Step
    values: Callable[[], list[float]]


Side = Callable[[dict[str, Any]], Step | Measured]


@dataclass(frozen=True)
class Case:
    """One comparison. `goal` is the smallest acceptable ratio of a peer's seconds to heddle's.

    sides: those that run, heddle's first; empty: all. against: the peers of the goal, of which the fastest counts;
    empty: the first. figure: the row of `benchmarks.figures` that it answers. work: (a limit of `benchmarks.limits`,
    how much of it one step takes), such as ("fp32 products", FLOPs) or ("read", bytes). has_float64: whether all sides
    can compute their values in it; otherwise they do in float32, with the argument "exact".
    """

    name: str
    arguments: dict[str, Any]
    goal: float | None
    pairs: int = 15
    sides: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    figure: str = ""
    work: tuple[str, float] | None = None
    has_float64: bool = True


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

    def values(self) -> list[float]:
        """The numbers to compare; empty if the side has none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("values\n")
        self.process.stdin.flush()
        numbers: list[float] = json.loads(self.process.stdout.readline())
        return numbers

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(side: Side, arguments: dict[str, Any]) -> None:
    """The loop of a worker: build once, then run one step for each line of the input, or print the values."""
    built = side(arguments)
    step, values = built if isinstance(built, Measured) else (built, list[float])
    for line in sys.stdin:
        print(json.dumps(values()) if line.strip() == "values" else step(), flush=True)


def main(
    module: str,
    question: str,
    sides: Mapping[str, Side],
    cases: Sequence[Case],
    extra_rows: Callable[[], list[dict[str, Any]]] = list,
) -> None:
    """The command line of a benchmark: run the cases and `extra_rows`, or serve as the worker of one side.

    The file is written after each case. A case that the same code measured on this kind of machine is not run again.
    """
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--side", choices=sorted(sides), help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="run the cases whose name contains this, and write nothing")
    parser.add_argument("--figures", action="store_true", help="run the cases that are rows of the figures' table")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs of each case, and write nothing")
    parser.add_argument("--again", action="store_true", help="measure again what the same code has measured")
    options = parser.parse_args()
    if options.side:
        serve(sides[options.side], options.arguments)
        return
    writes = not (options.only or options.quick)
    earlier = {} if options.again or not writes else measured_rows(module)
    rows = []
    for case in cases:
        if options.only not in case.name or (options.figures and not case.figure):
            continue
        if case.name in earlier:
            rows.append(earlier[case.name])
            continue
        chosen = replace(case, pairs=QUICK_PAIRS) if options.quick else case
        rows.append(compare(module, list(case.sides or sides), chosen))
        show([rows[-1]])
        if writes:
            write(module, question, rows)
    if writes and (not options.figures or extra_rows is not list):
        others = extra_rows()
        show(others)
        write(module, question, rows + others)


def run_rows(module: str, question: str, rows: Callable[[bool], list[dict[str, Any]]]) -> None:
    """The command line of a benchmark that compares no sides: rows(quick) -> its rows."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--quick", action="store_true", help="small sizes, and write nothing")
    parser.add_argument("--figures", action="store_true", help=argparse.SUPPRESS)  # every row is measured anyway
    parser.add_argument("--again", action="store_true", help="measure again what the same code has measured")
    options = parser.parse_args()
    if not (options.quick or options.again) and read_results(module).get("sources") == source_hash():
        print("measured by the same code; --again measures it again")
        return
    measured = rows(options.quick)
    show(measured)
    if not options.quick:
        write(module, question, measured)


def measured_rows(module: str) -> dict[str, dict[str, Any]]:
    """By name, the cases that this code has measured on this kind of machine and did not find unsteady."""
    content = read_results(module)
    rows = content.get("results", []) if content.get("sources") == source_hash() else []
    return {row["case"]: row for row in rows if not row.get("unsteady")}


@cache
def calibration() -> Calibration:
    """The calibration of this process."""
    return Calibration(THREADS)


def compare(module: str, sides: list[str], case: Case) -> dict[str, Any]:
    """Medians of one case. A turn beside which the calibration product was slow is taken again, `pairs` times at most.

    `ratio` is the median of a peer's seconds over heddle's, with its quartiles: of the fastest peer of `case.against`.
    Other peers: `ratio to NAME`.
    """
    equality = check_equality(module, sides, case)
    workers = {side: Worker(module, side, case.arguments) for side in sides}
    try:
        rounds = measure_in_rounds({side: worker.step for side, worker in workers.items()}, case.pairs, calibration())
    finally:
        for worker in workers.values():
            worker.close()
    row: dict[str, Any] = {"case": case.name, "pairs": case.pairs, "turns taken again": rounds.repeated}
    if case.figure:
        row["figure"] = case.figure
    if rounds.is_noisy:
        row["unsteady"] = True
    return row | equality | seconds_row(case, rounds.seconds)


def check_equality(module: str, sides: Sequence[str], case: Case) -> dict[str, Any]:
    """Let each side compute its values from equal weights in a process of its own, in float64 unless a peer cannot.

    Returns the largest difference as a row of the results; {} where no peer has values.
    """
    precision, limit = ("fp64", EQUAL) if case.has_float64 else ("fp32", EQUAL_IN_FLOAT32)
    arguments = case.arguments | {"precision": precision, "exact": True}
    values = {}
    for side in sides:
        worker = Worker(module, side, arguments)
        try:
            values[side] = worker.values()
        finally:
            worker.close()
    largest = largest_difference(case.name, values, limit)
    return {} if largest is None else {f"difference in {precision}": largest}


def largest_difference(name: str, values: Mapping[str, Sequence[float]], limit: float) -> float | None:
    """The largest relative difference of a side's values from the first side's; None where only one side has some.

    A value that is smaller than most is measured by their median, since it may be a difference of larger ones. Raises
    ValueError above the limit, and where a side has other numbers of values.
    """
    first, *others = [side for side in values if values[side]] or [""]
    if not others:
        return None
    size, largest = statistics.median(map(abs, values[first])), 0.0
    for side in others:
        pairs = zip(values[first], values[side], strict=True)
        difference = max(abs(ours - theirs) / max(abs(ours), size) for ours, theirs in pairs)
        if not difference <= limit:
            raise ValueError(f"{name}: {side} computes something else, {difference:.1e} apart; nothing was timed")
        largest = max(largest, difference)
    return largest


def seconds_row(case: Case, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, ratios and shares of the limit, of the seconds of all sides."""
    row: dict[str, Any] = {}
    heddle, *peers = seconds
    for side, side_seconds in seconds.items():
        row[f"{side} seconds"] = statistics.median(side_seconds)
        reached = None if case.work is None else limit(case.work[0])
        if case.work is not None and reached is not None:
            row[f"{side} % of the limit"] = round(100 * case.work[1] / row[f"{side} seconds"] / reached, 1)
    against = min(case.against or peers[:1], key=lambda side: row[f"{side} seconds"])
    for side in peers:
        ratios = ratio_of(seconds[side], seconds[heddle])
        if side == against:
            row |= _quartiles_row(ratios, case.goal) | {"against": side}
        else:
            summary = _quartiles_row(ratios, None)
            row |= {f"ratio to {side}": summary["ratio"], f"quartiles to {side}": summary["quartiles"]}
    return row


def ratio_row(ratios: Sequence[float], goal: float | None) -> dict[str, Any]:
    """The median ratio, its quartiles, the goal and whether it is met."""
    return _quartiles_row(quartiles_of(ratios), goal)


def _quartiles_row(ratios: Quartiles, goal: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "ratio": round(ratios.median, 3),
        "quartiles": [round(ratios.low, 3), round(ratios.high, 3)],
    }
    return row if goal is None else row | {"goal": f">= {goal}", "met": ratios.median >= goal}


def limit_row(name: str, value: float, limit: float, unit: str) -> dict[str, Any]:
    """A row for a single value that must not exceed a limit."""
    return {"case": name, "value": round(value, 3), "unit": unit, "goal": f"<= {limit}", "met": value <= limit}


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of calls of this process, run in turn. A first round warms up and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            elapsed = timed(call)
            if number:
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
    """Write benchmarks/results/MACHINE/NAME.json."""
    package_versions = versions()
    for package in ("transformers",):
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            continue
    content = {
        "question": question,
        "machine": machine_name(),
        "date": date.today().isoformat(),
        "sources": source_hash(),
        "hardware": hardware(),
        "threads": THREADS,
        "versions": package_versions,
        "results": list(rows),
    }
    file = result_file(module)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
