"""A ladder over several numbers of tokens: branches of one trunk, killed and continued, grown, refused, shown."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab import workers as processes
from heddle.lab.compare.worker import perform_task
from heddle.storage.file_io import read_json_file
from tests.analysis.comparison.plain import _trunk_correlation, ladder_page
from tests.analysis.ladder import test_ladder
from tests.analysis.ladder.test_ladder import folder, read_report
from tests.html_page import Page

__all__ = ["folder"]  # a fixture
OPTIONS = ["--sizes", "3000,6k,12k,24k", "--batch-size", "8", "--sequence-length", "16", "--device", "cpu"]
OPTIONS += ["--threads", "1", "--quiet"]
RATIOS = ["--tokens-per-parameter", "1,2,4,8"]


class Workers(test_ladder.Workers):
    """The losses follow from the tokens, too."""

    def law(self, name: str, size: float, tokens: float) -> float:
        return truth(size, tokens)


def truth(size: float, tokens: float) -> float:
    return 1.2 + 0.5 * (size / 1e4) ** -0.34 + 0.5 * (tokens / 4e4) ** -0.34


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    return workers


def command(folder: Path, out: Path, *options: str) -> list[str]:
    return ["ladder", f"{folder}/one.yaml", "--data", f"{folder}/text", "--out", str(out), *OPTIONS, *options]


def test_a_whole_surface(folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("--target", "200k", "--target-tokens", "800k", "--target-flops", "2e11")
    assert run_command(command(folder, tmp_path, *RATIOS, *target)) == 0
    out, _ = capsys.readouterr()
    report = read_report(tmp_path)
    assert len(workers.ran) == 4 * 4 * 2
    assert (report["law"], report["tokens_per_parameter"], report["seeds"]) == ("L(N, D)", 4, 2)
    rungs = report["designs"][0]["rungs"]
    assert [rung["tokens_per_parameter"] for rung in rungs] == [1, 2, 4, 8] * 4
    assert all(
        rung["tokens"] == pytest.approx(rung["parameters"] * rung["tokens_per_parameter"], rel=0.03) for rung in rungs
    )
    [predicted] = report["predictions"]
    low, high = predicted["measurement"]
    assert low < truth(2e5, 8e5) < high
    [best] = report["best_sizes"]
    assert best["size"] * best["tokens"] * 6 == pytest.approx(2e11)
    assert (best["low"] or best["least"]) < best["size"] < (best["high"] or best["most"])
    assert [test["within"] for test in report["held_out"]] == [True]
    assert set(report["fit"]["parameters"]["one"]) == {"E", "exponent", "token_exponent", "budget_exponent"}
    first, second, *_ = report["verdict"]
    assert first.startswith("At 200 k parameters and 800 k tokens one is predicted to reach ")
    assert second.startswith("For 2.0·10¹¹ training FLOPs (6·N·D) one is best at ")
    assert any("Self-test, the largest size on its most tokens, " in sentence for sentence in report["verdict"])
    text = (tmp_path / "ladder.html").read_text(encoding="utf-8")
    shown = Page(text).text().replace("\u00a0", " ")
    for sentence in (*report["verdict"], *report["warnings"]):
        assert sentence in shown
        assert sentence in out
    assert "The best size for 2.00e+11 training FLOPs, 6·N·D" in text
    assert text == ladder_page(report)


def test_runs_are_branches_with_the_bits_of_runs_alone(folder: Path, tmp_path: Path, workers: Workers) -> None:
    workers.trained = "one-w8-seed0"
    few = ("--tokens-per-parameter", "1,2,4", "--seeds", "1")
    assert run_command(command(folder, tmp_path, *few)) == 0
    assert [name.rpartition("-")[2] for name in workers.ran] == ["d1"] * 4 + ["d2"] * 4 + ["d4"] * 4
    runs = tmp_path / "runs"
    task = workers.tasks["one-w8-seed0-d4"]
    assert (task["trunk"], task["previous"]) == (f"{runs}/one-w8-seed0-trunk4", f"{runs}/one-w8-seed0-trunk2")
    assert workers.tasks["one-w8-seed0-d1"]["previous"] is None
    alone, _ = perform_task(task | {"trunk": None, "out": str(tmp_path / "alone")})
    branch = read_json_file(runs / "one-w8-seed0-d4.json")
    assert (branch["bits_per_byte"], branch["windows"]) == (
        alone["bits_per_byte"],
        json.loads(json.dumps(alone["windows"])),
    )


def test_an_interrupted_ladder_goes_on_and_gains_tokens_and_seeds(
    folder: Path, tmp_path: Path, workers: Workers
) -> None:
    workers.interrupted_at = "one-w8-seed1-d2"
    assert run_command(command(folder, tmp_path, *RATIOS)) == 143
    before, workers.ran, workers.interrupted_at = workers.ran, [], ""
    assert run_command(command(folder, tmp_path, *RATIOS)) == 0
    assert len(before) + len(workers.ran) == 4 * 4 * 2
    workers.ran = []
    assert run_command(command(folder, tmp_path, "--tokens-per-parameter", "3")) == 0
    assert len(workers.ran) == 4 * 2
    task = workers.tasks["one-w8-seed1-d3"]
    assert task["previous"].endswith("one-w8-seed1-trunk2")
    workers.ran = []
    assert run_command(command(folder, tmp_path, "--seeds", "3")) == 0  # the tokens stay
    assert len(workers.ran) == 4 * 5
    assert read_report(tmp_path)["settings"]["tokens_per_parameter"] == [1, 2, 3, 4, 8]


def test_a_dry_run_counts_shared_steps_once(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path / "out", *RATIOS, "--dry-run", "--json")) == 0
    runs = json.loads(capsys.readouterr().out)["runs"][-4:]
    steps = [run["tokens"] // 128 for run in runs]
    starts = [0, *(count - count // 5 for count in steps)]
    assert [run["seconds"] for run in runs] == [
        0.5 * (count - start) for count, start in zip(steps, starts, strict=False)
    ]


def test_the_luck_of_a_trunk_is_shared() -> None:
    def design(*losses: tuple[float, ...]) -> dict[str, Any]:
        rungs = [{"width": 8, "runs": [{"bits_per_byte": math.exp(each)} for each in row]} for row in losses]
        return {"rungs": rungs}

    assert _trunk_correlation([design((0.1, 0.3), (0.2, 0.4))]) == 0.95  # the most that is believed
    assert _trunk_correlation([design((0.1, 0.3), (0.4, 0.2))]) == 0
    assert _trunk_correlation([design((0.1, 0.3, 0.2), (0.1, 0.2, 0.3))]) == pytest.approx(0.5)
    assert _trunk_correlation([design((0.1,), (0.2,))]) == 0.5  # one seed cannot tell


def test_a_ladder_of_one_number_of_tokens_stays_one(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path, "--tokens-per-parameter", "1", "--seeds", "1")) == 0
    assert read_json_file(tmp_path / "plan.json")["settings"]["tokens_per_parameter"] == 1
    capsys.readouterr()
    assert run_command(command(folder, tmp_path, *RATIOS)) == 2
    assert "holds another ladder: tokens_per_parameter was 1.0" in capsys.readouterr().err
    assert run_command(command(folder, tmp_path, "--seeds", "2")) == 0
    assert (read_report(tmp_path)["law"], len(workers.ran)) == ("L(N)", 4 * 2)
