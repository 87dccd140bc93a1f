"""Comparisons whose runs have several ranks: one process's numbers, and a sentence where a rank dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle import progress
from heddle.distributed import launcher
from heddle.distributed.ranks import Ranks
from heddle.errors import RankLost
from heddle.lab import workers
from heddle.lab.compare import worker
from heddle.lab.workers import Task, Workers, run_tasks
from heddle.model import decoder
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import tensors_sha256
from heddle.training import built_models, width_transfer
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan
from heddle.training.settings import Settings
from tests import small
from tests.analysis.comparison.runs import Ended
from tests.distributed.ranks import on_ranks
from tools.kill_test import children, done, finish

TOLERANCE = 1e-10
SENTENCE = "rank 1 (process 12, SIGKILL) was killed; the same command continues"


def request(folder: Path, out: str, **fields: Any) -> dict[str, Any]:
    """A training task of a comparison, as a worker reads it."""
    task = {
        "task": "train",
        "label": "one, seed 0",
        "out": str(folder / out),
        "design": small.design(),
        "data": [str(small.folder(folder / "text"))],
        "tokenizer": None,
        "vocab_size": small.VOCABULARY,
        "max_train_tokens": None,
        "settings": asdict(Settings(steps=4, batch_size=4, sequence_length=16, evaluate_every=2)),
        "threads": 1,
        "part_files": [],
        "extrapolation": asdict(ExtrapolationPlan(16, (1, 2), (0, 40), 1)),
        "text_recall_rows": 4,
        "command": "heddle compare",
        "device": "cpu",
        "quiet": True,
        "alone": True,
    }
    return task | fields


def close(actual: Any, expected: Any) -> bool:
    """Whether plain data is equal, and its numbers to `TOLERANCE`."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(close(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return bool(actual == (pytest.approx(expected, abs=TOLERANCE) if isinstance(expected, float) else expected))


def test_a_run_on_ranks_has_the_numbers_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, which divide neither the held-out batches nor their number; a planted order of batches is caught."""
    for module in (built_models, width_transfer):
        monkeypatch.setattr(module, "build", partial(decoder.build, dtype=torch.float64))
    monkeypatch.setattr(worker, "sample_text", lambda *_: "")
    settings = asdict(Settings(steps=2, batch_size=6, sequence_length=16))

    def results(out: str) -> Any:
        task = request(tmp_path, out, settings=settings)
        with progress.quiet():
            return on_ranks(3, lambda rank: worker.perform_task(task | {"ranks": Ranks(rank, 3)}))

    def without_times(result: dict[str, Any]) -> dict[str, Any]:
        times = ("seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes")
        return {name: value for name, value in result.items() if name not in times}

    with progress.quiet():
        expected, code = worker.perform_task(request(tmp_path, "one", settings=settings))
    assert code == 0, expected
    assert len(expected["loss_profile"]["positions"]) > 1
    assert len(expected["extrapolation"]) == 2
    for result, code in results("three"):
        assert code == 0, result
        assert close(without_times(result), without_times(expected))
    gather = Ranks.gather
    monkeypatch.setattr(
        Ranks, "gather", lambda ranks, x: gather(ranks, x).flip(0) if x.dim() == 3 else gather(ranks, x)
    )
    profiles = [result["loss_profile"] for result, _ in results("planted")]
    assert not any(close(profile, expected["loss_profile"]) for profile in profiles)


@pytest.fixture
def as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Be the only rank of a task; returns the exit code and the result."""

    def run(**fields: Any) -> tuple[int, dict[str, Any]]:
        files = tmp_path / "task.json", tmp_path / "result.json"
        files[0].write_text(json.dumps(request(tmp_path, "run", devices=["cpu"], **fields)), encoding="utf-8")
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", "0")  # the system chooses it
        monkeypatch.setattr(sys, "argv", ["worker", "--rank", *map(str, files), "0", str(os.getppid())])
        with pytest.raises(SystemExit) as ended:
            worker.main()
        return int(ended.value.code or 0), json.loads(files[1].read_text(encoding="utf-8"))

    return run


def test_a_rank_writes_what_became_of_the_task(as_rank: Callable[..., Any]) -> None:
    code, result = as_rank()
    assert (code, result["status"], result["train_tokens"]) == (0, "done", 4 * 4 * 16)
    code, result = as_rank(data=["no such file"])
    assert (code, result["status"], result["stops_all"]) == (2, "failed", True)
    assert "no such file" in result["message"]


def test_a_rank_with_a_bug_names_itself(
    tmp_path: Path, as_rank: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worker.TASKS, "train", lambda task: task["no such field"])
    with pytest.raises(KeyError):
        as_rank()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["stops_all"]) == ("failed", False)
    assert result["message"] == "rank 0 failed (KeyError: 'no such field')"


def test_a_run_that_lost_a_rank_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result.json"
    starts = []

    def launch(arguments: Any, ranks: int, max_restarts: int, module: str) -> int:
        starts.append((arguments[:3], ranks, max_restarts, module))
        raise RankLost(SENTENCE)

    def start_worker(request_file: Path, result_file: Path) -> Ended:
        task = json.loads(request_file.read_text(encoding="utf-8"))
        return Ended(worker.run_on_ranks(task, "task.json", str(result_file)))

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(workers, "start_worker", start_worker)
    task = request(tmp_path, "run")
    ended = run_tasks([Task("one", result, task)], Workers(("cpu", "cpu"), 1, ranks=2))
    assert ended == [{"status": "failed", "stops_all": False, "message": f"one: {SENTENCE}"}]
    assert starts == [(("--rank", "task.json", str(result)), 2, 0, worker.__name__)]
    assert not result.exists()  # the next call tries it again


@pytest.mark.soak
def test_a_comparison_with_two_processes_a_run(tmp_path: Path) -> None:
    """A rank is killed: its run ends, the other is done; the same command does what is missing, as `heddle train`."""
    design, text, out = small.design_file(tmp_path / "one.yaml"), small.folder(tmp_path / "text"), tmp_path / "out"
    shared = ["--data", str(text), "--sequence-length", "32", "--batch-size", "8", "--device", "cpu", "--threads", "1"]
    options = ["--seeds", "2", "--tokens", "30000", "--speed-context-length", "16", "--recall", "none", "--nproc", "2"]
    command = [sys.executable, "-m", "heddle", "compare", str(design), *shared, *options, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while done(out / "runs" / "one-seed0") < 40:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    [launching] = children(process.pid)
    victim = children(launching)[1]
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert re.search(rf"one, seed 0: rank \d \(process {victim}\D.*; the same command continues", err), err
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "continuing" in again.stderr
    steps = 30_000 // 256
    like = ["--steps", str(steps), "--lr", "0.003", "--save-every", str(steps // 4), "--nproc", "2", "--quiet"]
    train = [sys.executable, "-m", "heddle", "train", str(design), *shared, *like, "--out", str(tmp_path / "train")]
    finish(subprocess.Popen(train, stdout=subprocess.DEVNULL))
    runs = out / "runs" / "one-seed0", tmp_path / "train"
    first, second = (tensors_sha256(checkpoint_folder(run, steps)) for run in runs)
    assert first == second
