"""What does importing 1 GB in shards cost in time and memory?

A random Llama of 1 GB in bfloat16, width 2,048, exported by heddle in eight shards, so that every byte is checked
against the manifest. Time is compared with that of reading and hashing (SHA-256) the same files, both from the page
cache. Memory is the peak of a separate process, minus its memory before the import.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import alternate, limit_row, peak_memory, show, timed, write
from benchmarks.machine import ROOT, THREADS
from heddle.exchange.export import export
from heddle.exchange.load import load
from heddle.machine import measured_choices
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.runtime import set_up_runtime
from heddle.storage.model import save

WIDTH, HIDDEN, SHARDS = 2048, 5632, 8
LAYER = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)  # bytes
ROUNDS = 7


def make(folder: Path, size: int) -> int:
    """Write a folder of about `size` bytes, at least one layer. Return the bytes of its tensors."""
    layer = {
        "repeat": max(1, round(size / LAYER)),
        "mixer": {"kind": "attention", "heads": 16, "position": {"kind": "rope"}},
        "feedforward": {"kind": "gated", "hidden": HIDDEN},
    }
    design = {"vocab_size": 8192, "width": WIDTH, "norm": {"kind": "rms", "eps": 1e-6}, "layers": [layer]}
    model = build(load_config(design), dtype=torch.bfloat16)
    tensor_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert export(model, folder, max_shard_bytes=tensor_bytes // SHARDS).family.model_type == "llama"
    return tensor_bytes


def read_and_hash(folder: Path) -> None:
    """Read and hash every file of a folder, in chunks that stay in the CPU's caches."""
    buffer = bytearray(4 * 2**20)
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])


def report_memory(folder: Path) -> None:
    """Print this process's MB before a load and at its peak."""
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    torch.zeros(8) @ torch.zeros(8)  # torch's memory for its first matrix product does not count
    before = peak_memory()
    load(folder)
    print(json.dumps([before, peak_memory()]))


def measure(root: Path, size: int) -> list[dict[str, Any]]:
    """All rows."""
    folder = root / "exported"
    megabytes = make(folder, size) / 2**20
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    calls = {"load": lambda: load(folder), "read and hash": lambda: read_and_hash(folder)}
    seconds = alternate(calls, ROUNDS)
    pairs = zip(seconds["load"], seconds["read and hash"], strict=True)
    ratios = [load_seconds / read_seconds for load_seconds, read_seconds in pairs]
    rows = [limit_row("load over reading and hashing", statistics.median(ratios), 1.5, "of its time")]
    rows += [
        {"case": name, "value": round(statistics.median(values), 3), "unit": "seconds"}
        for name, values in seconds.items()
    ]
    command = [sys.executable, "-m", "benchmarks.exchange", "--memory", str(folder)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    before, peak = json.loads(output)
    rows.append(limit_row("peak memory of a load", (peak - before) / megabytes, 1.2, "of the size"))
    rows.append({"case": "peak with Python and torch", "value": round(peak), "unit": "MB"})
    rows.append({"case": "size of the folder", "value": round(megabytes), "unit": "MB"})

    def convert() -> None:
        save(load(folder).model, root / "checkpoint")

    rows.append({"case": "load and save as a checkpoint", "value": round(timed(convert), 3), "unit": "seconds"})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--size", type=int, default=1024, help="MB of the folder; only 1024 writes a result")
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        report_memory(options.memory)
    else:
        with tempfile.TemporaryDirectory() as root:
            rows = measure(Path(root), options.size * 2**20)
        show(rows)
        if options.size == 1024:
            write("benchmarks.exchange", "What does importing 1 GB in shards cost in time and memory?", rows)
