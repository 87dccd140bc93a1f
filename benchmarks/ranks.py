"""What do ranks cost on one machine: speed, restart, checkpoint, memory, and a dry run of many?

Ranks are processes of `heddle train --nproc` with gloo. Trainings on ranks and on one process take turns. The memory is
that of storages at the peak of a step of four ranks as threads.
"""

import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks import checkpoint
from benchmarks.harness import limit_row, ratio_row, run_rows
from heddle.errors import RankLost
from heddle.storage.run_log import read_log
from tests.distributed.steps import memory_of_four_ranks
from tools.kill_test import children, done, finish, start

QUESTION = "What do ranks cost on one machine: speed, restart, checkpoint, memory, and a dry run of many?"
DESIGN, LENGTH = "preset:gqa-small", 256
WAYS = {"two ranks": ("--nproc", "2", "--threads", "1"), "one process": ("--threads", "2")}
BATCHES = {8: (5, 12), 32: (3, 7)}  # sequences of a step: rounds, and steps of a training
WARMUP_STEPS = 2
MiB = 2**20
EIGHT_BILLION = {
    "vocab_size": 128_256,
    "width": 4096,
    "layers": [
        {
            "repeat": 32,
            "mixer": {"kind": "attention", "heads": 32, "kv_heads": 8, "position": {"kind": "rope"}},
            "feedforward": {"kind": "gated", "hidden": 14_336},
        }
    ],
}


def options(steps: int, *others: str, batch_size: int = 8) -> list[str]:
    """The arguments of a training."""
    size = ["--batch-size", str(batch_size), "--sequence-length", str(LENGTH), "--steps", str(steps)]
    return [DESIGN, "--data", "docs", "--device", "cpu", "--quiet", *size, *others]


def speed(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Tokens per second of two ranks of one thread over those of one process of two."""
    for batch_size, (rounds, steps) in BATCHES.items():
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(2 if quick else rounds):
            for name in list(WAYS) if turn % 2 else list(WAYS)[::-1]:
                out = folder / f"{name} {batch_size} {turn}"
                finish(start(options(4 if quick else steps, *WAYS[name], batch_size=batch_size), out))
                lines = [line["seconds"] for line in read_log(out)[WARMUP_STEPS:]]
                seconds[name].append(statistics.median(lines))
        ranks, alone = seconds.values()
        ratios = [one / two for two, one in zip(ranks, alone, strict=True)]
        case = f"two ranks × 1 thread, over one process × 2 threads, {batch_size * LENGTH:,} tokens a step"
        row: dict[str, Any] = {"case": case} | ratio_row(ratios, 0.9)
        yield row | {f"{name} seconds": round(statistics.median(values), 3) for name, values in seconds.items()}


def restart(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds from the death of a rank to the next step."""
    out, needed = folder / "restart", []
    process = start(options(10_000, *WAYS["two ranks"], "--save-every", "3"), out)
    try:
        for _ in range(1 if quick else 3):
            wait_for_step(process, out, done(out) + 5)
            ranks = children(process.pid)
            began = time.perf_counter()
            os.kill(ranks[1], signal.SIGKILL)
            while set(ranks) & set(children(process.pid)):
                time.sleep(0.02)
            wait_for_step(process, out, done(out) + 1)
            needed.append(time.perf_counter() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    yield limit_row("from a rank's death to the next step", max(needed), 20, "seconds")


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int) -> None:
    """Wait until so many lines are in the log. Raises RankLost if the training ends."""
    while done(out) < step:
        if process.poll() is not None:
            raise RankLost(f"{out}: the training ended with code {process.returncode}; run it by hand")
        time.sleep(0.02)


def saving(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds of a checkpoint of 1 GiB."""
    rows, rounds = (2**10, 1) if quick else (2**14, 3)
    medians = checkpoint.medians(rows, rounds, folder / "model")
    yield limit_row("checkpoint of 1 GiB: four ranks over one process", medians[4] / medians[1], 1.2, "times")


def planning(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds and memory of a dry run."""
    design = folder / "8b.yaml"
    design.write_text(yaml.safe_dump(EIGHT_BILLION), encoding="utf-8")
    sizes = ["--gpus", "64", "--gpu", "h100", "--sequence-length", "512" if quick else "8192", "--dry-run"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "heddle", "plan", str(design), *sizes], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise RuntimeError(f"heddle plan ended with status {status}")
    yield limit_row("dry run of 8 B on 64 ranks", seconds, 60, "seconds")
    yield limit_row("dry run of 8 B on 64 ranks, memory", peak(usage) / MiB, 1024, "MiB")


def peak(usage: resource.struct_rusage) -> int:
    """The most bytes that a process has used; Linux reports KiB, macOS bytes."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory(_: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Bytes of one rank's storages over the formula of `heddle plan`."""
    measured, planned = memory_of_four_ranks(width=256 if quick else 768)
    yield limit_row("memory of a rank of FSDP-4 over the formula", measured / planned, 1.1, "times")


def rows(quick: bool) -> list[dict[str, Any]]:
    """All sections, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        sections = (planning, memory, saving, restart, speed)
        return [row for section in sections for row in section(Path(name), quick)]


if __name__ == "__main__":
    run_rows("benchmarks.ranks", QUESTION, rows)
