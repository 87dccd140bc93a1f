"""A comparison from beginning to end, its workers run within this process."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.analysis import workers as processes
from heddle.analysis.comparison import probes, report_writer
from heddle.analysis.comparison.worker import perform_task
from heddle.cli.main import run_command
from heddle.signals import Interrupted
from heddle.storage.json_file import write_json_file
from heddle.storage.run_log import read_log
from tests import small

JAPANESE = (
    "機を織る人は糸を上げて杼を通す。",
    "同じ織機でも、綜絖を替えれば別の布になる。",
    "朝の市場には青い布と赤い布が並んでいた。",
    "雨の日は糸が重く、音も静かに響く。",
    "祖母は古い柄を覚えていて、孫にそれを教えた。",
    "\n\n",
)
OPTIONS = ["--sequence-length", "32", "--batch-size", "16", "--device", "cpu", "--threads", "1"]
OPTIONS += ["--speed-context-length", "24"]


class Workers:
    """Takes the place of worker processes: records what ran, and can fail, diverge or be interrupted at one of them."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.kills: set[str] = set()
        self.diverges: set[str] = set()
        self.interrupts: set[str] = set()

    def start(self, request: Path, target: Path) -> "Ended":
        return Ended(self.run(request, target))

    def run(self, request: Path, target: Path) -> int:
        task = json.loads(request.read_text())
        name = target.stem
        if name in self.interrupts:
            raise Interrupted(15)
        self.ran.append(name)
        if name in self.kills:
            return -9
        result, code = perform_task(task)
        if name in self.diverges:
            result, code = {"status": "diverged", "message": "10 steps in a row"}, 0
        write_json_file(target, result)
        return code


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers()
    monkeypatch.setattr(processes, "start_worker", workers.start)
    monkeypatch.setattr(report_writer, "SLOW_REPORT_SECONDS", 1e9)  # on a slow machine, too, after each run
    return workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two designs of one size, one with a window, and a folder of Japanese text."""
    root = tmp_path_factory.mktemp("comparison")
    (root / "text").mkdir()
    for number in range(30):
        lines = "".join(JAPANESE[(number * 7 + line * line) % len(JAPANESE)] for line in range(220))
        (root / "text" / f"{number}.txt").write_text(lines, encoding="utf-8")
    assert sum(path.stat().st_size for path in (root / "text").iterdir()) > 250_000
    small.design_file(root / "full.yaml")
    local = small.design()
    local["layers"][0]["mixer"]["window"] = 4
    small.design_file(root / "my local.yaml", local)
    yield root
    shutil.rmtree(root)


def command(folder: Path, out: Path, *options: str, designs: tuple[str, ...] = ("full", "my local")) -> list[str]:
    files = [f"{folder}/{design}.yaml" for design in designs]
    budget = [] if {"--seconds", "--flops", "--tokens"} & {*options} else ["--tokens", "5200"]
    if "--recall" not in options:
        options = (*options, "--recall", "none")
    arguments = ["compare", *files, "--data", f"{folder}/text", "--out", str(out), "--seeds", "2", *budget]
    return [*arguments, *OPTIONS, "--quiet", *options]


def read_report(out: Path) -> dict[str, Any]:
    text = (out / "report.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text)
    return report


def without_timing(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what depends on the clock and the machine's load."""
    timeless_report = copy.deepcopy(report)
    for name in ("created", "command"):
        del timeless_report[name]
    for design in timeless_report["designs"]:
        for name in ("train_tokens_per_second", "train_speed_range", "peak_memory_bytes", "prefill", "decode"):
            del design[name]
        for training_run in design["runs"]:
            for name in ("seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes"):
                del training_run[name]
    for row in [*timeless_report["pairs"], *timeless_report["differences"]]:
        for need in row["needs"]:
            del need["seconds"]
    # the last sentences weigh speed too
    timeless_report["verdict"] = timeless_report["verdict"][:1]
    return timeless_report


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
    for seed in (0, 1):
        logs = [
            [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(tmp_path / "runs" / name)]
            for name in (f"full-seed{seed}", f"full#2-seed{seed}")
        ]
        assert logs[0] == logs[1]
    first = [read_log(tmp_path / "runs" / f"full-seed{seed}")[0]["loss"] for seed in (0, 1)]
    assert first[0] != first[1]


def test_designs_read_the_same_text_in_the_same_order(folder: Path, tmp_path: Path, workers: Workers) -> None:
    """Bytes read so far follow from loss and bits per byte: equal for every design at every step."""
    assert run_command(command(folder, tmp_path, "--tokens", "10300")) == 0
    read = [
        [line["loss"] / line["bits_per_byte"] for line in read_log(tmp_path / "runs" / f"{name}-seed0")]
        for name in ("full", "my local")
    ]
    assert read[0] == pytest.approx(read[1], rel=1e-12)
    assert len(set(read[0])) > 10


def test_an_interrupted_comparison_goes_on_and_repeats_nothing(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path / "whole")) == 0
    everything = list(workers.ran)
    for number in (1, 4):
        out = tmp_path / str(number)
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


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--tokens", "20600"), "tokens was 5200, now it is 20600"),
        (("--seeds", "1"), "seeds was [0, 1], now it is [0]"),
        (("--lr", "0.1"), "learning_rate was 0.003, now it is 0.1"),
        (("--optimizer", "muon"), 'optimizer was "adamw", now it is "muon"'),
        (("--warmup", "5"), "warmup was null, now it is 5"),
        (("--lr-scale", "layers.*.mixer=0.5"), 'lr_scale was [], now it is [["layers.*.mixer", 0.5]]'),
        (("width=32",), "entries.full.width was 16, now it is 32"),
    ],
)
def test_a_changed_plan_is_refused_by_name(
    more: tuple[str, ...], says: str, folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run_command(command(folder, tmp_path)) == 143
    capsys.readouterr()
    assert run_command(command(folder, tmp_path, *more)) == 2
    assert f"holds another comparison: {says}; use the same, or another folder" in capsys.readouterr().err


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
    assert err.startswith(f"heddle: {tmp_path / name}: was altered (")
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
    assert "holds another comparison: data.hash was" in capsys.readouterr().err


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a few steps."""
    for name, probe in probes.RECALL_PROBES.items():
        monkeypatch.setitem(probes.RECALL_PROBES, name, dataclasses.replace(probe, steps=2, batch_size=2))


@pytest.mark.usefixtures("quick")
def test_recall_is_measured_for_every_design_and_saved(folder: Path, tmp_path: Path, workers: Workers) -> None:
    asked = command(folder, tmp_path, "--seeds", "1", "--recall", "mqar")
    workers.interrupts = {"my local-recall-mqar"}
    assert run_command(asked) == 143
    assert workers.ran[-1] == "full-recall-mqar"
    workers.ran, workers.interrupts, workers.kills = [], set(), {"my local-recall-mqar"}
    assert run_command(asked) == 0
    assert workers.ran == ["my local-recall-mqar"]
    report = read_report(tmp_path)
    assert list(report["recall"]) == ["mqar"]
    full, local = (design["recall"]["mqar"] for design in report["designs"])
    assert 0 <= full["accuracy"] <= 1
    assert full["scored"] == 12 * (probes.FINAL_TOKENS // 36)
    assert full["curve"] == [[144, full["accuracy"]]]
    assert full["steps"] == 2
    assert (local["status"], local["accuracy"]) == ("failed", None)
    workers.ran, workers.kills = [], set()
    assert run_command(asked) == 0
    assert workers.ran == ["my local-recall-mqar"]
    again = read_report(tmp_path)
    assert again["designs"][1]["recall"]["mqar"]["accuracy"] is not None
    assert again["designs"][0]["recall"]["mqar"] == full


@pytest.mark.usefixtures("quick")
def test_all_probes_and_none(folder: Path, tmp_path: Path, workers: Workers) -> None:
    assert run_command(command(folder, tmp_path / "all", "--seeds", "1", "--recall", "all", designs=("full",))) == 0
    report = read_report(tmp_path / "all")
    assert list(report["recall"]) == list(report["designs"][0]["recall"]) == list(probes.RECALL_PROBES)
    assert all(result["status"] == "done" for result in report["designs"][0]["recall"].values())
    assert run_command(command(folder, tmp_path / "none", "--seeds", "1", designs=("full",))) == 0
    report = read_report(tmp_path / "none")
    assert (report["recall"], report["designs"][0]["recall"]) == ({}, {})


@pytest.mark.usefixtures("quick")
def test_a_design_too_short_for_a_probe_stops_nothing(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    short = small.design(embedding={"position": {"kind": "learned", "length": 32}})
    short["layers"][0]["mixer"]["position"] = None
    small.design_file(folder / "thirty-two.yaml", short)
    asked = command(folder, tmp_path, "--seeds", "1", "--recall", "mqar", designs=("full", "thirty-two"))
    assert run_command([word for word in asked if word != "--quiet"]) == 0
    assert "warning: thirty-two, recall mqar: " in capsys.readouterr().err
    assert [design["recall"]["mqar"]["status"] for design in read_report(tmp_path)["designs"]] == ["done", "failed"]


def test_longer_texts_can_be_refused_shorter_or_off(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    table = small.design(embedding={"position": {"kind": "learned", "length": 64}})
    table["layers"][0]["mixer"]["position"] = None
    small.design_file(folder / "sixty-four.yaml", table)
    assert run_command(command(folder, tmp_path / "a", "--seeds", "1", designs=("sixty-four",))) == 0
    [training_run] = read_report(tmp_path / "a")["designs"][0]["runs"]
    assert [result["status"] for result in training_run["extrapolation"]] == ["done", "done", "refused", "refused"]
    assert "position 127 is beyond the 64 learned positions" in training_run["extrapolation"][2]["message"]
    assert run_command(command(folder, tmp_path / "b", "--seeds", "1", "--extrapolate", "1024", designs=("full",))) == 0
    asked = read_report(tmp_path / "b")["extrapolation"]
    assert asked["multiples"][-1] < 1024
    assert f"so {asked['multiples'][-1]} times the context is the largest" in asked["note"]
    assert run_command(command(folder, tmp_path / "c", "--seeds", "1", "--extrapolate", "1", designs=("full",))) == 0
    off = read_report(tmp_path / "c")
    assert (off["extrapolation"]["multiples"], off["extrapolation"]["note"]) == ([], None)
    assert off["designs"][0]["extrapolation"] == off["designs"][0]["runs"][0]["extrapolation"] == []
    assert run_command(command(folder, tmp_path / "c", "--seeds", "1", designs=("full",))) == 2
    assert "max_length_multiple was 1, now it is 8" in capsys.readouterr().err
    for wrong in ("0", "6", "-2"):
        assert run_command(command(folder, tmp_path / "d", "--extrapolate", wrong)) == 2
        assert f"--extrapolate {wrong}: must be a power of two; 1 turns the test off" in capsys.readouterr().err


def test_another_choice_of_probes_is_another_comparison(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run_command(command(folder, tmp_path)) == 143
    assert run_command(command(folder, tmp_path, "--recall", "mqar")) == 2
    assert "recall_probes was [], now it is" in capsys.readouterr().err
    assert run_command(command(folder, tmp_path, "--recall", "mqra")) == 2
    choices = "auto, all, none, curve, mqar, induction, copying, needle, parity, s5"
    message = f"heddle: recall mqra: unknown choice; did you mean 'mqar'? choices: {choices}\n"
    assert capsys.readouterr().err == message


VARIED = ("--vary", "layers.*.mixer.kv_heads=1,2", "--vary", "norm.kind=layer,rms")


def test_variants_of_one_design(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command(folder, tmp_path, *VARIED, designs=("full",))
    workers.interrupts = {"kv_heads=2 rms-seed0"}
    assert run_command(asked) == 143
    workers.ran, workers.interrupts = [], set()
    assert run_command(asked) == 0
    names = ["kv_heads=1 layer", "kv_heads=1 rms", "kv_heads=2 layer", "kv_heads=2 rms"]
    assert workers.ran[0] == "kv_heads=2 rms-seed0"
    report = read_report(tmp_path)
    assert [design["name"] for design in report["designs"]] == names
    assert report["baseline"] == "kv_heads=1 rms"  # the design as it was given
    assert [row["design"] for row in report["differences"]] == [name for name in names if name != report["baseline"]]
    heads, norm = report["effects"]["fields"]
    assert (heads["baseline"], norm["baseline"]) == ("1", "rms")
    bits = {design["name"]: design["bits_per_byte"]["mean"] for design in report["designs"]}
    [difference] = [value["difference"]["mean"] for value in heads["values"] if value["difference"]]
    ones, twos = ([bits[f"kv_heads={heads} {kind}"] for kind in ("layer", "rms")] for heads in (1, 2))
    assert difference == pytest.approx(sum(twos) / 2 - sum(ones) / 2)
    out = capsys.readouterr().out
    assert "difference to rms" in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Effects of the varied fields" in page
    # another baseline is another report of the same runs
    workers.ran = []
    assert run_command([*asked, "--baseline", "kv_heads=2 layer"]) == 0
    assert workers.ran == []
    assert read_report(tmp_path)["baseline"] == "kv_heads=2 layer"
    assert run_command([*asked, "--vary", "width=16,32"]) == 2
    assert "holds another comparison: kv_heads=1 layer is in it too" in capsys.readouterr().err


def test_designs_of_equal_size(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command(folder, tmp_path, "--vary", "layers.*.feedforward.hidden=24,96", "--seeds", "1", designs=("full",))
    assert run_command([*asked, "--equal", "parameters"]) == 0
    report = read_report(tmp_path)
    narrow, wide = report["designs"]
    assert report["equal_size"] == "parameters"
    assert (narrow["width"], wide["width"]["original"]) == ({"original": 16, "trained": 16}, 16)
    assert wide["width"]["trained"] < 16
    assert abs(wide["parameters"] / narrow["parameters"] - 1) < 0.1
    assert f"16 → {wide['width']['trained']}" in capsys.readouterr().out
    assert run_command(asked) == 2
    assert "holds another comparison: entries.hidden=96.width was" in capsys.readouterr().err


def test_designs_of_equal_state(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary", "layers.*.mixer.kind=mqa,mla", "--seeds", "1", "--equal", "state"]
    assert run_command(command(folder, tmp_path, *vary, designs=("full",))) == 0
    report = read_report(tmp_path)
    assert report["equal_size"].startswith("state@")
    one_key_head, latent = report["designs"]
    assert (one_key_head["scaled_fields"], latent["width"]) == ([], one_key_head["width"])
    assert abs(latent["equal_state_bytes"] / one_key_head["equal_state_bytes"] - 1) < 0.05
    assert latent["scaled_fields"] == ["layers[0].mixer.kv_rank 8 → 12"]
    assert "changed" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The fields that set the size of each mixer's state were scaled" in page
    assert run_command(command(folder, tmp_path / "x", "--equal", "state@0")) == 2
    assert capsys.readouterr().err == (
        "heddle: equal state@0: expected state@N with N context tokens, such as state@4096\n"
    )


def test_the_report_as_json(folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(command(folder, tmp_path, "--seeds", "1", "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["designs"][0]["runs"] == read_report(tmp_path)["designs"][0]["runs"]
