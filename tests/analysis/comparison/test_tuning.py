"""Tuning within a comparison: trials, then runs at each design's best values. Workers are invented but in one test."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.data.corpus import prepare_corpus
from heddle.data.token_file import split_held_out
from heddle.lab import workers as processes
from heddle.lab.compare import run as report_writer
from heddle.lab.compare.results import plain
from heddle.lab.compare.tasks import run_result
from heddle.lab.compare.worker import perform_task
from heddle.storage.file_io import read_json_file, write_json_file
from tests import small
from tests.analysis.comparison.runs import read_report
from tests.analysis.scripted_workers import EndedWorkers

OPTIONS = ["--sequence-length", "32", "--device", "cpu", "--threads", "1", "--recall", "none"]
OPTIONS += ["--speed-context-length", "16", "--extrapolate", "1", "--tokens", "12900", "--quiet"]
OPTIMA = {"full": 0.002, "local": 0.008}


class Workers(EndedWorkers):
    """Takes the place of worker processes: a loss that follows from the learning rate, and no training."""

    diverges_above = math.inf

    def result(self, task: dict[str, Any], name: str) -> dict[str, Any]:
        if task["task"] == "speed":
            return {"status": "done", "train": [], "prefill": [], "decode": []}
        settings = task["settings"]
        if settings["learning_rate"] > self.diverges_above:
            return {"status": "diverged", "message": "10 steps in a row"}
        design = task["label"].split(",")[0]
        luck = random.Random(f"{design}{settings['seed']}").gauss(0, 0.001)
        loss = 2.0 + 0.05 * math.log2(settings["learning_rate"] / OPTIMA[design]) ** 2 + luck
        tokens = settings["steps"] * settings["batch_size"] * settings["sequence_length"]
        numbers = {"bits_per_byte": loss, "train_tokens": tokens, "seconds": 1.0, "skipped_steps": 0}
        windows = [[loss * 100 + random.Random(index).gauss(0, 1), 100] for index in range(20)]
        empty = plain(run_result(settings["seed"], {"status": "failed", "message": "invented"}))
        return (
            empty | numbers | {"status": "done", "windows": windows, "peak_memory_bytes": 1, "curve": [[tokens, loss]]}
        )


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    monkeypatch.setattr(report_writer, "SLOW_REPORT_SECONDS", 1e9)  # on a slow machine, too, after each run
    return workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tuning")
    small.folder(root / "text", documents=200, size=1500)
    small.design_file(root / "full.yaml")
    local = small.design()
    local["layers"][0]["mixer"]["window"] = 4
    small.design_file(root / "local.yaml", local)
    return root


@pytest.fixture
def compare(folder: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*options: str, out: str = "out") -> int:
        designs = [str(folder / f"{name}.yaml") for name in OPTIMA]
        text = ["--data", str(folder / "text"), "--out", str(tmp_path / out)]
        batch = [] if any("batch_size" in option for option in options) else ["--batch-size", "4"]
        seeds = [] if "--seeds" in options else ["--seeds", "2"]
        return run_command(["compare", *designs, *text, *OPTIONS, *batch, *seeds, *options])

    return run


RATES = ("--tune", "lr=0.0005..0.016", "--tune-budget", "3")  # 0.0005, 0.001 … 0.016


def test_each_design_is_trained_at_its_own_best(
    compare: Callable[..., int], workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*RATES) == 0
    tuning = read_report(tmp_path / "out")["tuning"]
    assert {design["name"]: design["best"] for design in tuning["designs"]} == {"full": [0.002], "local": [0.008]}
    trials = [task for task in workers.tasks.values() if task["task"] == "loss"]
    runs = {stem: task for stem, task in workers.tasks.items() if task["task"] == "train"}
    assert len(trials) == tuning["budget"]["runs"]
    assert tuning["budget"]["whole_runs"] <= 3 * 2 * 2
    # the same values, seeds and steps for both designs; a schedule of its own; no seed of the comparison
    by_design = [
        sorted((task["settings"]["learning_rate"], task["settings"]["seed"], task["settings"]["steps"])
               for task in trials if task["label"].startswith(name))
        for name in OPTIMA
    ]  # fmt: skip
    assert by_design[0] == by_design[1]
    assert {task["held_out"] for task in trials} == {"tuning"}
    assert {task["settings"]["evaluate_every"] for task in trials} == {None}
    assert min(task["settings"]["seed"] for task in trials) >= 1_000_000
    assert min(task["settings"]["steps"] for task in trials) >= 32
    # then each design at its own best values, on the comparison's seeds and on other text
    for stem, task in runs.items():
        rate = 0.004 if "shared" in stem else OPTIMA[stem.partition("-")[0]]
        assert task["settings"]["learning_rate"] == rate
        assert task["settings"]["seed"] in (0, 1)
        assert task["settings"]["steps"] == 100
        assert task["held_out"] == "final"
    assert set(runs) >= {"full-seed0", "full-seed1", "local-seed0", "local-seed1"}
    out = capsys.readouterr().out
    assert "lr 0.002 (full) and lr 0.008 (local)" in " ".join(out.split())
    assert "Each design at its own best" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_shared_value_is_run_where_it_may_answer_otherwise(
    compare: Callable[..., int], workers: Workers, tmp_path: Path
) -> None:
    """At 0.004 both are a step from their best, at 0.002 or 0.008 one of them is two steps away."""
    assert compare("--tune", "lr=0.002,0.008", "--tune-budget", "6") == 0
    report = read_report(tmp_path / "out")
    shared = report["tuning"]["shared_values"]
    assert shared["values"] in ([0.002], [0.008])
    behind = "local" if shared["values"] == [0.002] else "full"
    assert sorted(stem for stem in workers.tasks if "shared" in stem) == [f"{behind}-shared-seed{n}" for n in (0, 1)]
    [pair] = shared["pairs"]
    assert abs(pair["at_shared_values"]["mean"]) == pytest.approx(0.2, abs=0.01)
    assert abs(pair["own"]["mean"]) < 0.01
    assert "and the answers differ" in report["tuning"]["sentences"][-1]


def test_an_interrupted_search_goes_on(compare: Callable[..., int], workers: Workers, tmp_path: Path) -> None:
    assert compare(*RATES, out="whole") == 0
    everything, workers.tasks = list(workers.tasks), {}
    whole = read_report(tmp_path / "whole")
    workers.interrupted_at = everything[5]
    assert compare(*RATES) == 143
    left, tried = read_report(tmp_path / "out"), len(whole["tuning"]["fields"][0]["values"])
    assert left["tuning"] is None
    assert left["progress"]["stages"][0] == {"title": "tuning runs", "finished": 5, "planned": 2 * tried}
    workers.interrupted_at = ""
    assert compare(*RATES) == 0
    assert list(workers.tasks) == everything
    assert read_report(tmp_path / "out")["tuning"] == whole["tuning"]
    assert compare(*RATES) == 0
    assert list(workers.tasks) == everything


def test_a_folder_of_successive_halving_is_refused(
    compare: Callable[..., int], workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It began with shorter trials under the same names: their losses are not those of the grid."""
    assert compare(*RATES) == 0
    before = (tmp_path / "out" / "report.json").read_bytes()
    for file in (tmp_path / "out" / "runs").glob("*-tune1000000-*.json"):
        result = read_json_file(file)
        write_json_file(file, result | {"train_tokens": result["train_tokens"] // 3})
    assert compare(*RATES) == 2
    assert "successive halving" in (err := capsys.readouterr().err)
    assert f"{tmp_path / 'out'}: " in err
    assert "another folder" in err
    assert (tmp_path / "out" / "report.json").read_bytes() == before


def test_added_seeds_keep_the_values(
    compare: Callable[..., int], workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget is a share of the comparison: with more seeds a new search would be another one."""
    assert compare(*RATES) == 0
    before, workers.tasks = read_report(tmp_path / "out")["tuning"], {}
    assert compare(*RATES, "--seeds", "4") == 0
    after = read_report(tmp_path / "out")["tuning"]
    assert (after["rungs"], after["designs"]) == (before["rungs"], before["designs"])
    assert not [stem for stem in workers.tasks if "-tune" in stem]
    assert {f"{name}-seed{seed}" for name in OPTIMA for seed in (2, 3)} <= set(workers.tasks)
    capsys.readouterr()
    assert compare(*RATES, "--seeds", "4", "preset:mha-tiny") == 2
    assert "holds a comparison without mha-tiny; a tuned comparison cannot gain designs" in capsys.readouterr().err


def test_what_diverges_everywhere_ends_with_a_sentence(
    compare: Callable[..., int], workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.diverges_above = 0.0
    assert compare(*RATES) == 1
    assert "tune lr:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tune", "lr=0.01..0.001"], "tune lr=0.01..0.001:"),
        (["--tune", "lr=0.001..0.01", "--lr", "0.1"], "--lr and --tune lr:"),
        (["--tune-budget", "2"], "--tune-budget 2:"),
        (["--tune", "lr=0.001..0.01", "--tune-budget", "x"], "tuning budget x: expected a share"),
        (["--tune", "lr=0.001..0.01", "--tune-budget", "0.1"], "least 0.96"),
        (["--tune", "lr=0.001..0.01", "--tokens", "2000"], "tune lr:"),
        (["--tune", "lr_scale.layers.7=0.1,1"], "'layers.7'"),
    ],
)
def test_what_cannot_be_tuned_ends_before_anything_is_written(
    options: list[str], sentence: str, compare: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*options) == 2
    out, err = capsys.readouterr()
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_trials_and_runs_are_scored_on_different_text(
    compare: Callable[..., int], workers: Workers, folder: Path, tmp_path: Path
) -> None:
    """A real training of each, from the requests of a comparison with a tuned batch size."""
    assert compare("--tune", "batch_size=4,8", "--tune-budget", "6") == 0
    corpus = prepare_corpus([str(folder / "text")], vocab_size=small.VOCABULARY, max_train_tokens=12900)
    tuning, final = split_held_out(corpus.validation, 32, corpus.tokenizer.byte_lengths)
    requests = {task["settings"]["batch_size"]: task for task in workers.tasks.values() if task["task"] == "loss"}
    assert {4, 8} <= set(requests)
    assert requests[4]["settings"]["steps"] == 2 * requests[8]["settings"]["steps"]
    run = workers.tasks["full-seed0"]
    windows = {}
    for batch_size in (4, 8):
        task = requests[batch_size]
        settings = run["settings"] | {"batch_size": batch_size, "steps": 2}
        result, code = perform_task(run | {"settings": settings, "out": str(tmp_path / f"run{batch_size}")})
        assert code == 0
        windows[batch_size] = [size for _, size in result["windows"]]
        trial, code = perform_task(
            task | {"settings": task["settings"] | {"steps": 2}, "out": str(tmp_path / f"trial{batch_size}")}
        )
        assert code == 0
        assert trial["bits_per_byte"] != result["bits_per_byte"]
        assert trial["train_tokens"] == 2 * 32 * batch_size
    assert windows[4] == windows[8], "runs of different batch sizes are paired by window"
    assert sum(windows[4]) == final.text_bytes
    assert 0 < tuning.text_bytes < final.text_bytes
