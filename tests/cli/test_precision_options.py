"""Options of how a device computes: precision, TF32, determinism, compilation, and what is refused in a sentence."""

import json
import os
from pathlib import Path

import pytest
import torch

from heddle.cli.main import run_command
from heddle.errors import pip_install
from heddle.model import copies
from heddle.model.copies import should_compile
from heddle.model.decoder import Decoder
from heddle.storage.model import load
from heddle.training import built_models, loop

SIZE = ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu", "--steps", "2", "--quiet"]


@pytest.fixture(autouse=True)
def filled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """--deterministic turns NaN in uninitialized memory off; turn it on again after the test."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)


def train(workspace: Path, out: Path, *options: str) -> int:
    data = ["--data", f"{workspace}/text", "--out", str(out)]
    return run_command(["train", f"{workspace}/good.yaml", *data, *SIZE, *options])


def test_weights_in_bfloat16(workspace: Path, tmp_path: Path) -> None:
    assert train(workspace, tmp_path, "--precision", "bf16-params", "--stochastic-rounding") == 0
    run_file = json.loads((tmp_path / "run.json").read_text())
    assert run_file["settings"]["precision"] == "bf16-params"
    assert run_file["settings"]["stochastic_rounding"] is True
    assert run_file["memory"].keys() == {"weights", "gradients", "optimizer"}
    assert load(tmp_path)[0].embed.weight.dtype == torch.bfloat16


def test_deterministic_algorithms_are_set_and_recorded(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(False)
    assert train(workspace, tmp_path / "plain") == 0
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert train(workspace, tmp_path / "deterministic", "--deterministic") == 0
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    runs = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("plain", "deterministic")]
    assert [run["runtime"]["deterministic"] for run in runs] == [False, True]


def test_what_has_no_deterministic_form_is_refused(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gradients(*arguments: object) -> None:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(loop, "accumulate_gradients", gradients)
    assert train(workspace, tmp_path, "--deterministic") == 1
    assert capsys.readouterr().err == (
        "heddle: --deterministic: torch has no deterministic form of put_ here; leave --deterministic out, or use "
        "--device cpu\n"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tf32"], "tf32:"),
        (["--fp8"], "fp8: all other operations use bfloat16; set precision bf16 or bf16-params"),
        (["--fp8", "--precision", "bf16"], f"fp8: needs torchao; {pip_install('gpu')}, or leave fp8 out"),
        (["--stochastic-rounding"], "stochastic_rounding:"),
        (["--device", "cuda:7"], "device cuda:7:"),
        (["--precision", "fp16"], "precision fp16:"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    options: list[str], says: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    assert train(workspace, tmp_path / "run", *options) == 2
    assert capsys.readouterr().err.startswith(f"heddle: {says}")
    assert not (tmp_path / "run").exists()


def test_layers_are_compiled_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "find_spec", lambda name: name)
    devices = ("cpu", "mps", "cuda", "cuda:1")
    assert [should_compile(device) for device in devices] == [False, False, True, True]
    monkeypatch.setattr(copies, "find_spec", lambda name: None)
    assert not any(map(should_compile, devices))


def test_what_was_chosen_for_compilation_counts(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "should_compile", lambda device: True)
    monkeypatch.setattr(built_models, "compiled", lambda model, whole: model)
    for name, options in {"chosen": ["--no-compile"], "default": []}.items():
        assert train(workspace, tmp_path / name, *options) == 0
        run_file = json.loads((tmp_path / name / "run.json").read_text())
        assert run_file["settings"]["compile"] is (name == "default")


def test_a_run_keeps_how_its_layers_were_compiled(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU a new run has one graph; one that began with a graph for each layer, as earlier runs, goes on so."""
    made = list[bool]()

    def compiled(model: Decoder, whole: bool = False) -> Decoder:
        made.append(whole)
        return model

    def said(out: Path) -> str:
        data = ["--data", f"{workspace}/text", "--out", str(out)]
        assert run_command(["train", f"{workspace}/good.yaml", *data, *SIZE[:-1], "--compile"]) == 0
        return capsys.readouterr().err

    monkeypatch.setattr(built_models, "compiled", compiled)
    new, earlier = tmp_path / "new", tmp_path / "earlier"
    assert "compile: all layers as one graph" in said(new)
    assert json.loads((new / "run.json").read_text())["settings"]["whole_graph"] is True
    with monkeypatch.context() as patch:
        patch.setattr(copies, "whole_graph_refusal", lambda model: "it was not known")
        assert "compile: each layer by itself, since it was not known" in said(earlier)
    assert "whole_graph" not in json.loads((earlier / "run.json").read_text())["settings"]
    assert "all layers as one graph" in said(new)
    assert "since the run began so" in said(earlier)
    assert made == [True, False, True, False]
