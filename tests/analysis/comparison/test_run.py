"""A comparison from beginning to end, its workers run within this process."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.analysis.comparison import probes, tasks
from heddle.analysis.comparison.worker import perform
from heddle.cli.main import run
from heddle.storage.run_log import read_log, write_whole
from heddle.training import loop
from heddle.training.signals import Interrupted
from tests import small

JAPANESE = (
    "機を織る人は糸を上げて杼を通す。",
    "同じ織機でも、綜絖を替えれば別の布になる。",
    "朝の市場には青い布と赤い布が並んでいた。",
    "雨の日は糸が重く、音も静かに響く。",
    "祖母は古い柄を覚えていて、孫にそれを教えた。",
    "\n\n",
)
OPTIONS = ["--context", "32", "--batch-size", "16", "--device", "cpu", "--threads", "1", "--speed-context", "24"]


class Workers:
    """Stands in for processes: notes what ran, and can fail, diverge or be interrupted at one of them."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.kills: set[str] = set()
        self.diverges: set[str] = set()
        self.interrupts: set[str] = set()

    def spawn(self, request: Path, target: Path) -> int:
        task = json.loads(request.read_text())
        name = target.stem
        if name in self.interrupts:
            raise Interrupted(15)
        self.ran.append(name)
        if name in self.kills:
            return -9
        result, code = perform(task)
        if name in self.diverges:
            result, code = {"status": "diverged", "message": "10 steps in a row"}, 0
        write_whole(target, json.dumps(result))
        return code


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(loop, "ON_THE_WAY", 1024)  # tokens; to be quick
    made = Workers()
    monkeypatch.setattr(tasks, "_spawn", made.spawn)
    return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two designs of one size, one with a window, and a folder of Japanese text."""
    root = tmp_path_factory.mktemp("place")
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


def command(place: Path, out: Path, *more: str, designs: tuple[str, ...] = ("full", "my local")) -> list[str]:
    files = [f"{place}/{design}.yaml" for design in designs]
    budget = [] if {"--seconds", "--flops"} & {*more} else ["--tokens", "10300"]
    if "--recall" not in more:
        more = (*more, "--recall", "none")
    asked = ["compare", *files, "--data", f"{place}/text", "--out", str(out), "--seeds", "2", *budget]
    return [*asked, *OPTIONS, "--quiet", *more]


def report(out: Path) -> dict[str, Any]:
    text = (out / "report.json").read_text(encoding="utf-8")
    made: dict[str, Any] = json.loads(text)
    return made


def numbers(made: dict[str, Any]) -> dict[str, Any]:
    """A report without what depends on the clock and the machine's load."""
    kept = copy.deepcopy(made)
    for name in ("created", "command"):
        del kept[name]
    for design in kept["designs"]:
        for name in ("train_tokens_per_second", "peak_memory_bytes", "prefill", "decode"):
            del design[name]
        for one in design["runs"]:
            for name in ("seconds", "train_tokens_per_second", "peak_memory_bytes"):
                del one[name]
    # the last sentences weigh speed too
    kept["verdict"] = kept["verdict"][:1]
    return kept


def test_a_whole_comparison(place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(place, tmp_path)) == 0
    out, err = capsys.readouterr()
    made = report(tmp_path)
    assert workers.ran == [
        "full-seed0", "my local-seed0", "full-seed1", "my local-seed1", "full-measure", "my local-measure"
    ]  # fmt: skip
    assert [design["name"] for design in made["designs"]] == ["full", "my local"]
    assert made["baseline"] == "full"
    assert made["budget"] == {"kind": "tokens", "value": 10300, "batch_size": 16, "context": 32, "seeds": [0, 1]}
    assert made["data"]["train_bytes"] + made["data"]["validation_bytes"] > 250_000
    for design in made["designs"]:
        assert [one["seed"] for one in design["runs"]] == [0, 1]
        assert all(one["status"] == "done" and one["train_tokens"] == 20 * 512 for one in design["runs"])
        for one in design["runs"]:
            bits, size = (sum(window[part] for window in one["windows"]) for part in (0, 1))
            assert one["bits_per_byte"] == pytest.approx(bits / size)
            assert [place for place, _ in one["curve"]] == [1024 * step for step in range(1, 11)]
            assert one["sample"]
        assert [context for context, _ in design["prefill"]] == [24]
        assert design["prefill"][0][1] > 0
        assert design["decode"][0][1] > 0
        assert len(design["state_bytes"]) == 8
    full, local = made["designs"]
    assert local["state_bytes"][-1][1] < full["state_bytes"][-1][1]
    # one validation text for all
    sizes = {tuple(size for _, size in one["windows"]) for design in made["designs"] for one in design["runs"]}
    assert len(sizes) == 1
    assert made["differences"][0]["pairs"] == 2
    asked = made["extrapolation"]
    assert (asked["multiples"], asked["stretches"], asked["tokens"]) == ([1, 2, 4, 8], 2, 2 * 256)
    readings = [reading for design in made["designs"] for one in design["runs"] for reading in one["extrapolation"]]
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


def test_experts_are_told_and_settings_reach_every_run(place: Path, tmp_path: Path, workers: Workers) -> None:
    sparse = small.design()
    sparse["layers"][0]["feedforward"] = small.MOE | {"experts": 2}
    small.design_file(place / "sparse.yaml", sparse)
    how = ["--optimizer", "muon", "--schedule", "linear", "--warmup", "3", "--lr-scale", "layers.*.mixer=0.5"]
    assert run(command(place, tmp_path, *how, "--lr-scale", "embed=0", designs=("full", "sparse"))) == 0
    full, mixed = report(tmp_path)["designs"]
    assert [one["experts"] for one in full["runs"]] == [None, None]
    for one in mixed["runs"]:
        assert sum(one["experts"]["layers.0.feedforward"]["load"]) == pytest.approx(1.0, abs=1e-3)
        assert 0 < one["experts"]["layers.0.feedforward"]["entropy"] < 0.7
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


def test_a_design_against_itself(place: Path, tmp_path: Path, workers: Workers) -> None:
    assert run(command(place, tmp_path, designs=("full", "full"))) == 0
    made = report(tmp_path)
    assert [design["name"] for design in made["designs"]] == ["full", "full#2"]
    difference = made["differences"][0]
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


def test_designs_read_the_same_text_in_the_same_order(place: Path, tmp_path: Path, workers: Workers) -> None:
    """Bytes read so far follow from loss and bits per byte: equal for every design at every step."""
    assert run(command(place, tmp_path)) == 0
    read = [
        [line["loss"] / line["bits_per_byte"] for line in read_log(tmp_path / "runs" / f"{name}-seed0")]
        for name in ("full", "my local")
    ]
    assert read[0] == pytest.approx(read[1], rel=1e-12)
    assert len(set(read[0])) > 10


def test_an_interrupted_comparison_goes_on_and_repeats_nothing(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(place, tmp_path / "whole")) == 0
    everything = list(workers.ran)
    for number in (1, 4):
        out = tmp_path / str(number)
        workers.ran, workers.interrupts = [], {everything[number]}
        assert run(command(place, out)) == 143
        assert workers.ran == everything[:number]
        assert not (out / "report.json").exists()
        workers.ran, workers.interrupts = [], set()
        assert run(command(place, out)) == 0
        assert workers.ran == everything[number:]
        assert numbers(report(out)) == numbers(report(tmp_path / "whole"))
    workers.ran, workers.interrupts = [], set()
    assert run(command(place, tmp_path / "whole")) == 0
    assert workers.ran == []


def test_a_killed_worker_is_told_and_tried_again(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.kills = {"full-seed1", "my local-measure"}
    without_quiet = [word for word in command(place, tmp_path) if word != "--quiet"]
    assert run(without_quiet) == 0
    err = capsys.readouterr().err
    assert "warning: full, seed 1: was ended by SIGKILL, perhaps for want of memory" in err
    assert "warning: my local, measuring reading and writing: was ended by SIGKILL" in err
    made = report(tmp_path)
    full, local = made["designs"]
    assert [one["status"] for one in full["runs"]] == ["done", "failed"]
    assert [one["status"] for one in local["runs"]] == ["done", "done"]
    assert (full["runs"][1]["bits_per_byte"], full["runs"][1]["windows"]) == (None, [])
    assert made["differences"][0]["pairs"] == 1
    assert local["decode"] == []
    workers.kills, workers.ran = set(), []
    assert run(command(place, tmp_path)) == 0
    assert workers.ran == ["full-seed1", "my local-measure"]
    again = report(tmp_path)
    assert again["differences"][0]["pairs"] == 2
    assert again["designs"][1]["decode"] != []


def test_a_diverged_run_is_told_and_kept(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.diverges = {"my local-seed0", "my local-seed1"}
    assert run(command(place, tmp_path)) == 0
    made = report(tmp_path)
    assert [one["status"] for one in made["designs"][1]["runs"]] == ["diverged", "diverged"]
    assert made["differences"][0]["mean"] is None
    assert made["designs"][1]["bits_per_byte"]["mean"] is None
    assert "my local" in capsys.readouterr().out
    workers.ran = []
    assert run(command(place, tmp_path)) == 0
    assert workers.ran == []


def test_what_would_stop_every_worker_stops_the_comparison(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = small.design(embedding={"position": {"kind": "learned", "length": 8}})
    too_long["layers"][0]["mixer"]["position"] = None
    small.design_file(place / "short.yaml", too_long)
    assert run(command(place, tmp_path, designs=("full", "short"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("heddle: short, seed 0: ")
    assert "8" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs" / "short-seed0.json").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--tokens", "20600"), "value was 10300, now it is 20600"),
        (("--seeds", "1"), "seeds was [0, 1], now it is [0]"),
        (("--lr", "0.1"), "learning_rate was 0.003, now it is 0.1"),
        (("--optimizer", "muon"), 'optimizer was "adamw", now it is "muon"'),
        (("--warmup", "5"), "warmup was null, now it is 5"),
        (("--lr-scale", "layers.*.mixer=0.5"), 'lr_scale was [], now it is [["layers.*.mixer", 0.5]]'),
        (("width=32",), "entries.full.width was 16, now it is 32"),
    ],
)
def test_a_changed_plan_is_refused_by_name(
    more: tuple[str, ...], says: str, place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run(command(place, tmp_path)) == 143
    capsys.readouterr()
    assert run(command(place, tmp_path, *more)) == 2
    assert f"holds another comparison: {says}; use the same, or another --out" in capsys.readouterr().err


def test_changed_text_is_refused(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "text", tmp_path / "text")
    asked = [word.replace(f"{place}/text", f"{tmp_path}/text") for word in command(place, tmp_path / "out")]
    workers.interrupts = {"my local-seed0"}
    assert run(asked) == 143
    (tmp_path / "text" / "more.txt").write_text("糸" * 3000)
    workers.interrupts = set()
    capsys.readouterr()
    assert run(asked) == 2
    assert "holds another comparison: data.hash was" in capsys.readouterr().err


@pytest.mark.parametrize(("budget", "value"), [("--flops", "4e8"), ("--seconds", "0.2")])
def test_other_budgets(budget: str, value: str, place: Path, tmp_path: Path, workers: Workers) -> None:
    assert run(command(place, tmp_path, budget, value, "--seeds", "1")) == 0
    made = report(tmp_path)
    assert made["budget"]["kind"] == budget.removeprefix("--")
    trained = [design["runs"][0]["train_tokens"] for design in made["designs"]]
    assert min(trained) >= 512
    assert ("full-calibrate" in workers.ran) == (budget == "--seconds")
    if budget == "--flops":
        costs = [
            3 * design["flops_per_token"] * tokens for design, tokens in zip(made["designs"], trained, strict=True)
        ]
        assert all(0.8 * 4e8 < cost <= 4e8 for cost in costs)


def test_timing_that_fails_ends_the_comparison_with_a_sentence(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.kills = {"full-calibrate"}
    assert run(command(place, tmp_path, "--seconds", "0.2")) == 1
    assert "full, timing a step: was ended by SIGKILL" in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a few steps."""
    for name, probe in probes.PROBES.items():
        monkeypatch.setitem(probes.PROBES, name, dataclasses.replace(probe, steps=2, rows=2))


@pytest.mark.usefixtures("quick")
def test_recall_is_measured_of_every_design_and_kept(place: Path, tmp_path: Path, workers: Workers) -> None:
    asked = command(place, tmp_path, "--seeds", "1", "--recall", "mqar")
    workers.interrupts = {"my local-recall-mqar"}
    assert run(asked) == 143
    assert workers.ran[-1] == "full-recall-mqar"
    workers.ran, workers.interrupts, workers.kills = [], set(), {"my local-recall-mqar"}
    assert run(asked) == 0
    assert workers.ran == ["my local-recall-mqar"]
    made = report(tmp_path)
    assert list(made["recall"]) == ["mqar"]
    full, local = (design["recall"]["mqar"] for design in made["designs"])
    assert 0 <= full["accuracy"] <= 1
    assert full["scored"] == 12 * (loop.EVALUATED // 36)
    assert [tokens for tokens, _ in full["curve"]] == [72, 144]
    assert (local["status"], local["accuracy"]) == ("failed", None)
    workers.ran, workers.kills = [], set()
    assert run(asked) == 0
    assert workers.ran == ["my local-recall-mqar"]
    again = report(tmp_path)
    assert again["designs"][1]["recall"]["mqar"]["accuracy"] is not None
    assert again["designs"][0]["recall"]["mqar"] == full


@pytest.mark.usefixtures("quick")
def test_all_probes_and_none(place: Path, tmp_path: Path, workers: Workers) -> None:
    assert run(command(place, tmp_path / "all", "--seeds", "1", "--recall", "all", designs=("full",))) == 0
    made = report(tmp_path / "all")
    assert list(made["recall"]) == list(made["designs"][0]["recall"]) == list(probes.PROBES)
    assert all(found["status"] == "done" for found in made["designs"][0]["recall"].values())
    assert run(command(place, tmp_path / "none", "--seeds", "1", designs=("full",))) == 0
    made = report(tmp_path / "none")
    assert (made["recall"], made["designs"][0]["recall"]) == ({}, {})


@pytest.mark.usefixtures("quick")
def test_a_design_too_short_for_a_probe_stops_nothing(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    short = small.design(embedding={"position": {"kind": "learned", "length": 32}})
    short["layers"][0]["mixer"]["position"] = None
    small.design_file(place / "thirty-two.yaml", short)
    asked = command(place, tmp_path, "--seeds", "1", "--recall", "mqar", designs=("full", "thirty-two"))
    assert run([word for word in asked if word != "--quiet"]) == 0
    assert "warning: thirty-two, recall mqar: " in capsys.readouterr().err
    assert [design["recall"]["mqar"]["status"] for design in report(tmp_path)["designs"]] == ["done", "failed"]


def test_longer_texts_can_be_refused_shorter_or_off(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    table = small.design(embedding={"position": {"kind": "learned", "length": 64}})
    table["layers"][0]["mixer"]["position"] = None
    small.design_file(place / "sixty-four.yaml", table)
    assert run(command(place, tmp_path / "a", "--seeds", "1", designs=("sixty-four",))) == 0
    [run_of] = report(tmp_path / "a")["designs"][0]["runs"]
    assert [one["status"] for one in run_of["extrapolation"]] == ["done", "done", "refused", "refused"]
    assert "position 127 is beyond the 64 learned ones" in run_of["extrapolation"][2]["message"]
    assert run(command(place, tmp_path / "b", "--seeds", "1", "--extrapolate", "1024", designs=("full",))) == 0
    asked = report(tmp_path / "b")["extrapolation"]
    assert asked["multiples"][-1] < 1024
    assert f"so {asked['multiples'][-1]} times the context is the largest" in asked["note"]
    assert run(command(place, tmp_path / "c", "--seeds", "1", "--extrapolate", "1", designs=("full",))) == 0
    off = report(tmp_path / "c")
    assert (off["extrapolation"]["multiples"], off["extrapolation"]["note"]) == ([], None)
    assert off["designs"][0]["extrapolation"] == off["designs"][0]["runs"][0]["extrapolation"] == []
    assert run(command(place, tmp_path / "c", "--seeds", "1", designs=("full",))) == 2
    assert "extrapolate was 1, now it is 8" in capsys.readouterr().err
    for wrong in ("0", "6", "-2"):
        assert run(command(place, tmp_path / "d", "--extrapolate", wrong)) == 2
        assert f"--extrapolate {wrong}: must be a power of two; 1 reads nothing longer" in capsys.readouterr().err


def test_another_choice_of_probes_is_another_comparison(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.interrupts = {"full-seed0"}
    assert run(command(place, tmp_path)) == 143
    assert run(command(place, tmp_path, "--recall", "mqar")) == 2
    assert "recall was [], now it is" in capsys.readouterr().err
    assert run(command(place, tmp_path, "--recall", "mqra")) == 2
    message = "heddle: --recall mqra: unknown choice; did you mean 'mqar'? choices: mqar, all, none\n"
    assert capsys.readouterr().err == message


VARIED = ("--vary", "layers.*.mixer.kv_heads=1,2", "--vary", "norm.kind=layer,rms")


def test_variants_of_one_design(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command(place, tmp_path, *VARIED, designs=("full",))
    workers.interrupts = {"kv_heads=2 rms-seed0"}
    assert run(asked) == 143
    workers.ran, workers.interrupts = [], set()
    assert run(asked) == 0
    names = ["kv_heads=1 layer", "kv_heads=1 rms", "kv_heads=2 layer", "kv_heads=2 rms"]
    assert workers.ran[0] == "kv_heads=2 rms-seed0"
    made = report(tmp_path)
    assert [design["name"] for design in made["designs"]] == names
    assert made["baseline"] == "kv_heads=1 rms"  # the design as it was given
    assert [row["design"] for row in made["differences"]] == [name for name in names if name != made["baseline"]]
    heads, norm = made["varied"]["fields"]
    assert (heads["baseline"], norm["baseline"]) == ("1", "rms")
    bits = {design["name"]: design["bits_per_byte"]["mean"] for design in made["designs"]}
    [difference] = [value["difference"]["mean"] for value in heads["values"] if value["difference"]]
    ones, twos = ([bits[f"kv_heads={heads} {kind}"] for kind in ("layer", "rms")] for heads in (1, 2))
    assert difference == pytest.approx(sum(twos) / 2 - sum(ones) / 2)
    out = capsys.readouterr().out
    assert "difference to rms" in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "What varied" in page
    # another baseline is another report of the same runs
    workers.ran = []
    assert run([*asked, "--baseline", "kv_heads=2 layer"]) == 0
    assert workers.ran == []
    assert report(tmp_path)["baseline"] == "kv_heads=2 layer"
    assert run([*asked, "--vary", "width=16,32"]) == 2
    assert "holds another comparison: entries.kv_heads=1 layer was" in capsys.readouterr().err


def test_designs_of_equal_size(
    place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = command(place, tmp_path, "--vary", "layers.*.feedforward.hidden=24,96", "--seeds", "1", designs=("full",))
    assert run([*asked, "--equal", "parameters"]) == 0
    made = report(tmp_path)
    narrow, wide = made["designs"]
    assert made["equal"] == "parameters"
    assert (narrow["width"], wide["width"]["given"]) == ({"given": 16, "trained": 16}, 16)
    assert wide["width"]["trained"] < 16
    assert abs(wide["parameters"] / narrow["parameters"] - 1) < 0.1
    assert f"16 → {wide['width']['trained']}" in capsys.readouterr().out
    assert run(asked) == 2
    assert "holds another comparison: entries.hidden=96.width was" in capsys.readouterr().err


def test_the_report_as_json(place: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command(place, tmp_path, "--seeds", "1", "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["designs"][0]["runs"] == report(tmp_path)["designs"][0]["runs"]
