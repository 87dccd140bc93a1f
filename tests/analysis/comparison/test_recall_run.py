"""A comparison with recall tests: which copies are trained, and what lies in the report beside the mean loss."""

import json
from pathlib import Path

import pytest

from heddle.analysis.comparison import abilities, probes, recall_curve
from heddle.analysis.comparison.probes import RecallProbe
from heddle.cli.main import run_command
from tests import small
from tests.analysis.comparison.runs import Workers, command, read_report


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {}
    for name in ("mqar", "parity", "s5"):
        source = {"mqar": "recall:mqar,pairs=2,keys=2,length=8"}.get(name, f"recall:{name},length=8")
        short[name] = RecallProbe(name.upper(), source, "What?", 2, batch_size=2, mixers_only=name == "mqar")
    monkeypatch.setattr(probes, "FINAL_TOKENS", 360)
    for module in (probes, abilities):
        monkeypatch.setattr(module, "RECALL_PROBES", short)
    curve = RecallProbe("MQAR by pairs", "recall:mqar_mixture,pairs=4,smallest=2", "Which?", 2, batch_size=2)
    monkeypatch.setattr(probes, "CURVE_PROBE", curve)
    monkeypatch.setattr(recall_curve, "CURVE_PROBE", curve)


@pytest.mark.usefixtures("short_probes")
def test_recall_beside_the_mean_loss(folder: Path, tmp_path: Path, workers: Workers) -> None:
    twin = small.design()
    twin["layers"][0]["feedforward"]["hidden"] = 40
    small.design_file(folder / "twin.yaml", twin)
    options = ["--recall", "auto,curve", "--sequence-length", "64", "--extrapolate", "1", "--seeds", "1"]
    assert run_command(command(folder, tmp_path, *options, designs=("full", "my local", "twin"))) == 0
    recall_tasks = [name for name in workers.ran if "recall" in name]
    # the copies of full and twin differ in their feed-forwards only, which MQAR leaves out
    assert recall_tasks == [
        "full-recall-mqar", "full-recall-parity", "full-recall-curve",
        "my local-recall-mqar", "my local-recall-parity", "my local-recall-curve",
        "twin-recall-parity",
    ]  # fmt: skip
    report = read_report(tmp_path)
    designs = {design["name"]: design for design in report["designs"]}
    assert designs["twin"]["recall"]["mqar"] == designs["full"]["recall"]["mqar"]
    assert {row["name"] for row in report["recall_left_out"]} | set(report["recall"]) == {"mqar", "parity", "s5"}
    [s5] = [row for row in report["recall_left_out"] if row["name"] == "s5"]
    assert s5["reason"] == "no kind of mixer learns it within this budget"
    assert report["recall_curve"]["pairs"] == [2, 4]
    for design in designs.values():
        assert [point["pairs"] for point in design["recall_curve"]] == [2, 4]
        assert all(0 <= point["accuracy"] <= 1 for point in design["recall_curve"])
        assert set(design["recall"]) == {"mqar", "parity"}
        [run] = design["runs"]
        # both profiles are cuts of the final evaluation: nothing is lost and nothing is read twice
        bits, size = (sum(window[part] for window in run["windows"]) for part in (0, 1))
        for groups in run["loss_profile"].values():
            assert sum(block[0] for blocks in groups for block in blocks) == pytest.approx(bits, rel=1e-9)
            assert sum(block[1] for blocks in groups for block in blocks) == size
        assert [needle["depth"] for needle in run["text_recall"]["needles"]] == [0.1, 0.5, 0.9, None]
        assert 0 <= design["text_recall"]["needle"]["value"] <= 1
        assert len(design["loss_profile"]["positions"]) == len(report["loss_profile"]["positions"]) == 5
        assert len(design["loss_profile"]["frequencies"]) == len(report["loss_profile"]["frequencies"])
    assert designs["full"]["loss_profile"]["positions"][0]["difference"]["mean"] == 0
    assert report["text_recall"]["row_length"] == 64
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for words in ("What the designs can do", "S5: not tested", "In held-out text", "Where the loss lies"):
        assert words in page
    json.dumps(report, allow_nan=False)
    # what is in files is not run again
    workers.ran = []
    assert run_command(command(folder, tmp_path, *options, designs=("full", "my local", "twin"))) == 0
    assert workers.ran == []


@pytest.mark.usefixtures("short_probes")
def test_the_cost_of_the_curve_is_told_before(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for part in command(folder, tmp_path, "--recall", "curve", "--seeds", "1") if part != "--quiet"]
    assert run_command(arguments) == 0
    err = capsys.readouterr().err
    assert "recall curve: 2 small" in err
    assert err.index("recall curve") < err.index("bits per byte (run 1 of 2)")
    assert run_command(command(folder, tmp_path / "x", "--recall", "curve,curve")) == 2
    assert "recall curve,curve:" in capsys.readouterr().err
