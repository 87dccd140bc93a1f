"""A comparison: every design on the same text in the same order, each run in its own process, then the report."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from heddle import __version__, progress
from heddle.checkpoints.lock import RunLock
from heddle.comparison.plan import Entry, Plan, warnings
from heddle.comparison.report import write_report
from heddle.comparison.statistics import bits_per_byte, paired_difference, verdict
from heddle.data.corpus import Corpus, check_vocabulary, prepare
from heddle.data.samples import check_size
from heddle.errors import CheckpointError, ConfigError, HeddleError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import Size, describe, flops_per_token, size, state_bytes
from heddle.runtime import Runtime
from heddle.training.record import first_difference, plain, write_whole
from heddle.training.settings import Settings
from heddle.training.signals import Interrupted, listening

STATE_CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1k … 128k
PLAN = "plan.json"
CURVE_POINTS = 10


@dataclass(frozen=True)
class Comparison:
    """A plan under way: the text, the designs with their vocabularies, where and on what it runs."""

    plan: Plan
    corpus: Corpus
    out: Path
    runtime: Runtime
    command: str

    def config(self, entry: Entry) -> ModelConfig:
        """The design with the shared vocabulary."""
        known = entry.config.vocab_size is not None
        return entry.config if known else entry.config.replace(vocab_size=self.corpus.tokenizer.vocab_size)


def compare(plan: Plan, out: Path, runtime: Runtime, command: str) -> dict[str, Any]:
    """Run what of a plan is not done yet in `out`; returns the report, written as report.json and report.html.

    Raises CheckpointError if the folder holds something else, Interrupted after runs have saved.
    """
    with RunLock(out):
        _recognise(out, plan)
        most = int(plan.value) if plan.budget == "tokens" else None
        tokenizer = None if plan.tokenizer is None else Path(plan.tokenizer)
        corpus = prepare(plan.data, vocab_size=plan.vocab_size, budget=most, tokenizer=tokenizer)
        for entry in plan.entries:
            check_vocabulary(corpus.tokenizer, entry.config.vocab_size)
        check_size(corpus.train, plan.context, plan.batch_size)
        comparison = Comparison(plan, corpus, out, runtime, command)
        steps = {entry.name: _steps(comparison, entry) for entry in plan.entries}
        runs: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in plan.entries}
        for seed in plan.seeds:
            for entry in plan.entries:
                runs[entry.name].append(_train(comparison, entry, seed, steps[entry.name]))
        speeds = {entry.name: _task(comparison, entry, "measure", 0, steps[entry.name]) for entry in plan.entries}
        report = _report(comparison, runs, speeds)
        write_report(report, out)
        return report


def _recognise(out: Path, plan: Plan) -> None:
    path = out / PLAN
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); choose another --out") from error
        difference = first_difference(before, plain(plan.identity()))
        if difference:
            raise CheckpointError(f"{out}: holds another comparison: {difference}; use the same, or another --out")
        return
    others = [entry.name for entry in out.iterdir() if not entry.name.startswith(".")]
    if others:
        raise CheckpointError(f"{out}: holds something else ({sorted(others)[0]}); choose an empty or new --out")
    write_whole(path, json.dumps(plain(plan.identity()), indent=2) + "\n")


def _settings(plan: Plan, seed: int, steps: int) -> Settings:
    return Settings(
        steps=steps,
        batch_size=plan.batch_size,
        context=plan.context,
        learning_rate=plan.learning_rate,
        seed=seed,
        schedule=plan.schedule,
        precision=plan.precision,
        save_every=max(1, steps // 4),
        evaluate_every=max(1, steps // CURVE_POINTS),
    )


def _steps(comparison: Comparison, entry: Entry) -> int:
    """Optimizer steps that a design's budget buys."""
    plan = comparison.plan
    per_step = plan.batch_size * plan.context
    if plan.budget == "tokens":
        steps = int(plan.value) // per_step
    elif plan.budget == "flops":
        model = build(comparison.config(entry), device="meta")
        steps = int(plan.value / (3 * flops_per_token(model, plan.context) * per_step))
    else:
        steps = int(plan.value / _task(comparison, entry, "calibrate", 0, 1)["seconds_per_step"])
    if steps < 1:
        raise ConfigError(
            f"--{plan.budget} {plan.value:g}: buys no step of {per_step} tokens for {entry.name}; give more"
        )
    return steps


def _train(comparison: Comparison, entry: Entry, seed: int, steps: int) -> dict[str, Any]:
    result = _task(comparison, entry, "train", seed, steps)
    if result["status"] == "done":
        return result
    progress.say(f"warning: {entry.name}, seed {seed}: {result['message']}")
    nothing = dict.fromkeys(("bits_per_byte", "train_tokens", "seconds", "train_tokens_per_second"))
    return nothing | {
        "seed": seed,
        "status": result["status"],
        "message": result["message"],
        "peak_memory_bytes": None,
        "skipped_steps": None,
        "curve": [],
        "windows": [],
        "sample": "",
    }


def _task(comparison: Comparison, entry: Entry, task: str, seed: int, steps: int) -> dict[str, Any]:
    """The result of a worker, from the folder if it is there already."""
    plan = comparison.plan
    name = entry.name.replace("#", "-")
    stem = f"{name}-seed{seed}" if task == "train" else f"{name}-{task}"
    folder = comparison.out / "runs" / stem
    target = comparison.out / "runs" / f"{stem}.json"
    if target.is_file():
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    request = folder.parent / f".{stem}.task.json"
    settings = _settings(plan, seed, steps)
    content = {
        "task": task,
        "name": f"{entry.name}, seed {seed}" if task == "train" else entry.name,
        "design": comparison.config(entry).dump(),
        "data": plan.data,
        "tokenizer": plan.tokenizer,
        "vocab_size": plan.vocab_size,
        "corpus_tokens": int(plan.value) if plan.budget == "tokens" else None,
        "settings": asdict(settings),
        "out": str(folder),
        "device": plan.device,
        "threads": plan.threads,
        "parts": plan.parts,
        "contexts": plan.contexts,
        "command": comparison.command,
    }
    write_whole(request, json.dumps(content))
    if task != "train":
        progress.say(f"{entry.name}: {'measuring reading and writing' if task == 'measure' else 'timing a step'}")
    try:
        return _finish(_spawn(request, target), target, f"{entry.name}, {task}")
    finally:
        request.unlink(missing_ok=True)


def _finish(code: int, target: Path, what: str) -> dict[str, Any]:
    if not target.is_file():
        cause = f"was killed by signal {-code}, perhaps for want of memory" if code < 0 else f"ended with code {code}"
        return {"status": "failed", "message": f"{what}: {cause}", "exit_code": 1}
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    if result["status"] == "failed":
        target.unlink()
        kind = MachineError if result["exit_code"] == 1 else HeddleError
        raise kind(f"{what}: {result['message']}")
    return result


def _spawn(request: Path, target: Path) -> int:
    """Run a worker; a signal to this process is handed on once, so that the worker saves. Returns its exit code."""
    command = [sys.executable, "-m", "heddle.comparison.worker", str(request), str(target)]
    with listening() as wish:
        process = subprocess.Popen(command, start_new_session=True)
        try:
            told = False
            while process.poll() is None:
                time.sleep(0.05)
                if wish.number is not None and not told:
                    process.send_signal(wish.number)
                    told = True
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if wish.number is not None:
            raise Interrupted(wish.number)
        return process.returncode


def _report(
    comparison: Comparison, runs: dict[str, list[dict[str, Any]]], speeds: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    plan, corpus = comparison.plan, comparison.corpus
    baseline = plan.entries[0].name
    designs = [_design(comparison, entry, runs[entry.name], speeds[entry.name]) for entry in plan.entries]
    differences = [
        {"design": entry.name, "baseline": baseline, **paired_difference(runs[entry.name], runs[baseline])}
        for entry in plan.entries[1:]
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
        "designs": designs,
        "differences": differences,
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


def _design(comparison: Comparison, entry: Entry, runs: list[dict[str, Any]], speeds: dict[str, Any]) -> dict[str, Any]:
    config = comparison.config(entry)
    measured = size(config, comparison.plan.context)
    dtype = torch.float32 if comparison.plan.precision == "fp32" else torch.bfloat16
    done = [run for run in runs if run["status"] == "done"]
    return {
        "name": entry.name,
        "source": entry.source,
        "summary": summarise(config, measured),
        "parameters": measured.parameters,
        "active_parameters": measured.active_parameters,
        "flops_per_token": measured.flops_per_token,
        "runs": runs,
        "bits_per_byte": bits_per_byte(runs),
        "train_tokens_per_second": _middle([run["train_tokens_per_second"] for run in done]),
        "peak_memory_bytes": _middle([run["peak_memory_bytes"] for run in done]),
        "state_bytes": [(context, state_bytes(config, context, dtype=dtype)) for context in STATE_CONTEXTS],
        "prefill": speeds.get("prefill", []),
        "decode": speeds.get("decode", []),
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
