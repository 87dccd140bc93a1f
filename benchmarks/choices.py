"""How much slower than the best measured way is what heddle chose on this machine, and on stand-ins for others?

The choices follow from one measurement, their regret from a second one. Stand-ins have fewer of the machine's
instructions: `ONEDNN_MAX_CPU_ISA`, `MKL_ENABLE_INSTRUCTIONS` and `ATEN_CPU_CAPABILITY` take them away.
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.harness import run_rows
from benchmarks.machine import ROOT, THREADS

QUESTION = (
    "How much slower than the best measured way is what heddle chose on this machine, and on stand-ins for others?"
)
STAND_INS = {
    "the machine": {},
    "AVX-512 without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}
MEASURE = "from heddle.machine import MEASURES; import json, torch; torch.set_num_threads({threads})\n"
MEASURE += "print(json.dumps([{{name: measure() for name, measure in MEASURES.items()}} for _ in range(2)]))"


def regrets(chosen: dict[str, Any], measured: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """By what is chosen: the choice of one measurement, and the best speed of another over that of the choice."""
    found = {}
    products = measured["products"]["speedups"]
    route = chosen["products"]["matmul"]
    found["float32 products"] = route, max(products.values()) / products[route]
    for name, row in measured["packing"].items():
        way = chosen["packing"][name]["way"]
        found[name] = way, max(row["speedups"].values(), default=1.0) / row["speedups"].get(way, 1.0)
    for length, ratio in measured["attention"]["speedups"].items():
        is_plain = int(length) in chosen["attention"]["triangle_lengths"]
        ways = {"plain products": ratio, "fused": 1.0}
        way = "plain products" if is_plain else "fused"
        found[f"attention of {length}"] = way, max(ways.values()) / ways[way]
    return found


def rows(quick: bool) -> list[dict[str, Any]]:
    """The regret of every choice, then the median and the worst of each machine."""
    measured = []
    for name, environment in STAND_INS.items():
        for threads in (1, THREADS):
            command = [sys.executable, "-c", MEASURE.format(threads=threads)]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True, text=True
            )
            found = regrets(*json.loads(done.stdout))
            where = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            values = [ratio for _, ratio in found.values()]
            measured += [
                {"case": f"{where}, {what}: {way}", "value": ratio, "unit": "of the best's time"}
                for what, (way, ratio) in found.items()
            ]
            for label, value in (("median", statistics.median(values)), ("worst", max(values))):
                measured.append({"case": f"{where}, {label}", "value": value, "unit": "of the best's time"})
        if quick:
            break
    return measured


if __name__ == "__main__":
    run_rows("benchmarks.choices", QUESTION, rows)
