"""Run a comparison: train every design on the same text in the same order, measure it, and write the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from heddle import __version__
from heddle.analysis.comparison.effects import field_effects
from heddle.analysis.comparison.equal_state import parse_state_context
from heddle.analysis.comparison.extrapolation import length_changes, plan_summary
from heddle.analysis.comparison.plan import ComparisonPlan, DesignEntry, plan_warnings
from heddle.analysis.comparison.probes import RECALL_PROBES
from heddle.analysis.comparison.statistics import mean_bits_per_byte, paired_difference
from heddle.analysis.comparison.tasks import (
    Comparison,
    measure_recall,
    measure_speeds_in_rounds,
    train_design,
    training_steps,
)
from heddle.analysis.comparison.verdict import verdict_sentences
from heddle.analysis.pages.report import write_report
from heddle.data.corpus import Corpus, check_tokenizer_fits, prepare_corpus
from heddle.data.samples import check_token_count
from heddle.errors import CheckpointError
from heddle.model.config import ModelConfig
from heddle.model.size import Size, describe, size, state_bytes
from heddle.runtime import Runtime
from heddle.storage.json_file import read_json_file, write_json_file
from heddle.storage.lock import RunLock
from heddle.storage.run_log import first_difference, to_plain_json
from heddle.training.evaluation.length_extrapolation import plan_extrapolation

STATE_CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1k … 128k
PLAN_FILE, DATA_FILE = "plan.json", "data.json"


def compare(plan: ComparisonPlan, out: Path, runtime: Runtime, command: str) -> dict[str, Any]:
    """Run what is not done yet of a plan in the folder `out`; write report.json and report.html, return the report.

    command: what the user called, for the report. Raises CheckpointError where the folder has other content or another
    comparison, Interrupted after a signal, once the current run has been saved.
    """
    with RunLock(out):
        if not (out / PLAN_FILE).is_file():
            others = [entry.name for entry in out.iterdir() if not entry.name.startswith(".")]
            if others:
                raise CheckpointError(
                    f"{out}: holds something else ({sorted(others)[0]}); choose an empty or new folder"
                )
        _check_identity(out / PLAN_FILE, plan.identity(), _name_budget)
        token_limit = int(plan.budget_value) if plan.budget_kind == "tokens" else None
        tokenizer = None if plan.tokenizer is None else Path(plan.tokenizer)
        corpus = prepare_corpus(
            plan.data, vocab_size=plan.vocab_size, max_train_tokens=token_limit, tokenizer=tokenizer
        )
        for entry in plan.entries:
            check_tokenizer_fits(corpus.tokenizer, entry.config.vocab_size)
        check_token_count(corpus.train, plan.sequence_length, plan.batch_size)
        _check_identity(
            out / DATA_FILE, {"data": {"hash": corpus.hash, "tokens": [len(file) for file in corpus.train]}}
        )
        comparison = Comparison(plan, corpus, out, runtime, command)
        steps = {entry.name: training_steps(comparison, entry) for entry in plan.entries}
        trained_tokens = min(steps.values()) * plan.batch_size * plan.sequence_length
        extrapolation = plan_extrapolation(
            corpus.validation, plan.sequence_length, plan.max_length_multiple, trained_tokens
        )
        comparison = replace(comparison, extrapolation=extrapolation)
        runs: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in plan.entries}
        for seed in plan.seeds:
            for entry in plan.entries:
                runs[entry.name].append(train_design(comparison, entry, seed, steps[entry.name]))
        speeds = measure_speeds_in_rounds(comparison)
        recalls = {entry.name: measure_recall(comparison, entry) for entry in plan.entries}
        designs = [
            _design_report(comparison, entry, runs[entry.name], speeds[entry.name] | {"recall": recalls[entry.name]})
            for entry in plan.entries
        ]
        report = _report(comparison, designs)
        write_report(report, out)
        return report


def _check_identity(
    path: Path, identity: dict[str, Any], named: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> None:
    """Write the identity of a new comparison; compare that of a continued one with the file.

    named: gives the fields the names by which the user knows them.
    """
    if not path.is_file():
        write_json_file(path, to_plain_json(identity))
        return
    difference = first_difference(named(read_json_file(path)), named(to_plain_json(identity)))
    if difference:
        raise CheckpointError(f"{path.parent}: holds another comparison: {difference}; use the same, or another folder")


def _name_budget(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with the budget under its kind, `tokens` say, instead of kind and value."""
    others = {name: value for name, value in identity.items() if not name.startswith("budget_")}
    return {str(identity["budget_kind"]): identity["budget_value"]} | others


def _report(comparison: Comparison, designs: list[dict[str, Any]]) -> dict[str, Any]:
    plan, corpus = comparison.plan, comparison.corpus
    baseline = plan.baseline or plan.entries[0].name
    runs = {design["name"]: design["runs"] for design in designs}
    trained_tokens = {name: max((run["train_tokens"] or 0) for run in of_design) for name, of_design in runs.items()}
    parameters = {design["name"]: design["parameters"] for design in designs}
    report: dict[str, Any] = {
        "heddle": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": comparison.command,
        "hardware": comparison.runtime.describe() | {"torch": torch.__version__},
        "data": _data_report(corpus),
        "budget": {
            "kind": plan.budget_kind,
            "value": plan.budget_value,
            "batch_size": plan.batch_size,
            "sequence_length": plan.sequence_length,
            "seeds": list(plan.seeds),
        },
        "warnings": plan_warnings(plan, parameters, trained_tokens, sum(len(file) for file in corpus.train)),
        "baseline": baseline,
        "recall": {name: RECALL_PROBES[name].summary() for name in plan.recall_probes},
        "extrapolation": plan_summary(comparison.extrapolation, corpus),
        "designs": designs,
        "differences": [
            {"design": name, "baseline": baseline, **paired_difference(runs[name], runs[baseline])}
            for name in runs
            if name != baseline
        ],
        "effects": field_effects(designs, baseline),
        "equal_size": plan.equal_size,
    }
    report["verdict"] = verdict_sentences(report)
    return report


def _data_report(corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "hash": corpus.hash,
        "train_bytes": sum(source["train"]["bytes"] for source in corpus.report["sources"]),
        "train_tokens": sum(len(file) for file in corpus.train),
        "validation_bytes": corpus.report["validation"]["bytes"],
        "vocab_size": corpus.tokenizer.vocab_size,
        "report": corpus.report,
    }


def _design_report(
    comparison: Comparison, entry: DesignEntry, runs: list[dict[str, Any]], measured: dict[str, Any]
) -> dict[str, Any]:
    config = comparison.config(entry)
    model_size = size(config, comparison.plan.sequence_length)
    dtype = torch.float32 if comparison.plan.precision == "fp32" else torch.bfloat16
    finished = [run for run in runs if run["status"] == "done"]
    equal_context = parse_state_context(comparison.plan.equal_size or "", comparison.plan.sequence_length)
    return {
        "name": entry.name,
        "source": entry.source,
        "varied_fields": dict(entry.varied_fields),
        "width": {"original": entry.original_width or config.width, "trained": config.width},
        "scaled_fields": list(entry.scaled_fields),
        "equal_state_bytes": None if equal_context is None else state_bytes(config, equal_context, dtype=dtype),
        "summary": summarize_design(config, model_size),
        "parameters": model_size.parameters,
        "active_parameters": model_size.active_parameters,
        "flops_per_token": model_size.flops_per_token,
        "runs": runs,
        "bits_per_byte": mean_bits_per_byte(runs),
        "train_tokens_per_second": _median([run["train_tokens_per_second"] for run in finished]),
        "train_speed_range": _outer_range([run["train_speed_range"] for run in finished]),
        "peak_memory_bytes": _median([run["peak_memory_bytes"] for run in finished]),
        "state_bytes": [(context, state_bytes(config, context, dtype=dtype)) for context in STATE_CONTEXTS],
        "prefill": measured["prefill"],
        "decode": measured["decode"],
        "recall": measured["recall"],
        "extrapolation": length_changes(runs, comparison.extrapolation.multiples),
    }


def _median(values: list[float]) -> float | None:
    return median_high(values) if values else None


def _outer_range(ranges: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The range that contains all of the ranges."""
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def summarize_design(config: ModelConfig, model_size: Size) -> str:
    """A design in one line: depth, width, and each different layer."""
    layers = [f"{layer.count} × [{layer.mixer}; {layer.feedforward}]" for layer in model_size.layers]
    head = "tied" if config.head.tied else "untied"
    return (
        f"{config.depth} layers, width {config.width}, vocabulary {config.vocab_size} ({head}), residual "
        f"{describe(config.residual.dump())}, norm {describe(config.norm.dump())}: {', '.join(layers)}"
    )
