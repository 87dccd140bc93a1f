"""The machine of a measurement: its name, and what was measured on it."""

import hashlib
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from heddle.runtime import hardware

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
THREADS = int(os.environ.get("BENCH_THREADS", "2"))  # 1: to try a benchmark while others use the machine


@cache
def machine_name() -> str:
    """A folder's name for this kind of machine: processor, best instructions for products, cores."""
    facts = hardware()
    cpu = re.sub(r"\(\w+\)|@.*|cpu|processor", " ", facts["cpu"].lower())
    words = re.findall(r"[a-z0-9]+", cpu)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    best = [name for name in ("amx_tile", "avx512_bf16", "avx512f", "avx2") if f" {name}" in flags][:1]
    return "-".join([*words, *(name.replace("_", "-") for name in best), f"{facts['cores']}-cores"])


@cache
def source_hash() -> str:
    """A hash of the code that a result depends on: the package's and the benchmarks'."""
    digest = hashlib.sha256()
    for folder in (ROOT / "src/heddle", ROOT / "benchmarks"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def result_file(module: str) -> Path:
    """Where the results of `benchmarks.NAME` on this kind of machine lie."""
    return RESULTS / machine_name() / f"{module.rpartition('.')[2]}.json"


def read_results(module: str) -> dict[str, Any]:
    """The content of the result file; empty if there is none."""
    file = result_file(module)
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content


def limit(name: str) -> float | None:
    """A limit of this machine that `benchmarks.limits` measured: `fp32 products` in FLOP/s, `read` in bytes/s."""
    values = [row["value"] for row in read_results("benchmarks.limits").get("results", []) if row.get("limit") == name]
    return max(values, default=None)
