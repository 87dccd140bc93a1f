"""A comparison: every design on the same text in the same order, each run in its own process, then the report."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from heddle import __version__
from heddle.analysis.comparison import extrapolation
from heddle.analysis.comparison.effects import effects
from heddle.analysis.comparison.plan import Entry, Plan, warnings
from heddle.analysis.comparison.probes import PROBES
from heddle.analysis.comparison.report import write_report
from heddle.analysis.comparison.statistics import bits_per_byte, paired_difference, verdict
from heddle.analysis.comparison.tasks import Comparison, measure, recall, steps_of, train
from heddle.data.corpus import Corpus, check_vocabulary, prepare
from heddle.data.samples import check_size
from heddle.errors import CheckpointError
from heddle.model.config import ModelConfig
from heddle.model.size import Size, describe, size, state_bytes
from heddle.runtime import Runtime
from heddle.storage.lock import RunLock
from heddle.storage.run_log import first_difference, plain, read_whole, write_whole
from heddle.training.evaluation.length_extrapolation import choose

STATE_CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1k … 128k
PLAN, DATA = "plan.json", "data.json"


def compare(plan: Plan, out: Path, runtime: Runtime, command: str) -> dict[str, Any]:
    """Run what of a plan is not done yet in `out`; returns the report, written as report.json and report.html.

    Raises CheckpointError if the folder holds something else, Interrupted after runs have saved.
    """
    with RunLock(out):
        if not (out / PLAN).is_file():
            others = [entry.name for entry in out.iterdir() if not entry.name.startswith(".")]
            if others:
                raise CheckpointError(
                    f"{out}: holds something else ({sorted(others)[0]}); choose an empty or new --out"
                )
        _same(out / PLAN, plan.identity())
        most = int(plan.value) if plan.budget == "tokens" else None
        tokenizer = None if plan.tokenizer is None else Path(plan.tokenizer)
        corpus = prepare(plan.data, vocab_size=plan.vocab_size, budget=most, tokenizer=tokenizer)
        for entry in plan.entries:
            check_vocabulary(corpus.tokenizer, entry.config.vocab_size)
        check_size(corpus.train, plan.context, plan.batch_size)
        _same(out / DATA, {"data": {"hash": corpus.hash, "tokens": [len(file) for file in corpus.train]}})
        comparison = Comparison(plan, corpus, out, runtime, command)
        steps = {entry.name: steps_of(comparison, entry) for entry in plan.entries}
        trained = min(steps.values()) * plan.batch_size * plan.context
        stretches = choose(corpus.validation, plan.context, plan.extrapolate, trained)
        comparison = replace(comparison, stretches=stretches)
        runs: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in plan.entries}
        for seed in plan.seeds:
            for entry in plan.entries:
                runs[entry.name].append(train(comparison, entry, seed, steps[entry.name]))
        speeds = {entry.name: measure(comparison, entry) for entry in plan.entries}
        recalls = {entry.name: recall(comparison, entry) for entry in plan.entries}
        report = _report(comparison, runs, {name: {**speeds[name], "recall": recalls[name]} for name in speeds})
        write_report(report, out)
        return report


def _same(path: Path, identity: dict[str, Any]) -> None:
    """Write what a comparison must share with its continuation, or compare with what was written."""
    if not path.is_file():
        write_whole(path, json.dumps(plain(identity), indent=2) + "\n")
        return
    difference = first_difference(read_whole(path), plain(identity))
    if difference:
        raise CheckpointError(f"{path.parent}: holds another comparison: {difference}; use the same, or another --out")


def _report(
    comparison: Comparison, runs: dict[str, list[dict[str, Any]]], measured: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    plan, corpus = comparison.plan, comparison.corpus
    baseline = plan.baseline or plan.entries[0].name
    designs = [_design(comparison, entry, runs[entry.name], measured[entry.name]) for entry in plan.entries]
    differences = [
        {"design": entry.name, "baseline": baseline, **paired_difference(runs[entry.name], runs[baseline])}
        for entry in plan.entries
        if entry.name != baseline
    ]
    trained = {name: max((run["train_tokens"] or 0) for run in one) for name, one in runs.items()}
    report: dict[str, Any] = {
        "heddle": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": comparison.command,
        "hardware": comparison.runtime.describe() | {"torch": torch.__version__},
        "data": _data(corpus),
        "budget": {
            "kind": plan.budget,
            "value": plan.value,
            "batch_size": plan.batch_size,
            "context": plan.context,
            "seeds": list(plan.seeds),
        },
        "warnings": warnings(
            plan, {one["name"]: one["parameters"] for one in designs}, trained, sum(len(file) for file in corpus.train)
        ),
        "baseline": baseline,
        "recall": {name: PROBES[name].describe() for name in plan.recall},
        "extrapolation": extrapolation.describe(comparison.stretches, corpus),
        "designs": designs,
        "differences": differences,
        "varied": effects(designs, baseline),
        "equal": plan.equal,
    }
    report["verdict"] = verdict(report)
    return report


def _data(corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "hash": corpus.hash,
        "train_bytes": sum(source["train"]["bytes"] for source in corpus.report["sources"]),
        "train_tokens": sum(len(file) for file in corpus.train),
        "validation_bytes": corpus.report["validation"]["bytes"],
        "vocab_size": corpus.tokenizer.vocab_size,
        "report": corpus.report,
    }


def _design(
    comparison: Comparison, entry: Entry, runs: list[dict[str, Any]], measured: dict[str, Any]
) -> dict[str, Any]:
    config = comparison.config(entry)
    told = size(config, comparison.plan.context)
    dtype = torch.float32 if comparison.plan.precision == "fp32" else torch.bfloat16
    done = [run for run in runs if run["status"] == "done"]
    return {
        "name": entry.name,
        "source": entry.source,
        "varied": dict(entry.varied),
        "width": {"given": entry.width or config.width, "trained": config.width},
        "summary": summarise(config, told),
        "parameters": told.parameters,
        "active_parameters": told.active_parameters,
        "flops_per_token": told.flops_per_token,
        "runs": runs,
        "bits_per_byte": bits_per_byte(runs),
        "train_tokens_per_second": _middle([run["train_tokens_per_second"] for run in done]),
        "peak_memory_bytes": _middle([run["peak_memory_bytes"] for run in done]),
        "state_bytes": [(context, state_bytes(config, context, dtype=dtype)) for context in STATE_CONTEXTS],
        "prefill": measured["prefill"],
        "decode": measured["decode"],
        "recall": measured["recall"],
        "extrapolation": extrapolation.changes(runs, comparison.stretches.multiples),
    }


def _middle(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def summarise(config: ModelConfig, measured: Size) -> str:
    """A design in one line: depth, width, and each different layer."""
    parts = [f"{layer.count} × [{layer.mixer}; {layer.feedforward}]" for layer in measured.layers]
    head = "tied" if config.head.tied else "untied"
    return (
        f"{config.depth} layers, width {config.width}, vocabulary {config.vocab_size} ({head}), residual "
        f"{describe(config.residual.dump())}, norm {describe(config.norm.dump())}: {', '.join(parts)}"
    )
