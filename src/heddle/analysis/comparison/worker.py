"""One run of a comparison in a process of its own: `python -m heddle.analysis.comparison.worker TASK.json RESULT.json`.

TASK.json says what to do ("train", "calibrate", "measure" or "recall"); RESULT.json receives what came out, or why not.
"""

import ctypes
import json
import os
import resource
import signal
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.errors import HeddleError, is_out_of_memory

CALIBRATION_STEPS = 8


def main() -> None:
    """Run the task of this process; ends with 130 or 143 after a signal, without a result."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _die_with_parent(task["parent"])
    from heddle.storage.run_log import write_whole
    from heddle.training.signals import Interrupted

    try:
        with progress.quiet() if task["quiet"] else nullcontext():
            result, code = perform(task)
    except Interrupted as interrupted:
        sys.exit(interrupted.exit_code)
    write_whole(Path(sys.argv[2]), json.dumps(result))
    sys.exit(code)


def perform(task: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What came of a task, with the exit code: done, diverged, or failed, and whether others would fail too."""
    from heddle.training.loop import Diverged

    try:
        return TASKS[task["task"]](task), 0
    except Diverged as error:
        return {"status": "diverged", "message": str(error)}, 0
    except HeddleError as error:
        return {"status": "failed", "message": str(error), "stops_all": True}, error.exit_code
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "failed", "message": "out of memory", "stops_all": False}, 1


def _die_with_parent(parent: int) -> None:
    """A comparison that is killed must not leave a trainer behind (Linux knows how; elsewhere the lock protects)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the system could be asked
            sys.exit(128 + signal.SIGTERM)


def _job(task: dict[str, Any]) -> Any:
    from heddle.config import load_part
    from heddle.data.corpus import prepare
    from heddle.model.load_config import load_config
    from heddle.runtime import prepare as set_up
    from heddle.runtime import versions
    from heddle.training.loop import Job
    from heddle.training.settings import Settings

    for file in task["parts"]:
        load_part(Path(file))
    runtime = set_up(task["device"], task["threads"])
    tokenizer = None if task["tokenizer"] is None else Path(task["tokenizer"])
    with progress.quiet():
        corpus = prepare(task["data"], vocab_size=task["vocab_size"], budget=task["corpus_tokens"], tokenizer=tokenizer)
    return Job(
        config=load_config(task["design"]),
        corpus=corpus,
        settings=Settings(**task["settings"]),
        out=Path(task["out"]),
        device=runtime.device,
        name=task["name"],
        circumstances={"command": task["command"], "versions": versions(), "runtime": runtime.describe()},
    )


def _train(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from heddle.analysis.comparison.extrapolation import told
    from heddle.generation.sample import sample
    from heddle.storage.run_log import read_log
    from heddle.training.evaluation.length_extrapolation import Stretches, extrapolation
    from heddle.training.loop import train
    from heddle.training.router_metrics import recent

    job = _job(task)
    outcome = train(job)
    log = read_log(job.out)
    seconds = [line["seconds"] for line in log]
    curve = [(line["tokens"], line["validation_bits_per_byte"]) for line in log if "validation_bits_per_byte" in line]
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else _peak_memory()
    trained = outcome.progress.step * job.settings.tokens_per_step
    corpus, stretches = job.corpus, Stretches(**task["stretches"])
    readings = extrapolation(outcome.model, corpus.validation, stretches, corpus.tokenizer.byte_lengths, job.autocast)
    return {
        "seed": job.settings.seed,
        "status": "done",
        "bits_per_byte": outcome.bits_per_byte,
        "train_tokens": trained,
        "seconds": sum(seconds),
        "train_tokens_per_second": job.settings.tokens_per_step / statistics.median(seconds),
        "peak_memory_bytes": peak,
        "skipped_steps": outcome.progress.skipped,
        "experts": recent(log),
        "curve": curve,
        "windows": outcome.windows,
        "extrapolation": [told(reading) for reading in readings],
        "sample": sample(outcome.model, job.corpus.tokenizer, job.settings.context),
    }


def _peak_memory() -> int:
    """Bytes this process held at most; Linux counts in KiB, macOS in bytes."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def _calibrate(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one training step, the median of a few on a model that is thrown away."""
    from heddle.data.samples import Samples
    from heddle.model.decoder import build
    from heddle.training.optimizer import make_optimizer
    from heddle.training.step import apply, gradients

    job = _job(task)
    settings, corpus = job.settings, job.corpus
    samples = Samples(corpus.train, corpus.weights, settings.context, settings.batch_size, 0, corpus.tokenizer.end)
    model = build(job.config, device=job.device).train()
    optimizer = make_optimizer(model, settings.weight_decay, settings.optimizer, settings.lr_scale)
    times = []
    for step in range(CALIBRATION_STEPS):
        began = time.perf_counter()
        found = gradients(model, samples.batch(step), (0, step), settings.accumulate, job.autocast)
        apply(model, optimizer, found, 1e-4, settings.clip)
        times.append(time.perf_counter() - began)
    return {"status": "done", "seconds_per_step": statistics.median(times[2:])}


def _recall(task: dict[str, Any]) -> dict[str, Any]:
    """A small copy of the design learns a probe's task, as any run is trained: it saves, and goes on."""
    from heddle.analysis.comparison.probes import PROBES
    from heddle.config import load_part
    from heddle.model.load_config import load_config
    from heddle.runtime import prepare as set_up
    from heddle.runtime import versions
    from heddle.storage.run_log import read_log
    from heddle.training.loop import Job, train

    for file in task["parts"]:
        load_part(Path(file))
    runtime, probe = set_up(task["device"], task["threads"]), PROBES[task["probe"]]
    job = Job(
        config=probe.copy(load_config(task["design"])),
        corpus=probe.practice,
        settings=probe.settings(),
        out=Path(task["out"]),
        device=runtime.device,
        name=task["name"],
        circumstances={"command": task["command"], "versions": versions(), "runtime": runtime.describe()},
    )
    outcome = train(job)
    log = read_log(job.out)
    return {
        "status": "done",
        "accuracy": outcome.accuracy,
        "scored": sum(scored for _, scored in outcome.windows),
        "seconds": sum(line["seconds"] for line in log),
        "curve": [(line["tokens"], line["validation_accuracy"]) for line in log if "validation_accuracy" in line],
    }


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    import torch

    from heddle.analysis.comparison.measure import speeds
    from heddle.config import load_part
    from heddle.model.load_config import load_config
    from heddle.runtime import prepare as set_up

    for file in task["parts"]:
        load_part(Path(file))
    runtime = set_up(task["device"], task["threads"])
    dtype = torch.float32 if task["settings"]["precision"] == "fp32" else torch.bfloat16
    measured = speeds(load_config(task["design"]), task["contexts"], runtime.device, dtype)
    return {"status": "done", **measured}


TASKS = {"train": _train, "calibrate": _calibrate, "measure": _measure, "recall": _recall}

if __name__ == "__main__":
    main()
