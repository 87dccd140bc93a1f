"""What a comparison measures beside the loss, its variants of a design, and designs of equal size or state."""

import json
from pathlib import Path

import pytest

import heddle
from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.lab.compare import probes
from tests import small
from tests.analysis.comparison.runs import Workers, command, read_report


@pytest.mark.usefixtures("quick")
def test_recall_is_measured_for_every_design_and_saved(folder: Path, tmp_path: Path, workers: Workers) -> None:
    asked = command(folder, tmp_path, "--seeds", "1", "--recall", "mqar")
    workers.interrupts = {"my local-recall-mqar"}
    assert run_command(asked) == 143
    assert workers.ran[-1] == "full-recall-mqar"
    workers.ran, workers.interrupts, workers.kills = [], set(), {"my local-recall-mqar"}
    assert run_command(asked) == 0
    assert [name for name in workers.ran if "speed" not in name] == ["my local-recall-mqar"]
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
    assert "position 127" in training_run["extrapolation"][2]["message"]
    assert run_command(command(folder, tmp_path / "b", "--seeds", "1", "--extrapolate", "1024", designs=("full",))) == 0
    asked = read_report(tmp_path / "b")["extrapolation"]
    assert asked["multiples"][-1] < 1024
    assert f"so {asked['multiples'][-1]} times the context is the largest" in asked["note"]
    assert run_command(command(folder, tmp_path / "c", "--seeds", "1", "--extrapolate", "1", designs=("full",))) == 0
    off = read_report(tmp_path / "c")
    assert (off["extrapolation"]["multiples"], off["extrapolation"]["note"]) == ([], None)
    assert off["designs"][0]["extrapolation"] == off["designs"][0]["runs"][0]["extrapolation"] == []
    assert run_command(command(folder, tmp_path / "c", "--seeds", "1", designs=("full",))) == 2
    assert "max_length_multiple was 1" in capsys.readouterr().err
    for wrong in ("0", "6", "-2"):
        assert run_command(command(folder, tmp_path / "d", "--extrapolate", wrong)) == 2
        assert f"--extrapolate {wrong}:" in capsys.readouterr().err


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
    assert "kv_heads=1" in capsys.readouterr().err


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
    assert "entries.hidden=96.width" in capsys.readouterr().err


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


def test_python_compares_as_the_command_does(
    folder: Path, tmp_path: Path, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command(folder, tmp_path / "command", "--seeds", "1")) == 0
    options = {"sequence_length": 32, "batch_size": 16, "device": "cpu", "threads": 1, "speed_context_length": [24]}
    options |= {"data": [folder / "text"], "seeds": 1, "tokens": 5200, "recall": "none", "quiet": True}
    designs = [folder / "full.yaml", folder / "my local.yaml"]
    result = heddle.compare(*designs, out=tmp_path / "python", **options)
    assert result.folder == tmp_path / "python"
    expected = read_report(tmp_path / "command")["designs"]
    assert [row["bits_per_byte"] for row in result.report["designs"]] == [row["bits_per_byte"] for row in expected]
    assert "<td>my local</td>" in result._repr_html_()
    with pytest.raises(ConfigError, match=r"tokns:.*'tokens'"):
        heddle.compare(*designs, tokns=3)
    with pytest.raises(ConfigError, match="designs:"):
        heddle.compare()
