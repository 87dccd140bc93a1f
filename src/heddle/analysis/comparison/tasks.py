"""The work of a comparison, piece by piece: each in a process of its own, its result kept in a file."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.analysis.comparison.plan import Entry, Plan
from heddle.data.corpus import Corpus
from heddle.errors import ConfigError, HeddleError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token
from heddle.runtime import Runtime
from heddle.storage.run_log import read_whole, write_whole
from heddle.training.evaluation.length_extrapolation import Stretches
from heddle.training.settings import Settings
from heddle.training.signals import Interrupted, listening

CURVE_POINTS = 10
SAVES = 4
NOTHING = Stretches(context=1)
WORDS = {"calibrate": "timing a step", "measure": "measuring reading and writing", "recall": "recall"}


@dataclass(frozen=True)
class Comparison:
    """A plan under way: the text, the designs with their vocabularies, where and on what it runs."""

    plan: Plan
    corpus: Corpus
    out: Path
    runtime: Runtime
    command: str
    stretches: Stretches = NOTHING  # of held-out text that each trained model reads in pieces of many lengths

    def config(self, entry: Entry) -> ModelConfig:
        """The design with the shared vocabulary."""
        known = entry.config.vocab_size is not None
        return entry.config if known else entry.config.replace(vocab_size=self.corpus.tokenizer.vocab_size)

    def settings(self, seed: int, steps: int) -> Settings:
        """How one run is trained."""
        plan = self.plan
        return Settings(
            steps=steps,
            batch_size=plan.batch_size,
            context=plan.context,
            learning_rate=plan.learning_rate,
            seed=seed,
            optimizer=plan.optimizer,
            schedule=plan.schedule,
            warmup=plan.warmup,
            lr_scale=plan.lr_scale,
            precision=plan.precision,
            save_every=max(1, steps // SAVES),
            evaluate_every=max(1, steps // CURVE_POINTS),
        )


def steps_of(comparison: Comparison, entry: Entry) -> int:
    """Optimizer steps that a design's budget buys. Raises ConfigError where it buys none."""
    plan = comparison.plan
    per_step = plan.batch_size * plan.context
    if plan.budget == "tokens":
        steps = int(plan.value) // per_step
    elif plan.budget == "flops":
        model = build(comparison.config(entry), device="meta")
        steps = int(plan.value / (3 * flops_per_token(model, plan.context) * per_step))
    else:
        timed = do(comparison, entry, "calibrate", 0, 1)
        if timed["status"] != "done":
            raise MachineError(f"{timed['message']}; a budget in --tokens needs no timing")
        steps = int(plan.value / timed["seconds_per_step"])
    if steps < 1:
        raise ConfigError(
            f"--{plan.budget} {plan.value:g}: buys no step of {per_step} tokens for {entry.name}; give more"
        )
    return steps


def train(comparison: Comparison, entry: Entry, seed: int, steps: int) -> dict[str, Any]:
    """One run of the report; what diverged or failed has nulls in place of numbers."""
    result = do(comparison, entry, "train", seed, steps)
    if result["status"] == "done":
        return result
    progress.say(f"warning: {result['message']}")
    unknown = ("bits_per_byte", "train_tokens", "seconds", "train_tokens_per_second", "peak_memory_bytes")
    told = {"seed": seed, "status": result["status"], "message": result["message"]}
    nothing = {"curve": [], "windows": [], "extrapolation": [], "sample": ""}
    return told | dict.fromkeys((*unknown, "skipped_steps", "experts")) | nothing


def measure(comparison: Comparison, entry: Entry) -> dict[str, Any]:
    """How fast a design reads and writes; nothing where that failed."""
    result = do(comparison, entry, "measure", 0, 1)
    if result["status"] == "done":
        return result
    progress.say(f"warning: {result['message']}")
    return {"prefill": [], "decode": []}


def recall(comparison: Comparison, entry: Entry) -> dict[str, Any]:
    """What came of each probe that the plan names: its result, or why there is none."""
    results = {}
    for probe in comparison.plan.recall:
        try:
            result = do(comparison, entry, f"recall-{probe}", 0, 1)
        except MachineError:
            raise
        except HeddleError as error:  # of this probe alone: the design learns no rows of its length, say
            result = {"status": "failed", "message": str(error)}
        if result["status"] != "done":
            progress.say(f"warning: {result['message']}")
            result = dict.fromkeys(("accuracy", "scored", "seconds")) | {"curve": []} | result
        results[probe] = result
    return results


def do(comparison: Comparison, entry: Entry, task: str, seed: int, steps: int) -> dict[str, Any]:
    """The result of a worker, from the folder if it is there already; `task` is of the worker, or recall-PROBE.

    Its status is done, diverged, or failed, which is not kept, so that it is tried again. Raises HeddleError
    for what would stop the other workers too, and Interrupted after a worker has saved.
    """
    runs = comparison.out / "runs"
    stem = f"{entry.name}-seed{seed}" if task == "train" else f"{entry.name}-{task}"
    target, request = runs / f"{stem}.json", runs / f".{stem}.task.json"
    if target.is_file():
        found: dict[str, Any] = read_whole(target)
        return found
    kind, _, probe = task.partition("-")
    what = f"{entry.name}, seed {seed}" if kind == "train" else entry.name
    words = f"{WORDS[kind]} {probe}".rstrip() if kind in WORDS else ""
    if kind == "recall":
        what = f"{entry.name}, {words}"  # its progress bar says so
    elif words:
        progress.say(f"{what}: {words}")
    runs.mkdir(parents=True, exist_ok=True)
    content = _request(comparison, entry, asdict(comparison.settings(seed, steps)))
    content |= {"task": kind, "probe": probe, "name": what, "out": str(runs / stem)}
    write_whole(request, json.dumps(content))
    try:
        return _finish(_spawn(request, target), target, what if kind in ("train", "recall") else f"{what}, {words}")
    finally:
        request.unlink(missing_ok=True)


def _request(comparison: Comparison, entry: Entry, settings: dict[str, Any]) -> dict[str, Any]:
    plan = comparison.plan
    return {
        "parent": os.getpid(),
        "design": comparison.config(entry).dump(),
        "data": plan.data,
        "tokenizer": plan.tokenizer,
        "vocab_size": plan.vocab_size,
        "corpus_tokens": int(plan.value) if plan.budget == "tokens" else None,
        "settings": settings,
        "device": plan.device,
        "threads": plan.threads,
        "parts": plan.parts,
        "contexts": plan.contexts,
        "stretches": asdict(comparison.stretches),
        "command": comparison.command,
        "quiet": progress.is_quiet(),
    }


def _finish(code: int, target: Path, what: str) -> dict[str, Any]:
    if not target.is_file():
        number = -code if code < 0 else code - 128
        if number > 0:
            memory = ", perhaps for want of memory" if number == signal.SIGKILL else ""
            cause = f"was ended by {signal.Signals(number).name}{memory}"
        else:
            cause = f"ended with code {code}"
        return {"status": "failed", "message": f"{what}: {cause}"}
    result: dict[str, Any] = read_whole(target)
    if result["status"] == "done":
        return result
    result["message"] = f"{what}: {result['message']}"
    if result["status"] == "failed":
        target.unlink()
        if result["stops_all"]:
            raise MachineError(result["message"]) if code == 1 else HeddleError(result["message"])
    return result


def _spawn(request: Path, target: Path) -> int:
    """Run a worker; a signal to this process is handed on once, so that the worker saves. Returns its exit code."""
    command = [sys.executable, "-m", "heddle.analysis.comparison.worker", str(request), str(target)]
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
