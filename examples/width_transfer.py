"""The learning rate over four widths, 1 to 8 times the narrowest, with transfer over width and without.

    python examples/width_transfer.py --out runs/width-transfer --jobs 2

It trains one design at each width with rates a factor of 2 apart, on the source code of Python's standard library, and
writes adamw.json and adamw.svg into the folder. Where the best rate is at the edge of the grid, the grid grows. The
same command again continues. It takes 20 minutes of CPU time.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.corpus import prepare_corpus
from heddle.errors import HeddleError
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.runtime import set_up_runtime
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.job import TrainingJob
from heddle.training.loop import Diverged, train
from heddle.training.settings import Settings
from heddle.training.width_transfer import scale_to_width

BASE_WIDTH, MULTIPLES = 32, (1, 2, 4, 8)
FIRST_RATE, GRID = 0.001, range(7)  # rates are FIRST_RATE times powers of 2
BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE = 8, 64, 512
SCALINGS = ("standard", "transfer")
COLORS = ("#56b4e9", "#0072b2", "#009e73", "#d55e00")
Row = dict[str, Any]
RunAll = Callable[[Callable[[Row], Row], Iterable[Row]], Iterable[Row]]  # `map`, or that of a pool


def base_design() -> ModelConfig:
    """Two layers with two heads of 16 dims; a wider model has more heads, not wider ones.

    The initial std is the best of 0.02, 0.05, 0.1 and 0.2 at this width: transfer keeps what was chosen there.
    """
    layer = {
        "repeat": 2,
        "mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
        "feedforward": {"kind": "gated", "hidden": 88},
    }
    return load_config(
        {"vocab_size": VOCAB_SIZE, "width": BASE_WIDTH, "layers": [layer], "initialization": {"std": 0.1}}
    )


def train_run(task: Row) -> Row:
    """Train one run, and return it with its loss, which is None if it diverged."""
    set_up_runtime("cpu", threads=1)
    with progress.quiet():
        corpus = prepare_corpus(["stdlib"], vocab_size=VOCAB_SIZE, max_train_tokens=None)
        settings = Settings(
            steps=task["steps"],
            batch_size=BATCH_SIZE,
            sequence_length=SEQUENCE_LENGTH,
            learning_rate=task["rate"],
            seed=task["seed"],
            optimizer=task["optimizer"],
            transfer_width=BASE_WIDTH if task["scaling"] == "transfer" else None,
        )
        job = TrainingJob(
            scale_to_width(base_design(), task["width"]),
            corpus,
            settings,
            Path(task["out"], task["run"]),
            evaluation=EvaluationBudget(final_tokens=2**15),
        )
        start = time.process_time()
        try:
            bits = train(job).bits_per_byte
        except Diverged:
            bits = None
    return task | {"bits_per_byte": bits, "cpu_seconds": round(time.process_time() - start, 1)}


def best_exponent(rows: Iterable[Row]) -> int:
    """The exponent of the rate with the least mean loss over the seeds; a rate at which a run diverged is none."""
    losses: dict[int, list[float]] = {}
    for row in rows:
        losses.setdefault(row["exponent"], []).append(
            math.inf if row["bits_per_byte"] is None else row["bits_per_byte"]
        )
    return min(losses, key=lambda exponent: sum(losses[exponent]) / len(losses[exponent]))


def run_grid(options: argparse.Namespace, run_all: RunAll) -> list[Row]:
    """Train what the file of results lacks, and return its rows; the file is rewritten after each run."""
    file = options.out / f"{options.optimizer}.json"
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    options.out.mkdir(parents=True, exist_ok=True)
    for width in (BASE_WIDTH * multiple for multiple in options.multiples):
        for scaling in SCALINGS[: 1 if width == BASE_WIDTH else 2]:
            exponents = list(GRID)
            while True:
                tasks = _tasks(options, scaling, width, exponents)
                finished = {row["run"] for row in rows}
                for row in run_all(train_run, [task for task in tasks if task["run"] not in finished]):
                    rows.append({name: value for name, value in row.items() if name != "out"})
                    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                names = {task["run"] for task in tasks}
                best = best_exponent(row for row in rows if row["run"] in names)
                if exponents[0] < best < exponents[-1] or len(exponents) == 2 * len(GRID):
                    break
                exponents = [best - 1, *exponents] if best == exponents[0] else [*exponents, best + 1]
            print(f"{scaling}, width {width}: best rate {FIRST_RATE * 2.0**best:g}", flush=True)
    return [row for row in rows if row["steps"] == options.steps and row["seed"] < options.seeds]


def _tasks(options: argparse.Namespace, scaling: str, width: int, exponents: Sequence[int]) -> list[Row]:
    return [
        {
            "scaling": scaling,
            "optimizer": options.optimizer,
            "width": width,
            "exponent": exponent,
            "rate": FIRST_RATE * 2.0**exponent,
            "seed": seed,
            "steps": options.steps,
            "run": f"{options.optimizer}-{scaling}-{width}-{exponent}-{seed}-{options.steps}",
            "out": str(options.out),
        }
        for exponent in exponents
        for seed in range(options.seeds)
    ]


def curves(rows: Iterable[Row]) -> dict[str, dict[int, list[Row]]]:
    """The rows of each scaling by width. At the base width both are the same runs."""
    result: dict[str, dict[int, list[Row]]] = {scaling: {} for scaling in SCALINGS}
    for row in rows:
        for scaling in SCALINGS if row["width"] == BASE_WIDTH else (row["scaling"],):
            result[scaling].setdefault(row["width"], []).append(row)
    return result


def steps_moved(by_width: dict[int, list[Row]]) -> int:
    """How many steps of the grid the best rate moves between any two widths."""
    best = [best_exponent(rows) for rows in by_width.values()]
    return max(best) - min(best)


def fitted_exponent(curve: Sequence[Row]) -> float:
    """The exponent at the vertex of a parabola through the best rate and its neighbors, finer than the grid."""
    means, best = mean_losses(curve), best_exponent(curve)
    if best - 1 not in means or best + 1 not in means:
        return float(best)
    left, middle, right = (means[best + offset] for offset in (-1, 0, 1))
    return best + (left - right) / (2 * (left - 2 * middle + right))


def factor_moved(by_width: dict[int, list[Row]]) -> float:
    """The largest fitted best rate of any width, divided by the least."""
    exponents = [fitted_exponent(curve) for curve in by_width.values()]
    return float(2.0 ** (max(exponents) - min(exponents)))


def render_svg(rows: Iterable[Row]) -> str:
    """Two charts, loss against rate, a line for each width with a ring at its best rate; for light and dark pages."""
    by_scaling = curves(rows)
    points = [row for by_width in by_scaling.values() for curve in by_width.values() for row in curve]
    losses = sorted(row["bits_per_byte"] for row in points if row["bits_per_byte"] is not None)
    low, high = losses[0] - 0.02, losses[len(losses) * 9 // 10]  # losses near divergence would flatten the rest
    exponents = sorted({row["exponent"] for row in points})
    left, width, height = 46, 320, 230
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (left + width) + 20} {height + 104}" role="img">',
        "<title>Bits per byte against the learning rate at four widths, without transfer and with it</title>",
        "<style>text{font:13px system-ui,sans-serif;fill:#1f2328}.small{font-size:11px;fill:#59636e}"
        ".grid{stroke:#d1d9e0}.line{fill:none;stroke-width:2}.best{fill:none;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.small{fill:#9198a1}.grid{stroke:#3d444d}}</style>",
    ]
    for panel, scaling in enumerate(SCALINGS):
        origin = panel * (left + width + 10) + left
        x = lambda exponent: origin + 12 + (width - 30) * (exponent - exponents[0]) / (exponents[-1] - exponents[0])  # noqa: B023, E731
        y = lambda bits: 30 + height * (1 - (min(bits, high) - low) / (high - low))  # noqa: E731
        moved = factor_moved(by_scaling[scaling])
        parts.append(f'<text x="{origin}" y="16">{scaling}: the best rate moves by a factor of {moved:.1f}</text>')
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            bits = low + share * (high - low)
            parts.append(
                f'<line class="grid" x1="{origin}" x2="{origin + width}" y1="{y(bits):.1f}" y2="{y(bits):.1f}"/>'
            )
            parts.append(
                f'<text class="small" x="{origin - 6}" y="{y(bits) + 4:.1f}" text-anchor="end">{bits:.2f}</text>'
            )
        for exponent in exponents[::2]:
            rate = f"{FIRST_RATE * 2.0**exponent:g}"
            parts.append(
                f'<text class="small" x="{x(exponent):.1f}" y="{height + 48}" text-anchor="middle">{rate}</text>'
            )
        parts.append(f'<text class="small" x="{origin}" y="{height + 66}">bits per byte over the learning rate</text>')
        for number, (model_width, curve) in enumerate(sorted(by_scaling[scaling].items())):
            color, means = COLORS[number % len(COLORS)], mean_losses(curve)
            line = " ".join(f"{x(exponent):.1f},{y(bits):.1f}" for exponent, bits in sorted(means.items()))
            best = best_exponent(curve)
            parts.append(f'<polyline class="line" stroke="{color}" points="{line}"/>')
            parts.append(f'<circle class="best" stroke="{color}" cx="{x(best):.1f}" cy="{y(means[best]):.1f}" r="6"/>')
            legend, level = origin + number * width / 4, height + 88
            parts.append(
                f'<path class="line" stroke="{color}" d="M{legend:.0f} {level}h14"/>'
                f'<text class="small" x="{legend + 18:.0f}" y="{level + 4}">width {model_width}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean_losses(curve: Iterable[Row]) -> dict[int, float]:
    """The mean loss over the seeds at each exponent where no run diverged."""
    losses: dict[int, list[float | None]] = {}
    for row in curve:
        losses.setdefault(row["exponent"], []).append(row["bits_per_byte"])
    finite = {exponent: [bits for bits in values if bits is not None] for exponent, values in losses.items()}
    return {exponent: sum(bits) / len(bits) for exponent, bits in finite.items() if len(bits) == len(losses[exponent])}


def main() -> None:
    """Train the grid, and write the results and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/width-transfer"))
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--multiples", type=int, nargs="+", default=list(MULTIPLES))
    options = parser.parse_args()
    try:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            rows = run_grid(options, pool.map)
    except HeddleError as error:
        raise SystemExit(str(error)) from None
    for scaling, by_width in curves(rows).items():
        moved = steps_moved(by_width)
        print(f"{scaling}: the best rate moves by {moved} steps of a factor of 2 over {len(by_width)} widths")
        for width, curve in sorted(by_width.items()):
            bits = mean_losses(curve)[best_exponent(curve)]
            rate = FIRST_RATE * 2 ** fitted_exponent(curve)
            print(f"  width {width}: fitted best rate {rate:.4f}, {bits:.4f} bits per byte")
    (options.out / f"{options.optimizer}.svg").write_text(render_svg(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
