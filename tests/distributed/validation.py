"""What the planner predicts for published trainings, beside what was published."""

from typing import Any, NamedTuple

import numpy as np

from heddle.lab.plan.costs import GIB, GPUS, RankLayout, model_cost, rank_memory
from tests.distributed.fit_speeds import error, tokens_per_second
from tests.distributed.published import mpt_runs, published_design, published_runs


class Comparison(NamedTuple):
    """A published number and the planner's."""

    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def flops(row: dict[str, Any]) -> Comparison:
    """TFLOP/s of a GPU: published ones, and ours from the published tokens a second."""
    cost = model_cost(published_design(row["design"]), row["sequence_length"])
    per_token = 3 * cost.forward_flops / cost.sequence_length
    return Comparison(row["tflops"], per_token * row["tokens_per_second"] / 1e12)


def memory(row: dict[str, Any]) -> Comparison:
    """GiB of a rank."""
    cost = model_cost(published_design(row["design"]), row["sequence_length"])
    return Comparison(row["gib"], sum(rank_memory(cost, layout_of(row)).values()) / GIB)


def speed(row: dict[str, Any]) -> Comparison:
    """Tokens a second of a GPU."""
    cost = model_cost(published_design(row["design"]), row["sequence_length"])
    return Comparison(row["tokens_per_second"], tokens_per_second(cost, layout_of(row), GPUS[row["gpu"]]))


def layout_of(row: dict[str, Any]) -> RankLayout:
    return RankLayout(1, row["gpus"], row["rows"], recompute=row["recompute"], whole_logits=True)


def speed_errors() -> tuple[list[float], list[float]]:
    """Relative errors of throughput: of the trainings that the constants were fitted to, and of the others."""
    errors = [error(row) for row in mpt_runs()]
    return errors[::2], errors[1::2]


def tables() -> dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Header and rows of each table of docs/plan/accuracy.md."""
    flop_rows: list[tuple[str, ...]] = []
    for row in published_runs("flops"):
        result = flops(row)
        name = row["design"].split("/")[-1]
        where = f"{row['gpus']:,} × {row['gpu']}, {row['layout']}"
        flop_rows.append(
            (name, where, f"{result.published:,.0f}", f"{result.predicted:,.1f}", f"{result.error:+.2%}", row["source"])
        )
    memory_rows: list[tuple[str, ...]] = []
    for row in published_runs("memory"):
        size, rate = memory(row), speed(row)
        compiled = "compiled" if row["compiled"] else "eager"
        where = (
            f"{row['gpus']} × {row['gpu']}, {row['rows']} × {row['sequence_length']:,}, {row['recompute']}, {compiled}"
        )
        numbers = (f"{size.published:.1f}", f"{size.predicted:.1f}", f"{size.error:+.0%}")
        rates = (f"{rate.published:,.0f}", f"{rate.predicted:,.0f}", f"{rate.error:+.0%}")
        memory_rows.append((where, *numbers, *rates, row["source"]))
    speed_rows: list[tuple[str, ...]] = []
    for name, errors in zip(("fitted to", "not seen"), speed_errors(), strict=True):
        sizes = np.abs(errors)
        numbers = (f"{np.median(sizes):.1%}", f"{np.percentile(sizes, 90):.1%}", f"{sizes.max():.0%}")
        speed_rows.append((name, str(len(errors)), *numbers))
    return {
        "flops": (("model", "trained on", "published TFLOP/s", "heddle's count", "difference", "source"), flop_rows),
        "memory": (
            ("Llama 3.1 8B on", "published GiB", "planned", "difference", "published tokens/s", "planned", "difference",
             "source"),
            memory_rows,
        ),
        "speed": (("trainings", "number", "median error", "90 % below", "largest"), speed_rows),
    }  # fmt: skip
