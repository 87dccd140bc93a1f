"""What can this machine reach: products by dtype, route and shape, and reading memory?

Shapes are those of the 100 M design: square, a feed-forward's, the vocabulary's, and one row of each. The route of
float32 products is torch's default, or the one that `heddle.runtime` chooses where its error is that of float32.
"""

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import run_rows
from benchmarks.machine import THREADS
from heddle.lab.bench.run import DTYPES, measure_limits, product_rate
from heddle.machine import measured_choices
from heddle.numerics.linear import linear, packed_weights
from heddle.runtime import fastest_seconds, set_up_runtime

QUESTION = "What can this machine reach: products by dtype, route and shape, and reading memory?"
SHAPES = {"square": (2048, 2048, 2048), "feed-forward": (2048, 768, 2048), "vocabulary": (512, 768, 32000)}
QUICK_SHAPES = {"square": (256, 256, 256)}
ONE_ROW = {"feed-forward": (768, 2048), "vocabulary": (768, 32000)}


def product_rows(shapes: dict[str, tuple[int, int, int]]) -> list[dict[str, Any]]:
    """FLOP/s of every dtype, route and shape. The limit of a dtype is the fastest of them."""
    torch.set_num_threads(THREADS)
    torch.set_float32_matmul_precision("highest")
    routes = [("fp32", "torch's route")]
    rates = {("fp32", "torch's route", shape): product_rate(DTYPES["fp32"], shapes[shape]) for shape in shapes}
    set_up_runtime("cpu", THREADS, choices=measured_choices(THREADS))
    routes = [("fp32", "heddle's route"), ("bf16", "torch's route")]
    rates |= {
        (dtype, route, shape): product_rate(DTYPES[dtype], shapes[shape]) for dtype, route in routes for shape in shapes
    }
    return [
        {"case": f"{dtype} products, {route}, {shape}", "value": rate, "unit": "FLOP/s", "limit": f"{dtype} products"}
        for (dtype, route, shape), rate in rates.items()
    ]


def one_row_rate(dtype: torch.dtype, inputs: int, outputs: int, packed: bool) -> float:
    """Bytes of weights per second of a product of one row. Several weights in turn, so that none stays in a cache."""
    weights = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(max(1, 2**27 // (inputs * outputs * 4)))]
    x = torch.ones(1, inputs, dtype=dtype)

    def call() -> list[Tensor]:
        return [linear(x, weight) for weight in weights]

    def in_packed() -> list[Tensor]:
        with packed_weights(cache):
            return call()

    cache: Any = {}
    with torch.no_grad():
        seconds = fastest_seconds(in_packed if packed else call)
    return len(weights) * inputs * outputs * dtype.itemsize / seconds


def rows(quick: bool) -> list[dict[str, Any]]:
    """All limits."""
    measured = product_rows(QUICK_SHAPES if quick else SHAPES)
    limits = measure_limits("cpu")
    for name in ("read", "copy"):
        measured.append(
            {"case": f"memory, {name}", "value": limits[f"{name}_bytes_per_second"], "unit": "bytes/s", "limit": name}
        )
    measured.append({"case": "a small operation", "value": limits["launch_seconds"], "unit": "seconds"})
    for name, dtype in DTYPES.items():
        for shape, (inputs, outputs) in ({} if quick else ONE_ROW).items():
            for packed in (False, True):
                case = f"{name}, one row, {shape}, {'packed' if packed else 'plain'}"
                rate = one_row_rate(dtype, inputs, outputs, packed)
                measured.append({"case": case, "value": rate, "unit": "bytes/s"})
    return measured


if __name__ == "__main__":
    run_rows("benchmarks.limits", QUESTION, rows)
