"""Fit the planner's speeds to every second of llm-foundry's published trainings, and test them on the others.

python -m tests.distributed.fit_speeds      prints the constants of heddle.lab.plan.costs
"""

import argparse
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from heddle.lab.plan.costs import GPUS, Gpu, ModelCost, RankLayout, Speeds, model_cost, step_time
from tests.distributed.published import mpt_design, mpt_runs

Row = dict[str, str]
FP8_PRODUCTS = 1.155  # speed of training with products in fp8, over bfloat16
START = (0.8, 800.0, 0.3, 0.7, 1000.0, 0.2, 0.9, 0.8, 1.2)
LOWEST = (0.2, 0.0, 0.05, 0.2, 0.0, 0.05, 0.05, 0.0, 1.0)
HIGHEST = (1.0, 5000.0, 1.0, 1.0, 5000.0, 1.0, 1.0, 1.0, 2.0)

_costs: dict[tuple[str, int], ModelCost] = {}


def cost_of(row: Row) -> ModelCost:
    key = row["model"], int(row["sequence_length"])
    if key not in _costs:
        _costs[key] = model_cost(mpt_design(*key), key[1])
    return _costs[key]


def layout_of(row: Row) -> RankLayout:
    return RankLayout(
        replicate=1,
        shard=int(row["gpus"]),
        rows=int(row["rows"]),
        accumulation=int(row["accumulation"]),
        recompute="layers" if row["recomputed"] else "none",
        reshard=row["sharding"] == "full",
        reduce_bytes=2 if row["precision"] == "bf16" else 4,
    )


def tokens_per_second(cost: ModelCost, layout: RankLayout, gpu: Gpu, speeds: Speeds | None = None) -> float:
    """Expected tokens per second on each GPU."""
    tokens = layout.rows * layout.accumulation * cost.sequence_length
    return tokens / step_time(cost, layout, gpu, speeds).seconds


def predicted(row: Row, speeds: Speeds | None = None, fp8_products: float = FP8_PRODUCTS) -> float:
    """Tokens a second on each GPU."""
    gpu = GPUS[row["gpu"]]
    if row["precision"] == "fp8":
        gpu = replace(gpu, tflops=gpu.tflops * fp8_products)
    return tokens_per_second(cost_of(row), layout_of(row), gpu, speeds)


def error(row: Row) -> float:
    """The prediction's relative error, with the constants of the source."""
    return predicted(row) / float(row["tokens_per_second_per_gpu"]) - 1


def speeds_in(parameters: tuple[float, ...], gpu: str) -> Speeds:
    products, half_width, attention = parameters[0:3] if gpu.startswith("a100") else parameters[3:6]
    return Speeds(products, half_width, attention, network=parameters[6], overlap=parameters[7])


def fit(rows: list[Row]) -> tuple[float, ...]:
    """The parameters with the least error of log throughput; single outliers weigh little (soft L1)."""

    def residuals(parameters: tuple[float, ...]) -> list[float]:
        return [
            float(np.log(predicted(row, speeds_in(parameters, row["gpu"]), parameters[8])))
            - float(np.log(float(row["tokens_per_second_per_gpu"])))
            for row in rows
        ]

    scale = [abs(value) for value in START]
    result = least_squares(residuals, START, bounds=(LOWEST, HIGHEST), x_scale=scale, loss="soft_l1", f_scale=0.1)
    return tuple(float(value) for value in result.x)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    fitted = fit(mpt_runs()[::2])
    print("AMPERE", speeds_in(fitted, "a100"), "\nHOPPER", speeds_in(fitted, "h100"), "\nFP8_PRODUCTS", fitted[8])
