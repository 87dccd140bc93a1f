"""Invented results of conversions of realistic shape, for tests and for looking at."""

from functools import cache
from typing import Any

import numpy as np

from heddle.lab.conversion.results import (
    CONVERTED,
    HEALED,
    ORIGINAL,
    ConversionResults,
    LayerError,
    MeasuredText,
    ModelResult,
)
from heddle.training.evaluation.text_recall import NeedleScores

WINDOWS, POSITIONS = 128, [(0, 16), (16, 32), (32, 64), (64, 128), (128, 256)]
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9, None)
BYTES_PER_TOKEN = 2304  # of the original's state: 3 layers of 16 heads of 8, keys and values, float32
METHODS = {"contiguous, mean": 1.0, "similar-outputs, aligned": 0.35, "contiguous, first": 8.0}


@cache
def scores(mean: float, seed: int, rows: int, size: int = 700, noise: float = 0.0) -> list[tuple[float | None, int]]:
    """Scores around a mean: the same text gives the same deviations, and `noise` differs between seeds."""
    text = np.random.default_rng(5).normal(0, 0.3, rows)
    sizes = size + np.random.default_rng(6).integers(0, 60, rows)
    own = np.random.default_rng(seed).normal(0, noise, rows) if noise else np.zeros(rows)
    return list(zip(((mean + text + own) * sizes).tolist(), sizes.tolist(), strict=True))


def model(name: str, stage: str, method: str, heads: int = 16, added: float = 0.0) -> ModelResult:
    """A model of 16 heads with `heads` key/value heads, whose loss is 2.05 + added."""
    seed = sum(map(ord, name))
    loss = 2.05 + added
    left = np.exp(-3 * added)
    noise = min(0.02, added / 4)
    return ModelResult(
        name=name,
        stage=stage,
        method=method,
        source=f"runs/{name}",
        key=f"key of {name}",
        design_key=f"kv_heads={heads}",
        summary=f"3 layers, width 128: attention with 16 heads, {heads} kv heads, rope",
        architecture="LlamaForCausalLM",
        parameters=900_000 + 12_000 * heads,
        flops_per_token=2.1e6,
        state_bytes=[(context, context * BYTES_PER_TOKEN * heads // 16) for context in (2048, 8192, 32768)],
        windows=scores(loss, seed, WINDOWS, noise=noise),
        positions=[scores(loss + 0.4 / (i + 1), seed + i, WINDOWS, 40 * 2**i, noise) for i in range(len(POSITIONS))],
        first_spans=scores(loss + 0.1, seed, 64, 60, noise),
        repeated_spans=scores(loss + 0.1 - 1.2 * left, seed + 1, 64, 60, noise),
        needles=[
            NeedleScores(
                depth,
                scores(loss - (0.9 * left if depth is not None else 0), seed, 32, 20, noise),
                [(float(round(8 * (0.3 + 0.5 * left * (depth is not None)))), 8) for _ in range(32)],
            )
            for depth in DEPTHS
        ],
        layer_errors=[]
        if stage == ORIGINAL
        else [LayerError(i, min(0.9, added * (i + 1)), min(0.9, added * (i + 1) / 3)) for i in range(3)],
        frequencies=[scores(loss * (0.2 + 0.2 * i), seed + i, WINDOWS, 60, noise) for i in range(10)],
    )


def results(models: list[ModelResult], **fields: Any) -> ConversionResults:
    """Results with a text and a machine around the models, and two rounds of speeds of each design."""
    text = MeasuredText("stdlib", "9bb56a66e47b54ed", 256, WINDOWS, 91_000, POSITIONS, 256, 64, 32, 32, 16)
    whole = ConversionResults(
        heddle="0.1.0",
        created="2026-11-22T12:00:00Z",
        command="heddle convert runs/a0 small --to kv_heads=4 --heal 200000",
        source="runs/a0",
        hardware={"cpu": "AMD EPYC 9B45", "cores": 2, "threads": 2, "device": "cpu", "torch": "2.13.0"},
        text=text,
        settings={"layer_rows": 8},
        models=models,
        **fields,
    )
    for each in models:
        fraction = int(each.design_key.partition("=")[2]) / 16
        speeds = [(context, 900 / (1 + fraction * context / 4096)) for context in (512, 2048, 8192)]
        rounds = [
            {
                phase: [(c, [s * factor * k for k in (0.97, 1, 1.02)]) for c, s in speeds]
                for phase in ("prefill", "decode")
            }
            for factor in (1.0, 0.98)
        ]
        whole.speeds[each.design_key] = rounds
    return whole


def single() -> ConversionResults:
    """One conversion, before and after healing."""
    return results(
        [
            model("original", ORIGINAL, ""),
            model("converted", CONVERTED, "kv_heads=4", 4, 0.12),
            model("healed", HEALED, "kv_heads=4", 4, 0.011),
        ]
    )


def sweep() -> ConversionResults:
    """Three methods at three sizes, before and after healing."""
    models = [model("original", ORIGINAL, "")]
    for method, factor in METHODS.items():
        for heads in (8, 4, 2):
            added = 0.012 * factor * (16 / heads) ** 1.4 / 2
            models.append(model(f"{method}, {heads} kv heads", CONVERTED, method, heads, added))
            models.append(model(f"{method}, {heads} kv heads, healed", HEALED, method, heads, 0.08 * added))
    return results(models)


def broken() -> ConversionResults:
    """A conversion that gives no finite number and has neither recall nor layers to compare."""
    whole = single()
    nothing = [(None, size) for _, size in whole.models[1].windows]
    for index in (1, 2):
        fields = vars(whole.models[index]) | {
            "windows": nothing,
            "positions": [nothing] * len(POSITIONS),
            "frequencies": [nothing] * 10,
            "first_spans": [(None, size) for _, size in whole.models[1].first_spans],
            "layer_errors": [],
        }
        whole.models[index] = ModelResult(**fields)
    whole.speeds.clear()
    return whole
