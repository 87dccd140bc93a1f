"""Comparisons from beginning to end, their workers run within this process."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from heddle.lab.compare.worker import perform_task
from heddle.signals import Interrupted
from heddle.storage.file_io import write_json_file
from tests import small

JAPANESE = (
    "機を織る人は糸を上げて杼を通す。",
    "同じ織機でも、綜絖を替えれば別の布になる。",
    "朝の市場には青い布と赤い布が並んでいた。",
    "雨の日は糸が重く、音も静かに響く。",
    "祖母は古い柄を覚えていて、孫にそれを教えた。",
    "\n\n",
)
OPTIONS = ["--sequence-length", "32", "--batch-size", "16", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--speed-context-length", "24"]

# Of speeds and samples of text no test reads more than that they are there.
FEW = {
    "heddle.lab.compare.probes.READ_BYTES": 2**20,
    "heddle.lab.compare.probes.WARMUP_STEPS": 1,
    "heddle.lab.compare.probes.MEASURED_STEPS": 2,
    "heddle.lab.compare.probes.DECODED_TOKENS": 4,
    "heddle.generation.generate.SAMPLE_TOKENS": 8,
}


class Workers:
    """Takes the place of worker processes: records what ran, and can fail, diverge or be interrupted at one of them."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.kills: set[str] = set()
        self.diverges: set[str] = set()
        self.interrupts: set[str] = set()

    def start(self, request: Path, target: Path) -> "Ended":
        return Ended(self.run(request, target))

    def run(self, request: Path, target: Path) -> int:
        task = json.loads(request.read_text())
        name = target.stem
        if name in self.interrupts:
            raise Interrupted(15)
        self.ran.append(name)
        if name in self.kills:
            return -9
        with pytest.MonkeyPatch.context() as patch:
            for constant, value in FEW.items():
                patch.setattr(constant, value)
            result, code = perform_task(task)
        if name in self.diverges:
            result, code = {"status": "diverged", "message": "10 steps in a row"}, 0
        write_json_file(target, result)
        return code


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


def equal_designs(root: Path, names: Iterable[str]) -> Path:
    """A folder of text, and the same small design under each name; returns `root`."""
    (root / "text").mkdir()
    for number in range(20):
        (root / "text" / f"{number}.txt").write_text(f"the {number}th cloth is blue and long. " * 500, encoding="utf-8")
    for name in names:
        small.design_file(root / f"{name}.yaml")
    return root


def command(folder: Path, out: Path, *options: str, designs: tuple[str, ...] = ("full", "my local")) -> list[str]:
    files = [f"{folder}/{design}.yaml" for design in designs]
    budget = [] if {"--seconds", "--flops", "--tokens"} & {*options} else ["--tokens", "5200"]
    if "--recall" not in options:
        options = (*options, "--recall", "none")
    arguments = ["compare", *files, "--data", f"{folder}/text", "--out", str(out), "--seeds", "2", *budget]
    return [*arguments, *OPTIONS, "--quiet", *options]


def read_report(out: Path) -> dict[str, Any]:
    text = (out / "report.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text)
    return report


def without_timing(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what depends on the clock and the machine's load."""
    timeless_report = copy.deepcopy(report)
    for name in ("created", "command"):
        del timeless_report[name]
    for design in timeless_report["designs"]:
        for name in ("train_tokens_per_second", "train_speed_range", "peak_memory_bytes", "prefill", "decode"):
            del design[name]
        design.pop("reading_share", None)
        for training_run in design["runs"]:
            for name in ("seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes"):
                del training_run[name]
    for row in [*timeless_report["pairs"], *timeless_report["differences"]]:
        for need in row["needs"]:
            del need["seconds"]
    warnings = timeless_report["warnings"]
    timed = ("Decoding at these sizes", "The machine was busy")
    timeless_report["warnings"] = [text for text in warnings if not text.startswith(timed)]
    # the last sentences weigh speed too
    timeless_report["verdict"] = timeless_report["verdict"][:1]
    return timeless_report
