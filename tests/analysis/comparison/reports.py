"""Invented comparison reports of realistic shape, for tests and for looking at."""

import copy
import io
from typing import Any

import numpy as np
from rich.console import Console

from heddle.lab.compare.probes import RECALL_PROBES
from heddle.training.evaluation.length_extrapolation import ExtrapolationResult
from tests.analysis.comparison.plain import (
    field_effects,
    length_changes,
    length_result,
    mean_bits_per_byte,
    pair_report,
    print_report,
    verdict_sentences,
)

CONTEXTS = [1024 * 2**power for power in range(8)]
SAMPLE = (
    'def read(path):\n    """Return the lines of a file."""\n    with open(path) as source:\n'
    "        return [line.rstrip() for line in source if line.strip()]\n\n\nclass Reader:\n    def __init__"
)
# name: (offset of bits per byte, spread of seeds, state bytes a token, fixed ones, train and decode speed)
TINY = {
    "mha-tiny": (0.0, 0.004, 3072, 0, 21_400, 238),
    "gqa-tiny": (0.011, 0.008, 768, 0, 24_100, 305),
    "window-tiny": (0.031, 0.003, 0, 3072 * 512, 25_900, 342),
    "hybrid-delta-tiny": (-0.024, 0.003, 512, 420_000, 17_300, 321),
}
SUMMARIES = {
    "mha-tiny": "6 layers, width 128: attention with 4 heads, rope; gated feedforward 352",
    "gqa-tiny": "6 layers, width 128: attention with 4 heads, 1 kv head, rope; gated feedforward 400",
    "window-tiny": "6 layers, width 128: attention with 4 heads, window 512, rope; gated feedforward 352",
    "hybrid-delta-tiny": "6 layers, width 128: 5 of gated delta, 1 of attention; gated feedforward 320",
}


def design(name: str, traits: tuple[float, float, int, int, int, int], seeds: list[int], index: int) -> dict[str, Any]:
    """One design with finished runs, measured on windows shared by all designs."""
    offset, spread, per_token, fixed, train, decode = traits
    text = np.random.default_rng(5).normal(2.31, 0.35, 128)
    own = np.random.default_rng(100 + index).normal(offset, 0.012, 128)
    runs = []
    for seed in seeds:
        luck = np.random.default_rng([index, seed]).normal(0, spread) + np.random.default_rng(seed).normal(0, 0.01)
        sizes = np.full(128, 1000) + np.random.default_rng(6).integers(0, 60, 128)
        bits = (text + own + luck) * sizes
        final = float(bits.sum() / sizes.sum())
        tokens = np.linspace(10_000, 500_000, 50).astype(int)
        noise = np.random.default_rng([7, index, seed]).normal(0, 0.012, 50)
        curve = final + 1.7 * ((tokens / 10_000) ** -0.55 - 50**-0.55) + noise * np.linspace(1, 0, 50)
        run = {
            "seed": seed,
            "status": "done",
            "bits_per_byte": final,
            "train_tokens": 500_000,
            "seconds": 500_000 / train + seed * 0.1,
            "train_tokens_per_second": train * (1 - 0.004 * seed),
            "train_speed_range": (train * 0.97, train * 1.02),
            "peak_memory_bytes": 9.1e8 - 4e7 * index,
            "skipped_steps": 0,
            "curve": [[int(token), float(value)] for token, value in zip(tokens, curve, strict=True)],
            "windows": [[float(b), int(s)] for b, s in zip(bits, sizes, strict=True)],
            "extrapolation": length_results(index, final),
            "sample": SAMPLE + f"(self, seed={seed}):\n        self.lines = []",
        }
        runs.append(run)
    return {
        "name": name,
        "source": f"preset:{name}",
        "varied_fields": {},
        "width": {"original": 128, "trained": 128},
        "summary": SUMMARIES.get(name, "6 layers, width 128"),
        "windows": [],
        "kernels": {"training": {"attention": ["triangle"]}, "decoding": {"attention": ["unmasked"]}},
        "parameters": 1_310_000 + 17_000 * index,
        "active_parameters": 1_310_000 + 17_000 * index,
        "flops_per_token": 3.1e6 + 5e4 * index,
        "runs": runs,
        "bits_per_byte": mean_bits_per_byte(runs),
        "train_tokens_per_second": float(train),
        "train_speed_range": (train * 0.97, train * 1.02),
        "peak_memory_bytes": 9.1e8 - 4e7 * index,
        "state_bytes": [[context, float(per_token * context + fixed)] for context in CONTEXTS],
        "recall": {name: recall(index, position) for position, name in enumerate(RECALL_PROBES)},
        "prefill": [measured(context, 0.42 * train * 4096 / (context + 3500)) for context in (512, 2048, 8192)],
        "decode": [
            measured(context, decode * 9000 / (9000 + context * min(1, per_token / 3072)))
            for context in (512, 2048, 8192)
        ],
    }


def measured(context: int, speed: float) -> list[float]:
    """A speed at a context, with the range of its measurements."""
    return [context, speed, 0.96 * speed, 1.03 * speed]


def recall(index: int, position: int) -> dict[str, Any]:
    """The result of a probe: every third design learns hardly any."""
    accuracy = 0.17 + 0.01 * position if index % 3 == 2 else 0.998 - 0.1 * ((index + position) % 3)
    return {"status": "done", "accuracy": accuracy, "scored": 1000, "seconds": 9.0, "curve": [[1000, 0.1]]}


def length_results(index: int, final: float) -> list[dict[str, Any]]:
    """Results at 1, 2, 4 and 8 times the trained length: falling, level, rising, or refused beyond 2."""
    slope = (-0.03, 0.0, 0.2, 0.01)[index % 4]
    rows = []
    for power in range(4):
        sizes = np.full(6, 6000) + np.random.default_rng(8).integers(0, 300, 6)
        text = np.random.default_rng(9).normal(0, 0.2, 6) + np.random.default_rng([index, power]).normal(0, 0.004, 6)
        bits = (final + slope * power + text) * sizes
        result = ExtrapolationResult(2**power, list(zip(bits.tolist(), sizes.tolist(), strict=True)), None)
        refused = ExtrapolationResult(2**power, [], "embedding.position: position 1023 is beyond the 512 learned ones")
        rows.append(length_result(refused if index % 4 == 3 and power > 1 else result))
    return rows


def make_report(
    traits: dict[str, tuple[float, float, int, int, int, int]] | None = None, seeds: int = 3
) -> dict[str, Any]:
    """A whole report; the first design is the baseline."""
    numbered = enumerate((traits or TINY).items())
    designs = [design(name, trait, list(range(seeds)), index) for index, (name, trait) in numbered]
    report: dict[str, Any] = {
        "heddle": "0.1.0",
        "created": "2026-11-20T20:00:00Z",
        "command": "heddle compare mha.yaml gqa.yaml window.yaml delta.yaml --tokens 500000 --seeds 3",
        "hardware": {
            "cpu": "AMD EPYC 9B45",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 25e9,
            "device": "cpu",
            "torch": "2.13.0",
        },
        "data": {
            "name": "stdlib",
            "hash": "ab12cd34ef567890",
            "train_bytes": 21_400_000,
            "train_tokens": 6_120_000,
            "validation_bytes": 131_000,
            "vocab_size": 4096,
        },
        "budget": {
            "kind": "tokens",
            "value": 500_000,
            "batch_size": 8,
            "sequence_length": 256,
            "seeds": list(range(seeds)),
        },
        "workers": {"count": 2, "threads": 1},
        "progress": {"is_complete": True, "stages": [], "stop_reason": None},
        "warnings": ["window-tiny: its window of 512 is at least the training context of 256; it was never limited."],
        "baseline": designs[0]["name"],
        "equal_size": None,
        "recall": {name: probe.summary() for name, probe in RECALL_PROBES.items()},
        "extrapolation": {
            "sequence_length": 256,
            "multiples": [1, 2, 4, 8],
            "spans": 6,
            "documents": 5,
            "tokens": 6 * 2048,
            "bytes": 36_800,
            "note": None,
        },
        "designs": designs,
    }
    return finish(report)


def finish(report: dict[str, Any]) -> dict[str, Any]:
    """Compute again what follows from the runs: means, differences, effects and the verdict."""
    for row in report["designs"]:
        row["bits_per_byte"] = mean_bits_per_byte(row["runs"])
        row["extrapolation"] = length_changes(row["runs"], report["extrapolation"]["multiples"])
    report |= pair_report({row["name"]: row["runs"] for row in report["designs"]}, report["baseline"])
    report["effects"] = field_effects(report["designs"], report["baseline"])
    report["verdict"] = verdict_sentences(report)
    return report


def diverge(run: dict[str, Any]) -> None:
    """Turn a run into one that diverged half-way."""
    curve = [*run["curve"][:20], [run["curve"][20][0], float("nan")]]
    run.update(status="diverged", bits_per_byte=None, windows=[], extrapolation=[])
    run.update(curve=curve, sample=None, skipped_steps=40)


def single() -> dict[str, Any]:
    """One design alone, one seed."""
    report = make_report({"mha-tiny": TINY["mha-tiny"]}, seeds=1)
    return report | {"warnings": []}


def crowd() -> dict[str, Any]:
    """Twelve designs with long names; one diverged once and one always."""
    rng = np.random.default_rng(3)
    traits = {"mha-tiny": TINY["mha-tiny"]}
    for index in range(1, 12):
        name = f"experiments/2026-11/width-128-kv-heads-{index}-head-dim-32-rope-base-500000-run-{index:03d}"
        states = (3072 // index, 10_000 * index)
        traits[name] = (float(rng.normal(0, 0.02)), 0.004, *states, 20_000 + 900 * index, 200 + 20 * index)
    report = make_report(traits)
    diverge(report["designs"][4]["runs"][1])
    for run in report["designs"][7]["runs"]:
        diverge(run)
    return finish(report)


def hollow() -> dict[str, Any]:
    """Two designs of which nothing finished or was measured."""
    report = copy.deepcopy(make_report({"mha-tiny": TINY["mha-tiny"], "gqa-tiny": TINY["gqa-tiny"]}))
    for row in report["designs"]:
        for run in row["runs"]:
            diverge(run)
            run.update(curve=[], train_tokens_per_second=None, train_speed_range=None)
            run.update(peak_memory_bytes=None, seconds=None)
        row.update(train_tokens_per_second=None, train_speed_range=None, peak_memory_bytes=None)
        row.update(state_bytes=[], prefill=[], decode=[])
        row.update(flops_per_token=None, active_parameters=None)
        for result in row["recall"].values():
            result.update(status="failed", accuracy=None, scored=None, seconds=None, curve=[])
    return finish(report)


def printed(report: dict[str, Any], width: int = 80) -> str:
    """What a file of that width would get of the terminal's tables."""
    file = io.StringIO()
    print_report(report, Console(file=file, width=width))
    return file.getvalue()


def template_run() -> dict[str, Any]:
    """A finished run without longer sequences, whose numbers a stand-in of workers changes."""
    run: dict[str, Any] = make_report({"a": TINY["mha-tiny"]}, seeds=1)["designs"][0]["runs"][0]
    return run | {"extrapolation": []}
