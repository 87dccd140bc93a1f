"""64 thin layers with five kinds of residual: gradient norms at the start and the loss over steps.

    python examples/depth_stress.py --out depth-stress

It trains each kind on the source code of Python's standard library, byte by byte, and writes depth-stress.json and
depth-stress.svg. It takes some minutes on a CPU. The results are in docs/residuals.md.
"""

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heddle
from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import Settings, scheduled_learning_rate
from heddle.training.step import accumulate_gradients, apply_gradients

DESIGNS = {
    "post-norm": ("post_norm", "#d55e00"),
    "pre-norm": ("pre_norm", "#0072b2"),
    "reordered": ("reordered", "#56b4e9"),
    "sandwich": ("sandwich", "#009e73"),
    "ResiDual": ("residual_dual", "#cc79a7"),
}
WIDTH, BATCH_SIZE, SEQUENCE_LENGTH, MAX_TEXT_BYTES = 32, 8, 64, 4_000_000
JsonObject = dict[str, Any]


def residual_design(kind: str, layers: int) -> JsonObject:
    """A design of thin layers with Glorot initialization and no scaling of branches with depth."""
    return {
        "vocab_size": 256,
        "width": WIDTH,
        "norm": {"kind": "layer"},
        "residual": {"kind": kind},
        "initialization": {"std": WIDTH**-0.5, "depth_scaled": False},
        "layers": [
            {
                "repeat": layers,
                "mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
                "feedforward": {"kind": "mlp", "hidden": 2 * WIDTH, "activation": "relu"},
            }
        ],
    }


def standard_library(max_bytes: int = MAX_TEXT_BYTES) -> np.ndarray:
    """Bytes of the standard library's modules, in the order of their names; uint8 [at most max_bytes]."""
    modules, size = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        modules.append(np.frombuffer(file.read_bytes(), dtype=np.uint8))
        size += len(modules[-1])
        if size >= max_bytes:
            break
    return np.concatenate(modules)[:max_bytes]


def random_batch(text: np.ndarray, step: int) -> Batch:
    """Rows from random positions of the text; the same step gives the same rows."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQUENCE_LENGTH - 1, BATCH_SIZE)
    tokens = text[starts[:, None] + np.arange(SEQUENCE_LENGTH + 1)].astype(np.int64)
    return Batch(tokens, ((SEQUENCE_LENGTH,),) * BATCH_SIZE, np.arange(BATCH_SIZE))


def layer_gradient_norms(model: Decoder, batch: Batch) -> list[float]:
    """The gradient norm of each layer's parameters for one batch."""
    accumulate_gradients(model, batch, (0, 0))
    norms = []
    for layer in model.layers:
        layer_gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(layer_gradients)))
    model.zero_grad(set_to_none=True)
    return norms


def measure_design(kind: str, text: np.ndarray, layers: int, settings: Settings) -> JsonObject:
    """Gradient norms at the start, and the loss in nats per byte at every step."""
    model = heddle.build(heddle.load_config(residual_design(kind, layers)), seed=settings.seed).train()
    norms = layer_gradient_norms(model, random_batch(text, 0))
    optimizer = build_optimizer(model, settings.weight_decay)
    losses = []
    for step in range(settings.steps):
        gradients = accumulate_gradients(model, random_batch(text, 1 + step), (settings.seed, step))
        step_result = apply_gradients(
            model, optimizer, gradients, scheduled_learning_rate(settings, step), settings.max_gradient_norm
        )
        losses.append(round(step_result.loss, 4))
    return {"kind": kind, "gradient_norms": [float(f"{norm:.4g}") for norm in norms], "losses": losses}


def window_means(values: Sequence[float], window: int) -> list[float]:
    """The means of consecutive windows of values."""
    windows = [values[start : start + window] for start in range(0, len(values), window)]
    return [sum(part) / len(part) for part in windows]


class Chart:
    """One chart of an SVG: axes with ticks, and lines with their names at the right end."""

    def __init__(self, left: float, title: str, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.left, self.x, self.y = left, x, y
        self.elements = [f'<text class="title" x="{left}" y="24">{escape(title)}</text>']
        self.line_labels: list[tuple[float, str, str]] = []

    def to_page(self, x: float, y: float) -> tuple[float, float]:
        """The page coordinates of a point of the chart."""
        x_fraction = (x - self.x[0]) / (self.x[1] - self.x[0])
        y_fraction = (min(max(y, self.y[0]), self.y[1]) - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + 340 * x_fraction, 290 - 245 * y_fraction

    def ticks(
        self, values: Sequence[float], format_value: Callable[[float], str], horizontal: bool, axis_name: str = ""
    ) -> None:
        """Add tick labels and the name of an axis; the vertical axis also gets a grid line for each tick."""
        for value in values:
            x, y = self.to_page(value, self.y[0]) if horizontal else self.to_page(self.x[0], value)
            if not horizontal:
                self.elements.append(f'<path class="grid" d="M{x:.1f} {y:.1f}h340"/>')
            attributes = (
                f'x="{x:.1f}" y="308" text-anchor="middle"'
                if horizontal
                else f'x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end"'
            )
            self.elements.append(f"<text {attributes}>{format_value(value)}</text>")
        if axis_name:
            self.elements.append(
                f'<text x="{self.left + 170:.1f}" y="328" text-anchor="middle">{escape(axis_name)}</text>'
            )

    def line(self, points: Sequence[tuple[float, float]], color: str, name: str) -> None:
        """Add a line, with its name at its right end."""
        page_points = [self.to_page(x, y) for x, y in points if math.isfinite(y)]
        if page_points:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in page_points)
            self.elements.append(f'<path class="line" stroke="{color}" d="M{path}"/>')
            self.line_labels.append((page_points[-1][1], color, name))

    def render(self) -> str:
        """The SVG elements of the chart; names that would overlap are moved apart."""
        labels = sorted(self.line_labels)
        label_ys: list[float] = []
        for y, _, _ in labels:
            label_ys.append(max(y, label_ys[-1] + 15) if label_ys else y)
        overflow = max(0.0, label_ys[-1] - 286) if label_ys else 0.0  # the last name must not overlap the axis below
        label_elements = []
        for (_, color, name), y in zip(labels, label_ys, strict=True):
            attributes = f'x="{self.left + 347:.1f}" y="{y - overflow + 4:.1f}"'
            label_elements.append(f'<text {attributes} style="fill:{color};font-weight:600">{escape(name)}</text>')
        return "\n".join(self.elements + label_elements)


STYLE = """text { font: 12px system-ui, sans-serif; fill: #59616e; } .title { font-weight: 600; fill: #1d2129; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.grid { stroke: #ebe8e1; }"""


def render_svg(results: dict[str, JsonObject], layers: int, steps: int) -> str:
    """The SVG of both charts."""
    norms = [math.log10(max(norm, 1e-12)) for run in results.values() for norm in run["gradient_norms"]]
    low, high = math.floor(min(norms)), math.ceil(max(norms))
    norm_chart = Chart(60, "Norm of each layer's gradient at the start", (0, layers - 1), (low, max(high, low + 1)))
    tick_step = max(1, math.ceil((high - low) / 8))
    norm_chart.ticks(range(low, high + 1, tick_step), lambda value: f"1e{value:.0f}", horizontal=False)
    norm_chart.ticks(
        range(0, layers, max(1, layers // 4)), lambda value: f"{value:.0f}", horizontal=True, axis_name="layer"
    )
    window = max(1, steps // 50)
    curves = {name: window_means(run["losses"], window) for name, run in results.items()}
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    bottom, top = math.floor(2 * min(finite)) / 2, min(math.ceil(2 * max(finite)) / 2, 6.0)
    loss_chart = Chart(560, "Loss, nats per byte", (0, steps), (bottom, max(top, bottom + 0.5)))
    count = round(2 * (top - bottom))
    loss_chart.ticks([bottom + half / 2 for half in range(count + 1)], lambda value: f"{value:.1f}", horizontal=False)
    loss_chart.ticks(
        [steps * part / 4 for part in range(5)], lambda value: f"{value:.0f}", horizontal=True, axis_name="step"
    )
    for name, run in results.items():
        color = DESIGNS[name][1]
        norm_chart.line(list(enumerate(math.log10(max(norm, 1e-12)) for norm in run["gradient_norms"])), color, name)
        loss_chart.line([(window * (i + 0.5), value) for i, value in enumerate(curves[name])], color, name)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 990 340" role="img">'
        f"<title>{layers} layers: gradients and losses by kind of residual</title><style>{STYLE}</style>"
        f'<rect width="990" height="340" fill="#ffffff"/>{norm_chart.render()}\n{loss_chart.render()}</svg>\n'
    )


def main() -> None:
    """Measure every design, and write the results and the charts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("depth-stress"))
    options = parser.parse_args()
    text, results = standard_library(), {}
    settings = Settings(steps=options.steps, learning_rate=1e-3, warmup=20)
    for name, (kind, _) in DESIGNS.items():
        start_time = time.perf_counter()
        results[name] = run = measure_design(kind, text, options.layers, settings)
        norms, final_loss = run["gradient_norms"], window_means(run["losses"], max(1, options.steps // 10))[-1]
        line = (
            f"gradient norms {norms[0]:.1e} (first layer) to {norms[-1]:.1e} (last), loss {final_loss:.3f} at the end"
        )
        print(f"{name}: {line}, {time.perf_counter() - start_time:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "layers": options.layers,
        "width": WIDTH,
        "rows": BATCH_SIZE,
        "length": SEQUENCE_LENGTH,
        "settings": settings.identity(),
    }
    (options.out / "depth-stress.json").write_text(json.dumps(report | {"designs": results}) + "\n", encoding="utf-8")
    (options.out / "depth-stress.svg").write_text(render_svg(results, options.layers, options.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
