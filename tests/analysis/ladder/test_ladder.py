"""A ladder from beginning to end: run, killed and continued, grown by seeds, sizes and designs, refused, shown."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab import workers as processes
from heddle.lab.compare.worker import perform_task
from heddle.lab.pages.render import plotly_script
from heddle.model.decoder import build
from heddle.model.load_config import load_config
from heddle.model.size import parameter_counts
from heddle.signals import Interrupted
from heddle.storage.file_io import read_json_file, write_json_file
from tests import small
from tests.analysis.comparison.plain import plain_ladder_pages
from tests.html_page import Page

ladder_page = plain_ladder_pages.ladder_page

SIZES = "3000,6k,12k,24k"
OPTIONS = ["--batch-size", "2", "--sequence-length", "16", "--tokens-per-parameter", "1", "--device", "cpu"]
OPTIONS += ["--threads", "1", "--quiet"]


class Workers:
    """Takes the place of worker processes: most runs get a loss from a law of their size, without training."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.trains = False
        self.interrupted_at = ""
        self.diverges = ""
        self.jumps = False  # whether the largest sizes are much better than their law

    def start(self, request: Path, target: Path) -> "Workers":
        task, name = json.loads(request.read_text()), target.stem
        if name == self.interrupted_at:
            raise Interrupted(15)
        self.ran.append(name)
        result = perform_task(task)[0] if self.trains or task["task"] == "calibrate" else self.result(task, name)
        write_json_file(target, result)
        return self

    def result(self, task: dict[str, Any], name: str) -> dict[str, Any]:
        if name == self.diverges:
            return {"status": "diverged", "message": "10 steps in a row"}
        size, seed = parameter_counts(build(load_config(task["design"]), device="meta"))[1], task["settings"]["seed"]
        factor = 0.9 if name.startswith("two") else 1.0
        loss = 1.5 + factor * (size / 1e4) ** -0.3 + 0.003 * math.sin(7 * seed + len(self.ran))
        jump = -0.4 if self.jumps and size > 20_000 else 0.0
        return {"status": "done", "bits_per_byte": loss + jump, "seconds": 1.0}

    def poll(self) -> int:
        return 0


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
    workers.trains = True
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
    assert report["verdict"][0].startswith("The self-test failed, so no prediction here is to be trusted: ")


def test_failed_runs_are_told(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path)) == 0
    (tmp_path / "runs" / "one-w8-seed0.json").unlink()
    workers.diverges = "one-w8-seed0"
    assert run_command(command(folder, tmp_path)) == 0
    report = read_report(tmp_path)
    first = report["designs"][0]["rungs"][0]
    assert [run["status"] for run in first["runs"]] == ["diverged", "done"]
    assert first["seeds"] == 1
    assert "1 of 16 runs gave no number; a mean without them may look too good." in report["warnings"]


def test_a_dry_run_writes_nothing(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command(folder, tmp_path / "out", "--dry-run", "--json", designs=("one",))
    assert run_command(asked) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert [run["design"] for run in estimate["runs"]] == ["one"] * 4
    seconds = [run["seconds"] for run in estimate["runs"]]
    assert min(seconds) > 0
    assert estimate["seconds"] > 2 * sum(seconds) / estimate["workers"]  # processes start, and evaluate at their end
    assert run_command([word for word in asked if word != "--json"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("Nothing was trained.")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--sizes", "3"], "sizes 3:"),
        (["--sizes", "3k,6k,12k"], "sizes: 3"),
        (["--sizes", "3k,many"], "--sizes many:"),
        (["--target", "0"], "--target 0:"),
        (["--seeds", "0"], "seeds 0:"),
        (["--tokens-per-parameter", "-1"], "tokens_per_parameter -1:"),
        (["--tokens-per-parameter", "0.01"], "gives the smallest size, "),
        (["--lr", "0"], "learning_rate 0.0:"),
        (["--lr-exponent", "9"], "rate_exponent 9:"),
        (["--irreducible", "none"], "--irreducible none:"),
        (["--sizes", "6000,6001,12k,24k"], "sizes:"),
        (["--sizes", "500,6k,12k,24k"], "sizes 500:"),
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
        (other, "holds another ladder: the design one was another one; rename yours, or use another folder"),
    ):
        capsys.readouterr()
        assert run_command(asked) == 2
        assert reason in capsys.readouterr().err
    assert (tmp_path / "plan.json").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert run_command(command(folder, tmp_path / "other")) == 2
    assert "holds something else (file)" in capsys.readouterr().err
