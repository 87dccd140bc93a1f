"""`heddle runs`: what runs did, read from their files, and in what they differ."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import run_command
from heddle.lab.pages.runs import curve_figure, legend_labels, styles_of
from heddle.lab.runs import at_equal_tokens, find_runs, summarize, varied_fields
from heddle.storage import lock
from heddle.storage.checkpoints import checkpoint_steps, write_checkpoint
from heddle.storage.file_io import write_json_file
from heddle.storage.lock import RunLock
from heddle.storage.manifest import LogPosition
from heddle.storage.run_log import FINAL_FILE, LOG_FILE, RunLog, open_run
from tests.html_page import Page

DATA = {"hash": "a"}
DESIGN = {"width": 16, "layers": [{"mixer": {"kind": "attention"}}]}


def write_run(
    folder: Path,
    losses: list[float],
    steps: int | None = 40,
    design: dict[str, Any] = DESIGN,
    data: dict[str, Any] = DATA,
    **settings: Any,
) -> Path:
    """A run of 100 tokens a step, one step a second, the first of which took ten."""
    folder.mkdir(parents=True)
    identity = {"design": design, "data": data, "settings": {"steps": steps, **settings}}
    open_run(folder, identity, {"command": "heddle train"})
    log = RunLog(folder)
    log.resume(LogPosition())
    for step, loss in enumerate(losses, start=1):
        extra = {"validation_bits_per_byte": loss + 1} if step % 2 == 0 else {}
        seconds = 10.0 if step == 1 else 1.0
        extra["peak_memory_bytes"] = 1e6 * step
        log.write({"step": step, "tokens": 100 * step, "bits_per_byte": loss, "seconds": seconds} | extra)
    log.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/b", [8.0] * 20 + [2.0, 4.0] * 10, seed=0, learning_rate=0.1)
    write_run(tmp_path / "runs/deep/a", [3.0, 1.0], seed=1, learning_rate=0.1)
    (tmp_path / "runs/notes").mkdir()
    return tmp_path / "runs"


def test_a_run_is_summarized(folder: Path) -> None:
    assert [path.relative_to(folder).as_posix() for path in find_runs(folder)] == ["b", "deep/a"]
    run = summarize(folder / "b", folder)
    assert (run.name, run.step, run.steps, run.tokens) == ("b", 40, 40, 4000)
    assert run.training == 3.0  # of the last 20 steps
    assert run.validation == 5.0
    assert run.tokens_per_second == 100.0  # the first step is left out
    assert run.peak_memory_bytes == 4e7
    assert summarize(folder / "b", folder / "b").name == "b"
    assert run.final is None
    for step, final in ((40, 2.5), (39, None)):  # an evaluation of an earlier end is not that of a longer run
        write_json_file(folder / "b" / FINAL_FILE, {"step": step, "final_bits_per_byte": 2.5})
        assert summarize(folder / "b", folder).final == final


def test_a_task_has_an_accuracy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "task", [], seed=0)
    log = RunLog(run)
    log.resume(LogPosition())
    log.write(
        {"step": 1, "tokens": 64, "loss": 2.0, "scored_fraction": 0.5, "validation_accuracy": 0.25, "seconds": 1.0}
    )
    log.close()
    summary = summarize(run, tmp_path)
    assert (summary.metric, summary.training, summary.validation) == ("accuracy", None, 0.25)
    assert summary.tokens_per_second == 64.0  # its only step


def test_only_fields_that_differ_are_shown(folder: Path) -> None:
    runs = [summarize(path, folder) for path in find_runs(folder)]
    assert varied_fields(runs) == [{"settings.seed": 0}, {"settings.seed": 1}]
    assert varied_fields(runs[:1]) == [{}]


def test_what_is_off_in_a_run_is_not_listed_unless_nothing_else_differs(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "mla", [1.0], design={"kind": "latent_attention", "sink": None})
    write_run(tmp_path / "gqa", [1.0], design={"kind": "attention", "sink": False})
    assert run_command(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert 'kind="latent_attention"' in out
    assert "sink" not in out


def test_runs_that_begin_with_bos_are_named_beside_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A healed import and a native run: their losses are not of the same tokens, which each table says."""
    words = [
        "Sequences of deep/gemma are read beginning with BOS, which is not scored",
        "others are read beginning mid-text",
    ]
    write_run(folder / "deep/gemma", [3.0], data={"hash": "a", "bos_ids": [2]})
    for options in ([], ["--compare"], ["--plot", str(tmp_path / "page.html")]):
        assert run_command(["runs", str(folder), *options]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert all(word in printed for word in words)
    page = (tmp_path / "page.html").read_text()
    assert all(word in page for word in words)
    for alike in ("deep/gemma", "b"):  # nothing is said of runs that are alike
        assert run_command(["runs", str(folder / alike)]) == 0
        assert "BOS" not in capsys.readouterr().out


def test_the_command_lists_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json_file(folder / "b" / FINAL_FILE, {"step": 40, "final_bits_per_byte": 2.5})
    assert run_command(["runs", str(folder)]) == 0
    head, first, second, metrics, note = (line.rstrip() for line in capsys.readouterr().out.strip().splitlines())
    assert head.split() == ["run", "step", "tokens", "training", "validation", "final", "tokens/s", "differs", "in"]
    assert first.split() == ["b", "40", "4,000", "3.0000", "5.0000", "2.5000", "100", "seed=0"]
    assert second.split() == ["deep/a", "2", "of", "40", "200", "2.0000", "2.0000", "100", "seed=1"]
    assert metrics == "training, validation and final: bits per byte"
    assert "reads a part of the held-out text" in note
    assert run_command(["runs", str(folder), "--sort", "training", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["differences"]) for row in rows] == [
        ("deep/a", {"settings.seed": 1}),
        ("b", {"settings.seed": 0}),
    ]


def test_an_altered_run_is_named_and_the_others_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / "b" / LOG_FILE
    log.write_text(log.read_text().replace("8.0", "7.0", 1))
    write_run(folder / "new", [], seed=2, learning_rate=0.1)
    assert run_command(["runs", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "line 1" in err
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["deep/a", "new"]


def test_a_log_of_zeros_is_named_by_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a disk leaves it after a loss of power."""
    run = write_run(tmp_path / "run", [8.0, 4.0])
    (run / LOG_FILE).write_bytes(bytes((run / LOG_FILE).stat().st_size))
    for words in (
        ["runs", str(tmp_path)],
        ["verify", str(run)],
        ["watch", str(tmp_path), "--out", str(tmp_path / "w")],
    ):
        run_command(words)
        shown = "".join(capsys.readouterr())
        page = tmp_path / "w"
        assert "log.jsonl: line 1" in shown + (page.read_text(encoding="utf-8") if page.is_file() else ""), words
        assert "holds no runs" not in shown


@pytest.mark.parametrize(("arguments", "sentence"), [(["none"], "none:"), ([".", "--sort", "luck"], "'luck'")])
def test_errors_are_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["runs", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert run_command(["runs", "."]) == 0
    assert "holds no runs; heddle train writes one" in capsys.readouterr().err


def test_the_page_has_a_line_and_a_row_for_each_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert run_command(["runs", str(folder), "--plot", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    figures = json.loads(page.scripts[0])
    listed = [trace for trace in figures["curve-0"]["data"] if trace["showlegend"]]
    assert [trace["name"] for trace in listed] == ["b", "deep/a"]
    assert "b 40 4,000 3.0000 5.0000 100 seed=0" in page.text()
    assert "deep/a 2 of 40 200" in page.text()


def test_a_curve_has_at_most_100_means(tmp_path: Path) -> None:
    run = summarize(write_run(tmp_path / "long", [1.0, 3.0] * 75), tmp_path)
    assert run.curve == [(200 * (index + 1), 2.0) for index in range(75)]
    assert summarize(write_run(tmp_path / "short", [5.0]), tmp_path).curve == [(100, 5.0)]


def test_only_a_page_is_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", str(folder), "--plot", str(tmp_path / "runs.svg")]) == 2
    assert "runs.svg: the plot is an HTML page; name it .html" in capsys.readouterr().err
    assert not (tmp_path / "runs.svg").exists()


def test_runs_are_compared_at_equal_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [summarize(path, folder) for path in find_runs(folder)]
    assert at_equal_tokens(runs) == (200, [8.0, 2.0])
    assert run_command(["runs", str(folder), "--compare"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["b", "deep/a"]
    assert ["training", "at", "200", "tokens", "8.0000", "2.0000"] in lines
    assert ["settings.seed", "0", "1"] in lines
    assert ["memory", "40.0", "MB", "2.0", "MB"] in lines


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Two runs of three checkpoints each."""
    runs = [write_run(tmp_path / "runs" / name, [1.0]) for name in "ab"]
    for run in runs:
        for step in (1, 2, 3):
            write_checkpoint(run, step, tensors={}, documents={"x.json": "{}"})
    return runs


def test_pruning_keeps_the_newest_and_leaves_a_run_that_trains(
    checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = checkpoints
    arguments = ["runs", str(first.parent), "--prune", "1"]
    assert run_command(arguments) == 2  # nobody can be asked
    assert "give --yes" in capsys.readouterr().err
    assert checkpoint_steps(first) == [1, 2, 3]
    with RunLock(second):
        assert run_command([*arguments, "--yes"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == [str(first / f"checkpoints/step-0000000{step}") for step in (2, 1)]
    assert f"{second}: is training" in err
    assert (checkpoint_steps(first), checkpoint_steps(second)) == ([3], [1, 2, 3])
    assert run_command(["runs", str(first.parent), "--prune", "0"]) == 2
    assert run_command(["runs", str(first), "--prune", "1", "--yes"]) == 0
    assert "none has more than 1 checkpoint " in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "left"), [("y\n", [3]), ("\n", [1, 2, 3]), ("no\n", [1, 2, 3])])
def test_pruning_asks(
    answer: str, left: list[int], checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert run_command(["runs", str(checkpoints[0]), "--prune", "1"]) == 0
    assert "delete up to 2 checkpoints of 1 runs" in capsys.readouterr().err
    assert checkpoint_steps(checkpoints[0]) == left


def test_a_run_that_begins_while_the_user_thinks_is_left_alone(
    checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "is_locked", lambda folder: False)
    with RunLock(checkpoints[0]):
        assert run_command(["runs", str(checkpoints[0]), "--prune", "1", "--yes"]) == 0
    assert "is in use by" in capsys.readouterr().err
    assert checkpoint_steps(checkpoints[0]) == [1, 2, 3]


def test_seeds_of_a_design_are_drawn_alike_and_have_one_entry_in_the_legend() -> None:
    names = ["gqa-seed0", "gqa-seed1", "mla-seed0", "own run"]
    styles = styles_of(names)
    assert styles["gqa-seed0"] == styles["gqa-seed1"]
    assert len({styles[name] for name in ("gqa-seed0", "mla-seed0", "own run")}) == 3
    assert legend_labels(names) == {"gqa-seed0": "gqa", "gqa-seed1": "", "mla-seed0": "mla-seed0", "own run": "own run"}


def test_curves_are_smoothed_before_a_pale_line_of_what_was_measured(folder: Path) -> None:
    run = replace(summarize(folder / "b", folder), curve=[(tokens, float(tokens % 2)) for tokens in range(50)])
    traces = curve_figure([replace(run, name="a-seed0"), replace(run, name="a-seed1")])["data"]
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["a"]
    pale, smooth = ([trace for trace in traces if ("opacity" in trace) == is_pale] for is_pale in (True, False))
    assert [trace["y"] for trace in pale] == [[value for _, value in run.curve]] * 2
    assert len(smooth) == 2
    for trace in smooth:
        assert max(trace["y"][10:]) - min(trace["y"][10:]) < 0.3
        assert trace["line"]["color"] == smooth[0]["line"]["color"]
