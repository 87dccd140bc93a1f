"""A comparison from beginning to end: what runs, what is said, what an interruption or a failure leaves."""

import json
import shutil
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.storage.run_log import read_log
from tests import small
from tests.analysis.comparison.runs import Workers, command, read_report, without_timing


def test_a_whole_comparison(folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command(folder, tmp_path, "--tokens", "10300")) == 0
    out, err = capsys.readouterr()
    report = read_report(tmp_path)
    assert workers.ran == [
        "full-seed0", "my local-seed0", "full-seed1", "my local-seed1",
        "full-speed-1", "my local-speed-1", "full-speed-2", "my local-speed-2",
    ]  # fmt: skip
    assert [design["name"] for design in report["designs"]] == ["full", "my local"]
    assert report["baseline"] == "full"
    assert report["budget"] == {
        "kind": "tokens",
        "value": 10300,
        "batch_size": 16,
        "sequence_length": 32,
        "seeds": [0, 1],
    }
    assert report["data"]["train_bytes"] + report["data"]["validation_bytes"] > 250_000
    for design in report["designs"]:
        assert [training_run["seed"] for training_run in design["runs"]] == [0, 1]
        assert all(
            training_run["status"] == "done" and training_run["train_tokens"] == 20 * 512
            for training_run in design["runs"]
        )
        for training_run in design["runs"]:
            bits, size = (sum(window[part] for window in training_run["windows"]) for part in (0, 1))
            assert training_run["bits_per_byte"] == pytest.approx(bits / size)
            # a tenth of 20 steps' tokens are read on the way: one batch at each of two points
            assert [tokens for tokens, _ in training_run["curve"]] == [5120, 10240]
            assert training_run["curve"][-1][1] == pytest.approx(training_run["bits_per_byte"])
            assert training_run["sample"]
        assert [row[0] for row in design["prefill"]] == [24]
        assert design["prefill"][0][1] > 0
        assert 0 < design["decode"][0][2] <= design["decode"][0][1] <= design["decode"][0][3]
        assert len(design["state_bytes"]) == 8
    full, local = report["designs"]
    assert local["state_bytes"][-1][1] < full["state_bytes"][-1][1]
    # one validation text for all
    sizes = {
        tuple(size for _, size in training_run["windows"])
        for design in report["designs"]
        for training_run in design["runs"]
    }
    assert len(sizes) == 1
    assert report["differences"][0]["pairs"] == 2
    asked = report["extrapolation"]
    assert (asked["multiples"], asked["spans"], asked["tokens"]) == ([1, 2, 4, 8], 2, 2 * 256)
    readings = [
        reading
        for design in report["designs"]
        for training_run in design["runs"]
        for reading in training_run["extrapolation"]
    ]
    assert len(readings) == 2 * 2 * 4
    for reading in readings:
        assert sum(size for _, size in reading["windows"]) == asked["bytes"]
    assert [row["multiple"] for row in local["extrapolation"]] == [1, 2, 4, 8]
    assert all(row["change"]["pairs"] == 2 for row in local["extrapolation"][1:])
    # another length is another context for most tokens
    assert len({row["bits_per_byte"] for row in full["extrapolation"]}) == 4
    assert "report.html" in out
    assert "my local" in out
    assert err == ""
    assert (tmp_path / "report.html").stat().st_size > 1000
    # all read the same text in the same order: bytes read so far follow from loss and bits per byte
    read = [
        [line["loss"] / line["bits_per_byte"] for line in read_log(tmp_path / "runs" / f"{name}-seed0")]
        for name in ("full", "my local")
    ]
    assert read[0] == pytest.approx(read[1], rel=1e-12)
    assert len(set(read[0])) > 10


def test_experts_are_reported_and_settings_reach_every_run(folder: Path, tmp_path: Path, workers: Workers) -> None:
    sparse = small.design()
    sparse["layers"][0]["feedforward"] = small.MOE | {"experts": 2}
    small.design_file(folder / "sparse.yaml", sparse)
    how = ["--optimizer", "muon", "--schedule", "linear", "--warmup", "3", "--lr-scale", "layers.*.mixer=0.5"]
    assert run_command(command(folder, tmp_path, *how, "--lr-scale", "embed=0", designs=("full", "sparse"))) == 0
    full, mixed = read_report(tmp_path)["designs"]
    assert [training_run["experts"] for training_run in full["runs"]] == [None, None]
    for training_run in mixed["runs"]:
        assert sum(training_run["experts"]["layers.0.feedforward"]["load"]) == pytest.approx(1.0, abs=1e-3)
        assert 0 < training_run["experts"]["layers.0.feedforward"]["entropy"] < 0.7
    page = (tmp_path / "report.html").read_text()
    assert "Loads of the experts of sparse" in page
    assert "Loads of the experts of full" not in page
    asked = json.loads((tmp_path / "runs" / "sparse-seed1" / "run.json").read_text())["settings"]
    assert {name: asked[name] for name in ("optimizer", "schedule", "warmup", "lr_scale")} == {
        "optimizer": "muon",
        "schedule": "linear",
        "warmup": 3,
        "lr_scale": [["layers.*.mixer", 0.5], ["embed", 0.0]],
    }


def test_a_design_against_itself(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path, designs=("full", "full"))) == 0
    report = read_report(tmp_path)
    assert [design["name"] for design in report["designs"]] == ["full", "full#2"]
    difference = report["differences"][0]
    assert (difference["mean"], difference["low"], difference["high"]) == (0, 0, 0)
    assert difference["resolved"] is False
    varying = {"seconds", "peak_memory_bytes"}
    for seed in (0, 1):
        logs = [
            [{k: v for k, v in line.items() if k not in varying} for line in read_log(tmp_path / "runs" / name)]
            for name in (f"full-seed{seed}", f"full#2-seed{seed}")
        ]
        assert logs[0] == logs[1]
    first = [read_log(tmp_path / "runs" / f"full-seed{seed}")[0]["loss"] for seed in (0, 1)]
    assert first[0] != first[1]


@pytest.mark.usefixtures("report_after_each_run")
@pytest.mark.parametrize("number", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_an_interrupted_comparison_goes_on_and_repeats_nothing(
    number: int, folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path / "whole")) == 0
    everything = list(workers.ran)
    out = tmp_path / "cut"
    workers.ran, workers.interrupts = [], {everything[number]}
    assert run_command(command(folder, out)) == 143
    assert workers.ran == everything[:number]
    left = read_report(out)
    assert not left["progress"]["is_complete"]
    assert left["progress"]["stages"][0]["finished"] == min(number, 4)
    assert left["verdict"] != read_report(tmp_path / "whole")["verdict"] or number >= 4
    workers.ran, workers.interrupts = [], set()
    assert run_command(command(folder, out)) == 0
    assert workers.ran == everything[number:]
    assert without_timing(read_report(out)) == without_timing(read_report(tmp_path / "whole"))
    workers.ran, workers.interrupts = [], set()
    assert run_command(command(folder, tmp_path / "whole")) == 0
    assert workers.ran == []


def test_a_killed_worker_is_reported_and_tried_again(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.kills = {"full-seed1", "my local-speed-1", "my local-speed-2"}
    without_quiet = [word for word in command(folder, tmp_path) if word != "--quiet"]
    assert run_command(without_quiet) == 0
    err = capsys.readouterr().err
    assert "warning: full, seed 1: was ended by SIGKILL, perhaps because memory ran out" in err
    assert "warning: my local, measuring speed, round 1: was ended by SIGKILL" in err
    report = read_report(tmp_path)
    full, local = report["designs"]
    assert [training_run["status"] for training_run in full["runs"]] == ["done", "failed"]
    assert [training_run["status"] for training_run in local["runs"]] == ["done", "done"]
    assert (full["runs"][1]["bits_per_byte"], full["runs"][1]["windows"]) == (None, [])
    assert report["differences"][0]["pairs"] == 1
    assert local["decode"] == []
    workers.kills, workers.ran = set(), []
    assert run_command(command(folder, tmp_path)) == 0
    assert workers.ran == ["full-seed1", "my local-speed-1", "my local-speed-2"]
    again = read_report(tmp_path)
    assert again["differences"][0]["pairs"] == 2
    assert again["designs"][1]["decode"] != []


def test_a_diverged_run_is_reported_and_saved(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.diverges = {"my local-seed0", "my local-seed1"}
    assert run_command(command(folder, tmp_path)) == 0
    report = read_report(tmp_path)
    assert [training_run["status"] for training_run in report["designs"][1]["runs"]] == ["diverged", "diverged"]
    assert report["differences"][0]["mean"] is None
    assert report["designs"][1]["bits_per_byte"]["mean"] is None
    assert "my local" in capsys.readouterr().out
    workers.ran = []
    assert run_command(command(folder, tmp_path)) == 0
    assert workers.ran == []


def test_what_would_stop_every_worker_stops_the_comparison(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = small.design(embedding={"position": {"kind": "learned", "length": 8}})
    too_long["layers"][0]["mixer"]["position"] = None
    small.design_file(folder / "short.yaml", too_long)
    assert run_command(command(folder, tmp_path, designs=("full", "short"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("heddle: short: ")
    assert "8" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs" / "short-seed0.json").exists()


def test_a_refused_text_leaves_the_folder_free(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run_command(command(folder, tmp_path, "--batch-size", "20k")) == 2
    assert not [path.name for path in tmp_path.iterdir() if path.name != ".lock"]
    assert run_command(command(folder, tmp_path)) == 143, capsys.readouterr().err


def test_a_changed_plan_is_refused_by_name(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run_command(command(folder, tmp_path)) == 143
    capsys.readouterr()
    for more, says in (
        (("--tokens", "20600"), "tokens was 5200"),
        (("--seeds", "1"), "seeds was [0, 1]"),
        (("--lr", "0.1"), "learning_rate was 0.003"),
        (("--optimizer", "muon"), 'optimizer was "adamw"'),
        (("--warmup", "5"), "warmup was null"),
        (("--lr-scale", "layers.*.mixer=0.5"), "lr_scale was []"),
        (("--recall", "mqar"), "recall_probes was []"),
        (("width=32",), "entries.full.width was 16"),
    ):
        assert run_command(command(folder, tmp_path, *more)) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.json", "data.json", "runs/full-seed0.json"])
def test_an_altered_file_is_named(
    name: str, folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"my local-seed0"}
    assert run_command(command(folder, tmp_path)) == 143
    raw = bytearray((tmp_path / name).read_bytes())
    digit = next(at for at in range(len(raw) // 3, len(raw)) if chr(raw[at]) in "23456")
    raw[digit] += 1
    (tmp_path / name).write_bytes(raw)
    capsys.readouterr()
    assert run_command(command(folder, tmp_path)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"heddle: {tmp_path / name}:")
    assert "; restore the file or choose another folder" in err
    assert err.count("\n") == 1


def test_changed_text_is_refused(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "text", tmp_path / "text")
    asked = [word.replace(f"{folder}/text", f"{tmp_path}/text") for word in command(folder, tmp_path / "out")]
    workers.interrupts = {"my local-seed0"}
    assert run_command(asked) == 143
    (tmp_path / "text" / "more.txt").write_text("糸" * 3000)
    workers.interrupts = set()
    capsys.readouterr()
    assert run_command(asked) == 2
    assert "data.hash" in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "value"), [("--flops", "4e8"), ("--seconds", "0.2")])
def test_other_budgets(budget: str, value: str, folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path, budget, value, "--seeds", "1")) == 0
    report = read_report(tmp_path)
    assert report["budget"]["kind"] == budget.removeprefix("--")
    trained = [design["runs"][0]["train_tokens"] for design in report["designs"]]
    assert min(trained) >= 512
    assert ("full-calibrate" in workers.ran) == (budget == "--seconds")
    if budget == "--flops":
        costs = [
            3 * design["flops_per_token"] * tokens for design, tokens in zip(report["designs"], trained, strict=True)
        ]
        assert all(0.8 * 4e8 < cost <= 4e8 for cost in costs)


def test_timing_that_fails_ends_the_comparison_with_a_sentence(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.kills = {"full-calibrate"}
    assert run_command(command(folder, tmp_path, "--seconds", "0.2")) == 1
    assert "full, timing a step: was ended by SIGKILL" in capsys.readouterr().err
