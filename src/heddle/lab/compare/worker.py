"""Worker process of a comparison: `python -m heddle.lab.compare.worker TASK.json RESULT.json`.

TASK.json describes one task by its name in TASKS. RESULT.json receives its result, or the reason for its failure. A
task on several ranks is run by as many processes, with `--rank`, which the worker starts.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from heddle import progress
from heddle.config import load_part
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.token_file import split_held_out
from heddle.distributed.ranks import ONE_PROCESS
from heddle.errors import (
    CheckpointError,
    ConfigError,
    HeddleError,
    OtherRankFailed,
    RankLost,
    is_out_of_memory,
    nondeterministic_operation,
)
from heddle.generation.generate import sample_text
from heddle.lab.compare.probes import (
    RECALL_PROBES,
    RandomText,
    interim_tokens,
    measure_speeds,
    read_rate,
    time_training_steps,
)
from heddle.lab.compare.results import ProbeResult, Run, plain
from heddle.lab.compare.statistics import quartiles
from heddle.lab.compare.text_profile import length_result, measure_text_recall, start_profile
from heddle.lab.workers import WORKER_MODULE, confine
from heddle.model.load_config import load_config
from heddle.runtime import Choices, Runtime, set_up_runtime, versions
from heddle.session import dtype_of
from heddle.signals import STOP_SIGNALS, Interrupted, interrupted_on_stop_signals
from heddle.storage.checkpoints import checkpoint_steps, latest_checkpoint, write_checkpoint
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.folder import read_folder
from heddle.storage.lock import RunLock
from heddle.storage.run_log import (
    IDENTITY_KEYS,
    RUN_FILE,
    copy_log,
    first_difference,
    open_run,
    read_log,
    step_speed,
    to_plain_json,
    trunk_identity,
)
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan, evaluate_extrapolation
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.job import TrainingJob, peak_process_memory
from heddle.training.loop import Diverged, TrainingResult, train
from heddle.training.settings import Settings
from heddle.training.step import recent_router_summary


def main() -> None:
    """Run the task of this process, be one rank of a task, or fork a worker for each request."""
    if sys.argv[1] == "--fork":
        fork_workers(int(sys.argv[2]))
    elif sys.argv[1] == "--rank":
        be_rank(*sys.argv[2:])
    else:
        sys.exit(work(sys.argv[1], sys.argv[2]))


def work(request_file: str, result_file: str, parent_pid: int | None = None) -> int:
    """Run a task; returns the exit code: after a signal 129, 130 or 143, without a result.

    parent_pid: the process that started this one; None: as the request says.
    """
    task = json.loads(Path(request_file).read_text(encoding="utf-8"))
    try:
        with interrupted_on_stop_signals("stopped before it was done; the same command continues"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the parent masked them
            _exit_with_parent(parent_pid or task["parent_pid"])
            return _run_task(task, request_file, result_file)
    except Interrupted as interrupted:
        if not task["quiet"]:
            progress.print_status(f"{task['label']}: {interrupted}")
        return interrupted.exit_code


SAVE_SECONDS = 20.0  # of training that a crash may lose; a signal loses none
IMPORTED_LATER = ("torch._dynamo",)  # what torch imports at its first use


def fork_workers(descriptor: int) -> NoReturn:
    """Fork a worker for each request that arrives on a socket, until its other end is closed.

    This process only imports modules, so that a worker starts as a fresh process would. A request is a message [request
    file, result file], with descriptors that the worker holds; answers are [process, null] and, at its end, [process,
    exit code].
    """
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    server, (ended, ends) = os.getpid(), os.pipe()
    os.set_blocking(ends, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends)
    connection, running = socket.socket(fileno=descriptor), set[int]()
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            ready, _, _ = select.select([connection.fileno(), ended], [], [])
            if ended in ready:
                os.read(ended, 4096)
                for pid in list(running):
                    if (status := os.waitpid(pid, os.WNOHANG))[0]:
                        running.remove(pid)
                        connection.send(json.dumps([pid, os.waitstatus_to_exitcode(status[1])]).encode())
            if connection.fileno() in ready:
                message, held, _, _ = socket.recv_fds(connection, 65536, 16)
                if not message:  # Python's own shutdown is slower; Linux signals the workers, which save
                    os._exit(0)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads do not outlive a fork
                    pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (connection.detach(), ended, ends):
                        os.close(other)
                    request_file, result_file = json.loads(message)
                    _end_with(partial(work, request_file, result_file, server))
                for other in held:
                    os.close(other)
                running.add(pid)
                connection.send(json.dumps([pid, None]).encode())
    os._exit(0)


def _end_with(call: Callable[[], int]) -> NoReturn:
    """End this process with the exit code that a call returns, or with the one of its error."""
    code = 1
    try:
        code = call()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_task(task: dict[str, Any], request_file: str, result_file: str) -> int:
    """Run a task and write its result; returns the exit code."""
    started = time.monotonic()
    if len(task["devices"]) > 1 and task["task"] in ON_RANKS:
        return run_on_ranks(task, request_file, result_file)
    # several workers share one terminal, so only one that is alone draws a progress bar
    with progress.quiet() if task["quiet"] or not task["alone"] else nullcontext():
        result, exit_code = perform_task(task)
    write_json_file(Path(result_file), result | {"wall_seconds": time.monotonic() - started})
    return exit_code


ON_RANKS = ("calibrate", "train", "loss")  # the others measure one process, or are too small to share


def run_on_ranks(task: dict[str, Any], request_file: str, result_file: str) -> int:
    """Run a task on ranks, each on one of its devices; return the exit code of the worker."""
    from heddle.distributed.launcher import launch

    try:
        with progress.quiet() if task["quiet"] else nullcontext():
            # torchrun's agent fills in the rank
            arguments = ("--rank", request_file, result_file, "${local_rank}", str(os.getpid()))
            return launch(arguments, len(task["devices"]), max_restarts=0, module=WORKER_MODULE)
    except RankLost as lost:
        failed = {"status": "failed", "message": str(lost), "stops_all": False}
        if not Path(result_file).exists():  # the other ranks name one that hangs
            write_json_file(Path(result_file), failed)
        return lost.exit_code


def be_rank(request_file: str, result_file: str, rank: str, launcher: str) -> NoReturn:
    """Be one rank of a task. Rank 0 writes the result, or the first rank that fails writes the reason.

    launcher: the process that started it. After a signal exit with 130 or 143, without a result.
    """
    from heddle.distributed.process_group import join_ranks

    started = time.monotonic()
    task = json.loads(Path(request_file).read_text(encoding="utf-8"))
    device = task["devices"][int(rank)]

    def run() -> dict[str, Any]:
        try:
            with join_ranks(device, launcher=int(launcher)) as ranks:
                return TASKS[task["task"]]({**task, "device": device, "ranks": ranks})
        except OtherRankFailed as error:
            sys.exit(error.exit_code)

    try:
        with progress.quiet() if task["quiet"] or not task["alone"] else nullcontext():
            result, exit_code = perform(run)
    except Interrupted as interrupted:
        if not task["quiet"]:
            progress.print_status(f"{task['label']}: {interrupted}")
        sys.exit(interrupted.exit_code)
    except Exception as error:  # a bug: its traceback follows
        message = f"rank {rank} failed ({type(error).__name__}: {error})"
        write_json_file(Path(result_file), {"status": "failed", "message": message, "stops_all": False})
        raise
    if rank == "0" or result["status"] != "done":
        write_json_file(Path(result_file), result | {"wall_seconds": time.monotonic() - started})
    sys.exit(exit_code)


def perform_task(task: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The result of a task and the exit code. A rank adds its `Ranks` to the task."""
    return perform(lambda: TASKS[task["task"]](task))


def perform(call: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The result of a call and the exit code. Its status is done, diverged or failed.

    A failed result says in `stops_all` whether other tasks would fail for the same reason.
    """
    try:
        return call(), 0
    except Diverged as error:
        return {"status": "diverged", "message": str(error)}, 0
    except HeddleError as error:
        stops_all = not isinstance(error, RankLost)
        return {"status": "failed", "message": str(error), "stops_all": stops_all}, error.exit_code
    except Exception as error:
        if is_out_of_memory(error):
            message = " ".join(["out of memory", *getattr(error, "__notes__", ())])  # the rank
            return {"status": "failed", "message": message, "stops_all": False}, 1
        operation = nondeterministic_operation(error)
        if operation is None:
            raise
        message = f"deterministic: torch has no deterministic form of {operation}; leave it out, or use another device"
        return {"status": "failed", "message": message, "stops_all": True}, 1


def _exit_with_parent(parent_pid: int) -> None:
    """Make this process end with its parent (on Linux; elsewhere the run folder's lock prevents two trainers)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent_pid:  # the parent ended before the call
            sys.exit(128 + signal.SIGTERM)


def _set_up(task: dict[str, Any]) -> Runtime:
    """Load the user's parts and configure torch. The judge sets limits for a proposal's own code."""
    if task.get("limits"):
        confine(*task["limits"])
    for file in task["part_files"]:
        load_part(Path(file))
    tf32, deterministic = task.get("tf32", False), task.get("deterministic", False)  # a ladder has neither
    choices = Choices.read(task.get("choices", {}))
    return set_up_runtime(task["device"], task["threads"], tf32, deterministic, choices)


def _environment(task: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    return {"command": task["command"], "versions": versions(), "runtime": runtime.describe()}


def _text_job(task: dict[str, Any]) -> tuple[TrainingJob, Corpus]:
    """The training job of a design on the comparison's text."""
    runtime, ranks = _set_up(task), task.get("ranks", ONE_PROCESS)
    with progress.quiet():
        corpus = prepare_corpus(
            task["data"],
            vocab_size=task["vocab_size"],
            max_train_tokens=task["max_train_tokens"],
            tokenizer=None if task["tokenizer"] is None else Path(task["tokenizer"]),
        )
    settings = Settings(**task["settings"])
    if task.get("held_out_data"):  # of a judge: the text of a proposal does not change what it is scored on
        with progress.quiet():
            shared = prepare_corpus(
                task["held_out_data"], vocab_size=None, max_train_tokens=0, tokenizer=Path(task["tokenizer"])
            )
        corpus = replace(corpus, validation=shared.validation)
    source = _held_out_part(corpus, task.get("held_out"), settings.sequence_length)
    job = TrainingJob(
        config=load_config(task["design"]),
        source=source,
        settings=settings,
        out=Path(task["out"]),
        device=runtime.device,
        label=task["label"],
        environment=_environment(task, runtime) | {"ranks": {"count": ranks.count}},
        ranks=ranks,
        save_seconds=SAVE_SECONDS,
        evaluation=EvaluationBudget(
            interim_tokens=interim_tokens(settings, len(source.validation)),
            final_tokens=task.get("final_tokens"),  # a ladder has none
        ),
        trackers=tuple(task.get("trackers", ())),  # a ladder has none
    )
    return job, corpus


def _held_out_part(corpus: Corpus, part: str | list[list[int]] | None, sequence_length: int) -> Corpus:
    """The corpus with the "tuning" or "final" part of its held-out text, or spans of its tokens; None: all of it."""
    if part is None:
        return corpus
    if isinstance(part, list):
        spans = [(start, stop) for start, stop in part]
        return replace(corpus, validation=corpus.validation.select(spans, corpus.tokenizer.byte_lengths))
    tuning, final = split_held_out(corpus.validation, sequence_length, corpus.tokenizer.byte_lengths)
    return replace(corpus, validation=tuning if part == "tuning" else final)


def _train(task: dict[str, Any]) -> dict[str, Any]:
    job, corpus = _text_job(task)
    settings, profile = job.settings, start_profile(corpus, job.settings.sequence_length)
    trained = train(replace(job, observer=profile.add))
    log = read_log(job.out)
    seconds = [line["seconds"] for line in log]
    curve = [(line["tokens"], line["validation_bits_per_byte"]) for line in log if "validation_bits_per_byte" in line]
    rates = sorted(settings.tokens_per_step / second for second in seconds)
    trained_tokens = trained.progress.step * settings.tokens_per_step
    peak_memory = torch.cuda.max_memory_allocated() if job.device.startswith("cuda") else peak_process_memory()
    plan = ExtrapolationPlan(**task["extrapolation"])
    extrapolation = evaluate_extrapolation(
        trained.model, corpus.validation, plan, corpus.tokenizer.byte_lengths, job.autocast
    )
    run = Run(
        seed=settings.seed,
        status="done",
        bits_per_byte=trained.bits_per_byte,
        train_tokens=trained_tokens,
        seconds=sum(seconds),
        train_tokens_per_second=step_speed(settings.tokens_per_step, seconds),
        train_speed_range=quartiles(rates),
        peak_memory_bytes=job.ranks.largest(peak_memory),
        skipped_steps=trained.progress.skipped_steps,
        experts=recent_router_summary(log),
        curve=end_at(curve, trained.bits_per_byte) or [(trained_tokens, trained.bits_per_byte)],
        windows=trained.scores,
        loss_profile=profile.summary(),
        text_recall=measure_text_recall(trained.model, corpus, settings, task["text_recall_rows"], job.autocast),
        extrapolation=[length_result(result) for result in extrapolation],
        sample=sample_text(trained.model, corpus.tokenizer, settings.sequence_length),
    )
    result: dict[str, Any] = plain(run)
    return result


def end_at(curve: Sequence[tuple[int, float]], final: float) -> list[tuple[int, float | None]]:
    """The curve, (tokens, bits per byte), shifted by a constant so that its last point is the final evaluation's.

    Evaluations during training read less of the held-out text than the last one. The part they read may be harder or
    easier than the whole, by about the same amount at each step.
    """
    last = next((bits for _, bits in reversed(curve) if bits is not None), final)
    return [(tokens, None if bits is None else bits + final - last) for tokens, bits in curve]


def _calibrate(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one training step: the median of a few steps on random tokens, on a model that is thrown away."""
    runtime, settings, config = _set_up(task), Settings(**task["settings"]), load_config(task["design"])
    job = TrainingJob(
        config=config,
        source=RandomText(config.vocab_size or 1, settings.sequence_length),
        settings=settings,
        out=Path(task["out"]),
        device=runtime.device,
        label=task["label"],
        ranks=task.get("ranks", ONE_PROCESS),
    )
    times = time_training_steps(job)
    return {"status": "done", "seconds_per_step": statistics.median(times), "timed_seconds": sum(times)}


def _loss(task: dict[str, Any]) -> dict[str, Any]:
    """Train only for the loss on held-out text: a trial of tuning, or a size of a ladder.

    A request with a "trunk" names the folder of the steps before the decay; "previous" names a shorter trunk's folder.
    """
    job, _ = _text_job(task)
    trunk, previous = (None if task.get(key) is None else Path(task[key]) for key in ("trunk", "previous"))
    trained = train(job) if trunk is None else train_branch(job, trunk, previous)
    return {
        "seed": job.settings.seed,
        "status": "done",
        "bits_per_byte": trained.bits_per_byte,
        "train_tokens": trained.progress.step * job.settings.tokens_per_step,
        "seconds": sum(line["seconds"] for line in read_log(job.out)),
        "windows": None if task.get("hides_windows") else trained.scores,
    }


def _recall(task: dict[str, Any]) -> dict[str, Any]:
    """Train a small copy of the design on a probe's task, until it is solved or the budget is spent.

    Like any run it saves checkpoints, and resumes after an interrupt.
    """
    runtime, probe = _set_up(task), RECALL_PROBES[task["probe"]]
    job = TrainingJob(
        config=probe.small_copy(load_config(task["design"])),
        source=probe.task_stream,
        settings=probe.settings(),
        out=Path(task["out"]),
        device=runtime.device,
        label=task["label"],
        environment=_environment(task, runtime),
        evaluation=probe.evaluation(),
    )
    trained = train(job)
    log = read_log(job.out)
    curve = [(line["tokens"], line["validation_accuracy"]) for line in log if "validation_accuracy" in line]
    probe_result = ProbeResult(
        status="done",
        accuracy=trained.task_accuracy,
        steps=trained.progress.step,
        scored=sum(scored for _, scored in trained.scores),
        seconds=sum(line["seconds"] for line in log),
        curve=curve or [(trained.progress.step * job.settings.tokens_per_step, trained.task_accuracy)],
    )
    result: dict[str, Any] = plain(probe_result)
    return result


def _speed(task: dict[str, Any]) -> dict[str, Any]:
    job, _ = _text_job(task)
    settings = job.settings
    rates = [settings.tokens_per_step / seconds for seconds in time_training_steps(job)]
    speeds = measure_speeds(job.config, task["speed_contexts"], job.device, dtype_of(settings.precision))
    read = [(0, [read_rate(job.device)])]
    return {"status": "done", "train": [(settings.sequence_length, rates)], **speeds, "read": read}


TASKS = {"train": _train, "calibrate": _calibrate, "speed": _speed, "recall": _recall, "loss": _loss}


# Branches of a trunk: trainings of several lengths that share all steps before their decay.
#
# With schedule wsd (warmup, stable, decay; Hu et al. 2024) a training of any length is the same up to its decay, so
# that several lengths cost one constant part and their decays (Hägele et al. 2024). A branch begins as a copy of the
# trunk's newest checkpoint and log, as if it had been interrupted there: from there the loop resumes, bit-equal.


def train_branch(job: TrainingJob, trunk: Path, previous: Path | None = None) -> TrainingResult:
    """Train a job with schedule wsd; the steps before its decay are a separate run in the folder `trunk`.

    The result is bit-equal to `train(job)`. previous: the trunk of a shorter branch with the same settings, which this
    trunk continues; None, or a folder without a checkpoint: start at the first step. The same call resumes
    after an interrupt. Raises ConfigError for several ranks, other schedules, or a warmup that depends on the length or
    outlasts the trunk, and whatever `train` raises.
    """
    settings = job.settings
    if job.ranks.count > 1:
        raise ConfigError(f"ranks: a branch is trained by one process, not {job.ranks.count}; use one rank")
    if settings.schedule != "wsd":
        raise ConfigError(f"schedule {settings.schedule}: branches decay from a constant learning rate; set wsd")
    if settings.warmup is None or settings.warmup > settings.constant_steps:
        raise ConfigError(
            f"warmup {settings.warmup}: branches share their warmup, so it must be a number, and at most the "
            f"{settings.constant_steps} steps before the decay"
        )
    if not checkpoint_steps(job.out):
        budget = replace(job.evaluation, final_tokens=1)  # the loss before the decay is not used
        stable = replace(settings, steps=settings.constant_steps, schedule="constant")
        start = replace(job, settings=stable, out=trunk, evaluation=budget, observer=None)
        if previous is not None and previous != trunk and not checkpoint_steps(trunk):
            _start_from(start, previous)
        train(start)
        _start_from(job, trunk)
    return train(job)


def _start_from(job: TrainingJob, source: Path) -> None:
    """Begin a job's run with the newest checkpoint of another run, if it has one."""
    path = latest_checkpoint(source, "training").path
    if path is None:
        return
    saved, contents = read_json_file(source / RUN_FILE), read_folder(path, "training")
    identity = to_plain_json(job.identity())
    difference = first_difference(trunk_identity(saved), trunk_identity(identity))
    step = int(path.name.removeprefix("step-"))
    if difference or contents.log is None or step > job.settings.steps:
        raise CheckpointError(f"{source}: {job.out} is not a branch of it: {difference or f'it is at step {step}'}")
    environment = {key: value for key, value in saved.items() if key not in IDENTITY_KEYS}
    with RunLock(job.out):
        open_run(job.out, identity, environment)
        copy_log(source, job.out, contents.log)
        tensors = {name: contents.tensors(name) for name in contents.tensor_sets}
        write_checkpoint(job.out, step, tensors=tensors, documents=contents.documents, log=contents.log)


if __name__ == "__main__":
    main()
