"""Reports of a comparison that still runs: each stage says what is finished, and no unfinished mean looks final."""

from pathlib import Path
from typing import Any, cast

import pytest

from heddle.lab.compare import run
from heddle.lab.compare.plan import DesignEntry
from heddle.lab.compare.report import Results, comparison_report, design_facts
from heddle.lab.compare.results import ProbeResult, Run, plain
from heddle.lab.compare.tasks import Comparison
from heddle.lab.pages.report_figures import overview_figures
from heddle.lab.workers import Workers
from heddle.model.size import state_bytes
from heddle.runtime import set_up_runtime
from heddle.storage.manifest import LogPosition
from heddle.storage.run_log import RunLog
from tests import small
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import print_report, report_page, typed
from tests.analysis.comparison.test_plan import plan
from tests.html_page import Page

NAMES = ("full", "local")
SPEEDS = {"train": [(32, [900.0, 950.0])], "prefill": [(32, [4e4])], "decode": [(32, [300.0, 310.0])]}


class Running:
    """A comparison of two designs on two seeds, which a test takes through its stages without any training."""

    def __init__(self, folder: Path) -> None:
        local = small.design()
        local["layers"][0]["mixer"]["window"] = 4
        entries = (
            DesignEntry("full", "full.yaml", small.config(small.design())),
            DesignEntry("local", "local.yaml", small.config(local)),
        )
        chosen = plan(*entries, budget_value=10_240.0, batch_size=8, sequence_length=32, max_length_multiple=1)
        self.comparison = Comparison(
            chosen, None, folder, set_up_runtime("cpu", 1), Workers(("cpu", "cpu"), 1), "heddle compare"
        )
        self.results = Results(NAMES, speed_rounds=2, probes=1)
        self.results.facts = {entry.name: design_facts(self.comparison, entry) for entry in entries}
        self.results.steps = dict.fromkeys(NAMES, 40)
        self.results.pending = [(name, seed) for seed in (0, 1) for name in NAMES]
        designs = reports.make_report(dict.fromkeys(NAMES, reports.TINY["gqa-tiny"]), seeds=2)["designs"]
        self.runs = {design["name"]: design["runs"] for design in designs}

    def finish(self, name: str, seed: int) -> None:
        """Add the result of a training."""
        self.results.add_run(name, typed(Run, self.runs[name][seed]))

    def report(self) -> dict[str, Any]:
        """The report as it is now; its page and its tables can be made."""
        report: dict[str, Any] = plain(comparison_report(self.comparison, self.results))
        print_report(report)
        page = Page(report_page(report)).text()
        for words in ("None", "NaN", "nan"):
            assert words not in page
        return report


def check_unequal_seeds(running: Running) -> None:
    """With seed 1 of one design still to come, both are compared on seed 0 alone."""
    for name, seed in (("full", 0), ("local", 0), ("full", 1)):
        running.finish(name, seed)
    report = running.report()
    [difference] = report["differences"]
    assert difference["pairs"] == 1
    assert "Left out" not in difference["method"]
    full, local = (design["bits_per_byte"] for design in report["designs"])
    assert full["mean"] == running.runs["full"][0]["bits_per_byte"]
    assert difference["mean"] == pytest.approx(local["mean"] - full["mean"])
    assert [len(design["runs"]) for design in report["designs"]] == [2, 1]
    assert local["basis"] == "1 seed, text only, 1 to come"


def test_seeds_that_one_design_lacks_at_the_end_change_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The budget ended before seed 1, a costly one, of the design that is worse on the seed that both have."""
    running = Running(tmp_path)
    for name, seed, bits in (("full", 0, 3.0), ("full", 1, 3.4), ("local", 0, 3.1)):
        running.runs[name][seed] |= {"bits_per_byte": bits, "windows": []}
        running.finish(name, seed)
    running.results.pending = []
    report = running.report()
    full, local = (design["bits_per_byte"] for design in report["designs"])
    assert (report["leader"], full["mean"]) == ("full", pytest.approx(3.2))
    assert local["mean"] - full["mean"] == pytest.approx(0.1)
    assert local["basis"] == "1 seed, no interval, adjusted to the seeds of the others"
    printed = capsys.readouterr().out
    assert printed.index("full") < printed.index("local")
    for words in ("2 seeds", "1 seed"):
        assert words in printed
    assert "1 to 2 seeds" in Page(report_page(report)).text()
    running.finish("local", 1)
    assert "2 seeds each" in Page(report_page(running.report())).text()


def test_before_the_text_is_prepared(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.results.steps = {}
    report = running.report()
    assert report["progress"] == {
        "is_complete": False,
        "stages": [
            {"title": "training runs", "finished": 0, "planned": 4},
            {"title": "speed measurements", "finished": 0, "planned": 4},
            {"title": "recall tests", "finished": 0, "planned": 2},
        ],
        "stop_reason": None,
    }
    assert report["verdict"] == ["Costs are below; losses appear as runs finish: 0 of 4 are done."]
    for design in report["designs"]:
        assert design["bits_per_byte"] == {"mean": None, "low": None, "high": None, "basis": "2 runs to come"}
        assert design["flops_per_token"] > 0
        assert len(design["state_bytes"]) == 8
        assert design["kernels"]["training"]["attention"]
    assert [design["windows"] for design in report["designs"]] == [[], [4]]
    text = Page(report_page(report)).text()
    assert "0 of 4 training runs" in text
    assert "text is being prepared" in text
    assert "Not measured yet." in text
    assert "Not trained yet." in text
    assert "Kernels in training: attention" in text


def test_each_stage_says_what_is_finished(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.finish("local", 0)
    report = running.report()
    assert report["verdict"] == ["1 of 4 runs are done; designs are compared once each has finished the same seed."]
    assert report["designs"][1]["bits_per_byte"]["basis"] == "1 seed, text only, 1 to come"
    running.finish("full", 0)
    report = running.report()
    assert report["verdict"][0].startswith("So far (2 of 4 runs are done): ")
    assert "on one seed" in report["verdict"][0] or "one seed" in " ".join(report["verdict"])
    assert report["differences"][0]["pairs"] == 1
    running.finish("local", 1)
    running.finish("full", 1)
    report = running.report()
    assert report["differences"][0]["pairs"] == 2
    assert not report["verdict"][0].startswith("So far")
    assert not report["progress"]["is_complete"]
    assert [design["train_tokens_per_second"] for design in report["designs"]] == [None, None]
    for name in NAMES:
        running.results.speeds[name].append(SPEEDS)
        running.results.recall[name]["mqar"] = typed(ProbeResult, reports.recall(0, 0))
    report = running.report()
    assert [stage["finished"] for stage in report["progress"]["stages"]] == [4, 2, 2]
    assert report["designs"][0]["train_tokens_per_second"] == 925.0
    running.results.is_complete = True
    report = running.report()
    assert 'class="progress"' not in report_page(report)
    assert "to come" not in Page(report_page(report)).text()


@pytest.mark.parametrize(("rate", "is_said"), [(1e9, True), (1e7, False)])
def test_decoding_that_is_mostly_overhead_is_said(tmp_path: Path, rate: float, is_said: bool) -> None:
    """A token reads each weight once, and the state; the rest of its time is none of the design's bytes."""
    running = Running(tmp_path)
    for speeds in running.results.speeds.values():
        speeds.append(SPEEDS | {"read": [(0, [rate])]})
    report = running.report()
    for design in report["designs"]:
        config = next(each.config for each in running.comparison.plan.entries if each.name == design["name"])
        state = state_bytes(config, 32)
        [[context, share]] = design["reading_share"]
        assert (context, share) == (32, pytest.approx(min(1.0, (4 * design["parameters"] + state) * 305 / rate)))
    sentences = [text for text in report["warnings"] if "overhead of small operations: full" in text]
    assert bool(sentences) == is_said


@pytest.mark.parametrize(("slowest", "is_said"), [(150.0, False), (140.0, True)])
def test_speeds_of_a_busy_machine_are_not_to_be_compared(tmp_path: Path, slowest: float, is_said: bool) -> None:
    running = Running(tmp_path)
    first, second = NAMES
    running.results.speeds[first].append(SPEEDS)
    running.results.speeds[second] += [SPEEDS | {"decode": [(32, [300.0])]}, SPEEDS | {"decode": [(32, [slowest])]}]
    busy = [text for text in running.report()["warnings"] if f"{second}, decode at 32 tokens" in text]
    assert bool(busy) == is_said


class Shown:
    """Stands for a live page."""

    def __init__(self) -> None:
        self.revisions = 0

    def publish(self, *_: object) -> None:
        self.revisions += 1


def test_curves_grow_while_a_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a run that is not done has its curve so far, dotted; it goes once the run has a result."""
    running, shown = Running(tmp_path), Shown()
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.0)
    writer = run.ReportWriter(running.comparison, running.results, cast("Any", shown))
    writer.follow_trainings()
    assert shown.revisions == 0
    (tmp_path / "runs" / "full-seed1").mkdir(parents=True)
    log = RunLog(tmp_path / "runs" / "full-seed1")
    log.resume(LogPosition())
    for step, loss in ((1, None), (2, 3.5), (3, None), (4, 3.25)):
        line = {"step": step, "tokens": 256 * step, "loss": 6.0, "seconds": 0.1}
        log.write(line if loss is None else line | {"validation_bits_per_byte": loss})
    log.close()
    writer.follow_trainings()
    writer.follow_trainings()
    assert shown.revisions == 1
    curve = [[512, 3.5], [1024, 3.25]]
    assert running.report()["running"] == [{"design": "full", "seed": 1, "curve": curve}]
    figure = overview_figures(comparison_report(running.comparison, running.results))["loss"]
    assert figure is not None
    (trace,) = figure["data"]
    assert (trace["x"], trace["y"], trace["line"]["dash"]) == ([512, 1024], [3.5, 3.25], "dot")
    running.finish("full", 1)
    assert "running" not in running.report()


def test_designs_are_compared_on_the_same_seeds(tmp_path: Path) -> None:
    check_unequal_seeds(Running(tmp_path))


def test_a_mean_over_other_seeds_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Results, "comparable_runs", lambda results, name: results.runs[name])
    with pytest.raises(AssertionError):
        check_unequal_seeds(Running(tmp_path))


def test_a_run_that_failed_is_not_to_come(tmp_path: Path) -> None:
    running = Running(tmp_path)
    reports.diverge(running.runs["local"][1])
    for name, seed in running.results.pending:
        running.finish(name, seed)
    report = running.report()
    assert report["designs"][1]["bits_per_byte"]["basis"] == (
        "1 seed, text only, 1 of 2 did not finish, adjusted to the seeds of the others"
    )
    assert "Left out" in report["differences"][0]["method"]


def test_only_a_served_page_asks_for_newer_versions(tmp_path: Path) -> None:
    report = Running(tmp_path).report()
    file, served = report_page(report), report_page(report, 7)
    assert "connect-src" not in file
    assert "/status.json" not in file
    assert "which rewrites this file after each task" in Page(file).text()
    assert "connect-src 'self'; script-src" in served
    assert '<body data-revision="7">' in served
    assert "/status.json" in served
    assert "This page follows the command" in Page(served).text()
