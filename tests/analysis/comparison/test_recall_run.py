"""A comparison with recall tests: which copies are trained, and what lies in the report beside the mean loss."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.lab.compare import probes
from heddle.lab.compare.probes import RecallProbe
from heddle.storage.file_io import read_json_file, write_json_file
from tests import small
from tests.analysis.comparison.runs import Workers, command, read_report


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the table itself, which workers within this process have imported."""
    table, short = dict(probes.RECALL_PROBES), {}
    for name in ("mqar", "parity", "s5"):
        source = {"mqar": "recall:mqar,pairs=2,keys=2,length=8"}.get(name, f"recall:{name},length=8")
        short[name] = RecallProbe(name.upper(), source, "What?", 2, batch_size=2, mixers_only=name == "mqar")
    monkeypatch.setattr(probes, "FINAL_TOKENS", 360)
    probes.RECALL_PROBES.clear()
    probes.RECALL_PROBES.update(short)
    yield
    probes.RECALL_PROBES.clear()
    probes.RECALL_PROBES.update(table)  # in its order


@pytest.mark.usefixtures("short_probes")
def test_recall_beside_the_mean_loss(folder: Path, tmp_path: Path, workers: Workers) -> None:
    twin = small.design()
    twin["layers"][0]["feedforward"]["hidden"] = 40
    small.design_file(folder / "twin.yaml", twin)
    options = ["--recall", "auto", "--sequence-length", "64", "--extrapolate", "1", "--seeds", "1"]
    assert run_command(command(folder, tmp_path, *options, designs=("full", "my local", "twin"))) == 0
    recall_tasks = [name for name in workers.ran if "recall" in name]
    # the copies of full and twin differ in their feed-forwards only, which MQAR leaves out
    assert recall_tasks == [
        "full-recall-mqar", "full-recall-parity",
        "my local-recall-mqar", "my local-recall-parity",
        "twin-recall-parity",
    ]  # fmt: skip
    kinds = ["speed" if "speed" in name else "recall" if "recall" in name else "training" for name in workers.ran]
    # one queue of trainings and recall tasks, so that no worker waits for the last training; speeds have the machine
    assert kinds == ["training"] * 3 + ["recall"] * 5 + ["speed"] * 6
    report = read_report(tmp_path)
    designs = {design["name"]: design for design in report["designs"]}
    assert designs["twin"]["recall"]["mqar"] == designs["full"]["recall"]["mqar"]
    assert {row["name"] for row in report["recall_left_out"]} | set(report["recall"]) == {"mqar", "parity", "s5"}
    [s5] = [row for row in report["recall_left_out"] if row["name"] == "s5"]
    assert s5["reason"] == "no kind of mixer learns it within this budget"
    for design in designs.values():
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
def test_a_folder_with_the_curve_goes_on_without(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recall over the number of pairs is gone: a plan on disk may name it, an option may not."""
    options = ["--recall", "mqar", "--seeds", "1"]
    assert run_command(command(folder, tmp_path, *options)) == 0
    plan = read_json_file(tmp_path / "plan.json")
    write_json_file(tmp_path / "plan.json", plan | {"recall_probes": ["mqar", "curve"]})
    workers.ran = []
    assert run_command(command(folder, tmp_path, *options)) == 0
    assert workers.ran == []
    assert read_json_file(tmp_path / "plan.json") == plan
    capsys.readouterr()
    assert run_command(command(folder, tmp_path, "--recall", "mqar,curve", "--seeds", "1")) == 2
    assert "recall mqar,curve: " in (err := capsys.readouterr().err)
    assert "leave curve out" in err
