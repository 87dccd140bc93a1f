"""`python -m evidence.search_kills`: a search that is killed at random times ends with the same bits.

A small model is trained, and `heddle convert --search`, healed in two stages, runs once undisturbed and once through
SIGKILLs at random seconds of its way, until it ends; then it begins anew, until there were as many kills as asked for.
All must leave the same tensors, logs of healing and results of the search, but for measured times.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, machine_name
from heddle.lab.compare.results import plain
from heddle.lab.conversion.results import parse_results
from heddle.runtime import hardware
from heddle.storage.file_io import read_json_file
from heddle.storage.folder import tensors_sha256

RESULT = RESULTS / machine_name() / "search_kills.json"
MODEL = [
    "train", "preset:gqa-tiny", "--data", "stdlib", "--vocab-size", "512", "--steps", "60", "--batch-size", "4",
    "--sequence-length", "64",
]  # fmt: skip
SEARCH = [
    "--search", "state@2k=50%", "--only", "kv_heads=1", "--only", "window=16", "--only", "gated_delta,fit_steps=30",
    "--data", "stdlib", "--calibration-tokens", "4096", "--sequence-length", "64", "--heal", "8192",
    "--heal-stage", "50%:layers", "--heal-stage", "50%:logits", "--report-tokens", "512",
    "--speed-context-length", "32", "--quiet", "--threads", "1",
]  # fmt: skip
MEASURED = ("seconds", "tokens_per_second", "peak_memory_bytes", "chain")  # the chain hashes the others, too


def heddle(*words: str) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "heddle", *words], stdout=subprocess.DEVNULL)


def ending(out: Path) -> dict[str, Any]:
    """What equal commands have in common: the tensors, how they were made, and the healing's log without times."""
    logs = {}
    for file in sorted(out.rglob("log.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        logs[str(file.relative_to(out))] = [
            {name: value for name, value in line.items() if name not in MEASURED} for line in lines
        ]
    found = parse_results(read_json_file(out / "convert.json")).search
    assert found is not None
    conversion = json.loads((out / "conversion.json").read_text(encoding="utf-8"))
    search = plain(replace(found, seconds=0.0))
    return {"tensors": tensors_sha256(out), "conversion": conversion, "search": search, "logs": logs}


def main() -> int:
    """Parse the arguments, run both searches, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m evidence.search_kills", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/search-kills"), help="where the work is kept")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model, rng = given.out / "model", random.Random(given.seed)
    if not model.is_dir() and heddle(*MODEL, "--out", str(model)).wait():
        return 1
    words = ["convert", str(model)]
    began = time.monotonic()
    if heddle(*words, str(given.out / "whole"), *SEARCH).wait():
        return 1
    whole, kills = time.monotonic() - began, list[dict[str, float]]()
    expected, ended, number = ending(given.out / "whole"), list[bool](), 0
    while len(kills) < given.kills or kills[-1]["run"] == number:
        out = given.out / f"killed-{number}"
        process, delay = heddle(*words, str(out), *SEARCH), rng.uniform(0, whole)
        try:
            process.wait(delay if len(kills) < given.kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            files = sum(each.is_file() for each in out.with_name(f"{out.name}.work").rglob("*"))
            kills.append({"run": number, "seconds": round(delay, 2), "files": files})
            print(f"run {number}: killed after {delay:.1f} s, {files} files", flush=True)
            continue
        if process.returncode:
            return 1
        ended.append(ending(out) == expected)
        number += 1
    equal = all(ended)
    content = {
        "date": datetime.now(UTC).date().isoformat(), "cpu": hardware()["cpu"], "search": SEARCH, "results": kills,
        "seconds_undisturbed": round(whole, 1), "runs": len(ended), "equal": equal,
        "tensors": expected["tensors"],
    }  # fmt: skip
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{len(kills)} kills of {len(ended)} searches: {'equal' if equal else 'DIFFERENT'}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
