"""A ladder from beginning to end: run, killed and continued, grown by seeds, sizes and designs, refused, shown."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab import workers as processes
from heddle.lab.compare.tables import format_number
from heddle.lab.compare.worker import perform_task
from heddle.lab.ladder import run as ladder_runs
from heddle.lab.ladder.ladder import Choice, _plan, describe_ladder
from heddle.lab.ladder.run import Ladder, StepTimes, open_ladder
from heddle.lab.ladder.settings import LadderSettings
from heddle.lab.pages.render import plotly_script
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import flops_per_token, parameter_counts
from heddle.runtime import set_up_runtime
from heddle.storage.file_io import read_json_file, write_json_file
from tests import small
from tests.analysis.comparison.plain import ladder_page
from tests.analysis.scripted_workers import EndedWorkers
from tests.html_page import Page

SIZES = "3000,6k,12k,24k"
OPTIONS = ["--batch-size", "2", "--sequence-length", "16", "--tokens-per-parameter", "1", "--device", "cpu"]
OPTIONS += ["--threads", "1", "--quiet"]
LARGE_STEPS = ["--batch-size", "8"]
RATIOS = ["--tokens-per-parameter", "1,2,4,8", *LARGE_STEPS]


class Workers(EndedWorkers):
    """Takes the place of worker processes: most runs get a loss from a law, without training."""

    trained: str | None = None  # how the names of the runs begin that are real
    diverges = ""
    jumps = False  # whether the largest sizes are much better than their law

    def result(self, task: dict[str, Any], name: str) -> dict[str, Any]:
        if self.trained is not None and name.startswith(self.trained):
            return perform_task(task)[0]
        if task["task"] == "calibrate":
            return {"status": "done", "seconds_per_step": 0.5}
        if name == self.diverges:
            return {"status": "diverged", "message": "10 steps in a row"}
        settings, size = task["settings"], parameter_counts(build(load_config(task["design"]), device="meta"))[1]
        tokens = settings["steps"] * settings["batch_size"] * settings["sequence_length"]
        loss = self.law(name, size, tokens) + 0.003 * math.sin(7 * settings["seed"] + len(self.ran))
        return {"status": "done", "bits_per_byte": loss, "seconds": 1.0}

    def law(self, name: str, size: float, tokens: float) -> float:
        factor = 0.9 if name.startswith("two") else 1.0
        jump = -0.4 if self.jumps and size > 20_000 else 0.0
        return 1.5 + factor * (size / 1e4) ** -0.3 + jump


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    return workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ladder")
    small.folder(root / "text", 30, 2000)
    small.design_file(root / "one.yaml", small.design(32))
    design = small.design(32)
    design["layers"][0]["mixer"]["kv_heads"] = 2
    small.design_file(root / "two.yaml", design)
    return root


def command(folder: Path, out: Path, *options: str, designs: tuple[str, ...] = ("one", "two")) -> list[str]:
    files = [f"{folder}/{design}.yaml" for design in designs]
    chosen = [] if "--sizes" in options else ["--sizes", SIZES]
    return ["ladder", *files, "--data", f"{folder}/text", "--out", str(out), *chosen, *OPTIONS, *options]


def read_report(out: Path) -> dict[str, Any]:
    return read_json_file(out / "ladder.json")


def test_a_whole_ladder(folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command(folder, tmp_path, "--target", "200k")) == 0
    out, _ = capsys.readouterr()
    report = read_report(tmp_path)
    assert len(workers.ran) == 2 * 4 * 2
    # a seed of every size before the next, so that time that ends leaves each design all sizes
    assert [re.sub(r"-w\d+-", " ", name) for name in workers.ran] == [
        *["one seed0", "two seed0"] * 4,
        *["one seed1", "two seed1"] * 4,
    ]
    assert [design["name"] for design in report["designs"]] == ["one", "two"]
    for design in report["designs"]:
        sizes = [rung["parameters"] for rung in design["rungs"]]
        assert sizes == sorted(sizes)
        for rung in design["rungs"]:
            assert rung["tokens"] == pytest.approx(rung["parameters"], rel=0.02)
            assert rung["learning_rate"] == pytest.approx(0.003 * (32 / rung["width"]) ** 0.5)
            assert rung["training_flops"] == 3 * rung["flops_per_token"] * rung["tokens"]
            assert [run["seed"] for run in rung["runs"]] == [0, 1]
            low, high = rung["interval"]
            assert low < rung["loss"] < high
    for predicted, factor in zip(report["predictions"], (1.0, 0.9), strict=True):
        low, high = predicted["measurement"]
        assert low < 1.5 + factor * 20**-0.3 < high
    [equal] = report["equal_loss"]
    assert (equal["design"], equal["baseline"]) == ("two", "one")
    assert equal["ratio"] < 1
    assert [test["within"] for test in report["held_out"]] == [True, True]
    for sentence in report["verdict"]:
        assert sentence in out
    assert report["verdict"][0].startswith("At 200 k parameters and 200 k tokens one is predicted to reach ")
    assert out.rstrip().endswith(f"report: {tmp_path}/ladder.html")
    text = (tmp_path / "ladder.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"https?://|url\(|@import", text.replace(plotly_script(), ""))
    for sentence in (*report["verdict"], *report["warnings"]):
        assert sentence in page.text().replace("\u00a0", " ")
    figures = json.loads(page.scripts[0])
    bands = [trace for figure in figures.values() for trace in figure["data"] if trace.get("fill") == "toself"]
    assert len(bands) == 4  # of each design in each of two figures
    assert text == ladder_page(report)


def test_runs_are_real(folder: Path, tmp_path: Path, workers: Workers) -> None:
    workers.trained = ""
    quick = ("--batch-size", "16", "--tokens-per-parameter", "2")
    assert run_command(command(folder, tmp_path, "--seeds", "1", *quick, designs=("one",))) == 0
    report = read_report(tmp_path)
    losses = [rung["loss"] for rung in report["designs"][0]["rungs"]]
    assert losses == sorted(losses, reverse=True)
    assert report["fit"]["seed_deviation"] == 0
    assert any(warning.startswith("One seed") for warning in report["warnings"])
    assert report["equal_loss"] == report["crossings"] == []


def test_an_interrupted_ladder_goes_on_and_grows(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path / "whole")) == 0
    everything, workers.ran = workers.ran, []
    out = tmp_path / "out"
    workers.interrupted_at = everything[5]
    assert run_command(command(folder, out)) == 143
    assert workers.ran == everything[:5]
    workers.ran, workers.interrupted_at = [], ""
    assert run_command(command(folder, out)) == 0
    assert workers.ran == everything[5:]
    whole, continued = (read_report(path)["designs"] for path in (tmp_path / "whole", out))
    assert [[rung["tokens"] for rung in design["rungs"]] for design in whole] == [
        [rung["tokens"] for rung in design["rungs"]] for design in continued
    ]

    workers.ran = []
    assert run_command(command(folder, out, "--seeds", "3", "--sizes", "48k", designs=("one",))) == 0
    assert sum(name.endswith("seed2") for name in workers.ran) == 2 * 5
    assert len(workers.ran) == 2 * 5 + 2 * 2  # the third seed at all sizes, the others at the new one
    report = read_report(out)
    assert [len(design["rungs"]) for design in report["designs"]] == [5, 5]
    workers.ran = []
    (folder / "three.yaml").write_text((folder / "one.yaml").read_text().replace("24", "48"), encoding="utf-8")
    assert run_command(command(folder, out, "--sizes", "5", designs=("three",))) == 0
    assert len(workers.ran) == 5 * 3
    assert [design["name"] for design in read_report(out)["designs"]] == ["three", "one", "two"]
    assert read_report(out)["baseline"] == "three"


def test_a_failed_self_test_comes_first(folder: Path, tmp_path: Path, workers: Workers) -> None:
    workers.jumps = True
    assert run_command(command(folder, tmp_path)) == 0
    report = read_report(tmp_path)
    assert [test["within"] for test in report["held_out"]] == [False, False]
    assert report["verdict"][0].startswith("The self-test failed, so do not trust the predictions: ")


def test_failed_runs_are_told(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path)) == 0
    (tmp_path / "runs" / "one-w8-seed0.json").unlink()
    workers.diverges = "one-w8-seed0"
    assert run_command(command(folder, tmp_path)) == 0
    report = read_report(tmp_path)
    first = report["designs"][0]["rungs"][0]
    assert [run["status"] for run in first["runs"]] == ["diverged", "done"]
    assert first["seeds"] == 1
    assert "1 of 16 runs did not finish; a mean without them may look too good." in report["warnings"]


@pytest.mark.usefixtures("slow")
def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = command(folder, tmp_path / "out", "--dry-run", "--json", designs=("one",))
    assert run_command(asked) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert [run["design"] for run in estimate["runs"]] == ["one"] * 4
    seconds = [run["seconds"] for run in estimate["runs"]]
    assert min(seconds) > 0
    assert estimate["seconds"] > 2 * sum(seconds) / estimate["workers"]  # processes start, and evaluate at their end
    plain = [word for word in asked if word != "--json"]
    assert run_command(plain) == 0
    assert capsys.readouterr().out.rstrip().endswith("Nothing was trained.")
    # what has a result is not counted again
    assert run_command([word for word in plain if word != "--dry-run"]) == 0
    capsys.readouterr()
    assert run_command([*plain, "--seeds", "3"]) == 0
    printed = capsys.readouterr()
    assert "4 of 12 runs are left" in printed.out
    assert run_command([*asked, "--seeds", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] < 0.8 * estimate["seconds"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--sizes", "3"], "sizes 3:"),
        (["--sizes", "3k,6k,12k"], "sizes: 3"),
        (["--sizes", "3k,many"], "--sizes many:"),
        (["--sizes", "6k,6k,12k,24k"], "--sizes 6k,6k,12k,24k: has a size twice"),
        (["--target", "0"], "--target 0:"),
        (["--target", "1"], "--target 1: is below the smallest size"),
        (["--tokens-per-parameter", "1,1"], "--tokens-per-parameter 1,1: has a number twice"),
        (["--seeds", "0"], "seeds 0:"),
        (["--tokens-per-parameter", "-1"], "tokens_per_parameter -1:"),
        (["--tokens-per-parameter", "0.01"], "gives the smallest size, "),
        (["--tokens-per-parameter", "0.01", "--dry-run"], "gives the smallest size, "),
        (["--warmup", "9999", "--dry-run"], "--warmup 9999: is longer than a run of "),
        (["--sizes", ""], "--sizes :"),
        (["--target", "1e300"], "--target 1e300:"),
        (["--lr", "0"], "learning_rate 0.0:"),
        (["--lr-exponent", "9"], "rate_exponent 9:"),
        (["--irreducible", "none"], "--irreducible none:"),
        (["--sizes", "6000,6001,12k,24k"], "sizes:"),
        (["--sizes", "500,6k,12k,24k"], "sizes 500:"),
        (["--tokens-per-parameter", "1,x"], "--tokens-per-parameter 1,x:"),
        (["--target-flops", "1e9"], "target_flops:"),
        # over several numbers of tokens
        (["--tokens-per-parameter", "1,2"], "tokens_per_parameter: 2 values"),
        (["--tokens-per-parameter", "1,2,2.01", *LARGE_STEPS], "tokens_per_parameter 2 and 2.01:"),
        ([*RATIOS, "--schedule", "cosine"], "schedule cosine:"),
        (
            [*RATIOS, "--warmup", "20"],
            "steps before the decay, and the warmup takes 20; give more, or a shorter warmup",
        ),
        ([*RATIOS, "--target-tokens", "0"], "--target-tokens 0:"),
    ],
)
def test_bad_input_is_one_sentence(
    options: list[str],
    sentence: str,
    folder: Path,
    tmp_path: Path,
    workers: Workers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(command(folder, tmp_path / "out", *options)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert workers.ran == []
    assert not (tmp_path / "out" / "plan.json").exists()


def test_another_ladder_is_refused(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path)) == 0
    before = (tmp_path / "plan.json").read_bytes()
    small.design_file(tmp_path.parent / "one.yaml", small.design(16))
    other = ["ladder", str(tmp_path.parent / "one.yaml"), "--data", f"{folder}/text", "--out", str(tmp_path), *OPTIONS]
    for asked, reason in (
        (command(folder, tmp_path, "--lr", "0.1"), "learning_rate"),
        (other, "holds another ladder: the design one was different; rename yours, or use another folder"),
    ):
        capsys.readouterr()
        assert run_command(asked) == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert run_command(command(folder, tmp_path / "other")) == 2
    assert "holds something else (file)" in capsys.readouterr().err


def hours(folder: Path, out: Path, *options: str, as_json: bool = True) -> int:
    """A ladder with a time budget, of one design; of two, which it compares, in words. Nothing is trained."""
    printed, designs = (["--json"], ("one",)) if as_json else ([], ("one", "two"))
    words = list(command(folder, out, *options, "--dry-run", *printed, designs=designs))
    if not as_json:
        words.remove("--quiet")
    for option in ("--sizes", "--tokens-per-parameter", "--seeds"):
        if option in words and option not in options:
            index = words.index(option)
            del words[index : index + 2]
    return run_command(words)


@pytest.fixture
def slow(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 10 MFLOP/s, whose workers take a second beside their steps."""
    real = workers.start

    def start(request: Path, target: Path) -> Workers:
        task = json.loads(request.read_text())
        model, settings = build(load_config(task["design"]), device="meta"), task["settings"]
        flops = 3 * flops_per_token(model, settings["sequence_length"]) * settings["batch_size"]
        seconds = flops * settings["sequence_length"] / 1e7
        write_json_file(target, {"status": "done", "seconds_per_step": seconds, "timed_seconds": 0.0})
        return real(request, target) if task["task"] != "calibrate" else workers

    monkeypatch.setattr(processes, "start_worker", start)


@pytest.mark.usefixtures("slow")
def test_a_budget_chooses_sizes_that_fit_and_reach_the_target(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    largest = {}
    for budget in ("20h", "80h"):
        assert hours(folder, tmp_path / "out", "--target", "200k", "--budget", budget) == 0
        estimate = json.loads(capsys.readouterr().out)
        largest[budget] = max(run["parameters"] for run in estimate["runs"])
        assert 0.3 < estimate["seconds"] / (3600 * int(budget[:-1])) < 1
        assert estimate["seeds"] == 2
        assert len(estimate["runs"]) == 5
    assert 200_000 / 30 < largest["20h"] < largest["80h"] <= 110_000
    # what was asked for stays
    assert hours(folder, tmp_path / "out", "--target", "200k", "--budget", "20h", "--seeds", "4", "--sizes", "4") == 0
    estimate = json.loads(capsys.readouterr().out)
    assert (estimate["seeds"], len(estimate["runs"])) == (4, 4)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--sizes", SIZES, "--tokens-per-parameter", "20", "--budget", "1m"), "this ladder takes about"),
        (("--budget", "1s", "--target", "200k"), "--budget 1 s: is too short for 5 sizes"),
        (("--budget", "80h", "--target", "1"), "--target 1: no 5 sizes of these designs are below half of it"),
        (("--budget", "80h", "--sizes", "12"), "choose sizes that it has"),
        (("--budget", "a day"), "--budget a day: must be a time above 0"),
    ],
)
def test_a_budget_that_answers_nothing_is_refused(
    options: tuple[str, ...], sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hours(folder, tmp_path / "out", *options) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("slow")
def test_a_budget_too_short_for_the_target_predicts_as_far_as_it_reaches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hours(folder, tmp_path / "out", "--target", "100M", "--budget", "20h") == 0
    estimate = json.loads(capsys.readouterr().out)
    assert 0.3 < estimate["seconds"] / (3600 * 20) < 1
    assert 30 * max(run["parameters"] for run in estimate["runs"]) < 100e6


@pytest.mark.usefixtures("slow")
def test_a_budget_too_short_for_the_target_names_the_one_that_reaches_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(budget: str) -> str:
        assert hours(folder, tmp_path / "out", "--target", "10M", "--budget", budget, as_json=False) == 0
        return capsys.readouterr().err

    said = re.search(r"--budget (\d+)h would reach it", answer("20h"))
    assert said is not None
    enough = int(said[1])
    assert "it predicts 10.0 M parameters" in answer(f"{enough}h")
    assert "would reach it" in answer(f"{int(0.9 * enough)}h")


@pytest.mark.parametrize(("runs", "sizes"), [(5, (3, 2)), (8, (4, 4))])
def test_time_that_ends_leaves_an_answer(
    runs: int, sizes: tuple[int, int], folder: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ladder_runs, "run_tasks", lambda tasks, *rest, **until: processes.run_tasks(list(tasks)[:runs], *rest, **until)
    )
    assert run_command(command(folder, tmp_path, "--target", "600k")) == 0
    report = read_report(tmp_path)
    finished = [[rung["parameters"] for rung in design["rungs"] if rung["seeds"]] for design in report["designs"]]
    assert tuple(map(len, finished)) == sizes
    fitted = [name for name, count in zip(("one", "two"), sizes, strict=True) if count >= 3]
    reach = 30 * min(max(each) for each, count in zip(finished, sizes, strict=True) if count >= 3)
    assert report["target"] == pytest.approx(min(6e5, reach))
    assert [each["design"] for each in report["predictions"] if each["loss"]] == fitted
    far, lacks = (
        f"beyond 30 times nothing is predicted, so train larger sizes; the predictions are for {format_number(reach)}.",
        "two has no prediction: it has a loss at 2 sizes; a fit needs at least 3.",
    )
    assert any(far in sentence for sentence in report["verdict"]) == (reach < 6e5)
    assert (lacks in report["verdict"]) == (sizes == (3, 2))
    assert report["warnings"][0].startswith(f"The time budget ended before {16 - runs} of 16 runs; ")
    assert not any("may look too good" in warning for warning in report["warnings"])
    assert (tmp_path / "ladder.html").read_text(encoding="utf-8") == ladder_page(report)


def test_a_ladder_says_what_it_can_tell(folder: Path, tmp_path: Path, workers: Workers) -> None:
    plan = ladder_plan(folder, tmp_path / "out")
    shares = []
    for target in (100_000.0, 500_000.0):
        choice = Choice(replace(plan, plan=replace(plan.plan, target=target)), StepTimes({}, 0.0), 60.0)
        *_, sentence = describe_ladder(choice)
        assert f"it predicts {format_number(target)} parameters" in sentence
        shares.append(float(sentence.split("below about ")[1].split(" %")[0]))
    far = Choice(replace(plan, plan=replace(plan.plan, target=1e8)), StepTimes({}, 0.0), 60.0)
    _, reach, sentence = describe_ladder(far)
    size = reach.split("so the predictions are for ")[1]
    assert f"it predicts {size} parameters, 30 times" in sentence
    assert shares[0] < shares[1]  # the further, the less it can tell


def ladder_plan(folder: Path, out: Path) -> Ladder:
    settings = LadderSettings.read({"designs": (f"{folder}/one.yaml", f"{folder}/two.yaml"), "sizes": SIZES})
    runtime = set_up_runtime("cpu")
    return open_ladder(_plan(settings, runtime), out, runtime)
