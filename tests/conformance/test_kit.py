"""Conformance kits: equal wherever they are built, right engines are right, and wrong ones are named."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from heddle.cli.main import run_command
from heddle.exchange.family import families
from heddle.exchange.load import load
from heddle.lab.conformance import reader
from heddle.lab.conformance.build import GOLDENS_FILE, build_kit, build_model, variants
from heddle.lab.conformance.run import (
    RIGHT,
    WRONG,
    Finding,
    HeddleModel,
    Model,
    TransformersModel,
    engine_of,
    junit,
    run_kit,
    table,
)
from heddle.model.decoder import Decoder
from heddle.numerics.rotary import rotary_table
from heddle.parts.positions import Rotation
from heddle.storage.tensor_file import read_tensor_file
from tests.exchange.cases import CASES
from tests.laws.planting import calls
from tools.conformance_mutants import changeable

FEW = ("mistral", "qwen3_moe")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models: windows and a long RoPE, and experts."""
    out = tmp_path_factory.mktemp("kit") / "kit"
    chosen = {"mistral": ["window"], "qwen3_moe": [next(iter(variants()["qwen3_moe"]))]}
    whole = variants()
    with pytest.MonkeyPatch.context() as patch:
        few = {name: {each: whole[name][each] for each in names} for name, names in chosen.items()}
        patch.setattr("heddle.lab.conformance.build.variants", lambda: few)
        build_kit(out, FEW)
    return out


def test_every_family_has_its_variants() -> None:
    assert variants().keys() == CASES.keys()


def test_heddle_is_right_in_every_way(kit: Path) -> None:
    findings = list(run_kit(kit, engine_of("heddle", "float32")))
    assert {each.status for each in findings} == {RIGHT}
    assert {each.property for each in findings} >= {"logits", "padding", "packing", "cuts", "rollback", "batch change"}
    assert max(each.distance / each.tolerance for each in findings if each.tolerance) < 0.6


def test_bfloat16_is_right_within_its_own_tolerance(kit: Path) -> None:
    assert {each.status for each in run_kit(kit, engine_of("heddle", "bfloat16"), "bfloat16")} == {RIGHT}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_is_right(kit: Path, attention: str) -> None:
    findings = list(run_kit(kit, engine_of(f"transformers:{attention}", "float32")))
    assert WRONG not in {each.status for each in findings}, table(findings)
    right = {each.property for each in findings if each.status == RIGHT}
    assert right >= {"logits", "padding", "cuts", "batch change", "greedy text"}


def test_the_same_bits_are_built_again(kit: Path, tmp_path: Path) -> None:
    fields = variants()["mistral"]["window"]
    build_model(tmp_path / "again", families()["mistral"], fields)
    first = kit / "mistral/window"
    assert (tmp_path / "again/model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    goldens = dict(read_tensor_file(first / GOLDENS_FILE))
    for name, tensor in read_tensor_file(tmp_path / "again" / GOLDENS_FILE):
        assert torch.allclose(tensor, goldens[name], rtol=0, atol=1e-11), name


def test_weights_are_representable_in_bfloat16(kit: Path) -> None:
    for parameter in load(
        kit / "qwen3_moe" / next(iter(variants()["qwen3_moe"])), dtype=torch.float64
    ).model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().double())


@pytest.mark.parametrize(
    ("family", "fields", "name"),
    [
        ("mistral", {"sliding_window": 8}, "layers.mixer.window is 8 instead of 7"),
        ("mistral", {"sliding_window": None}, "layers.mixer.window is None instead of 7"),
        ("mistral", {"hidden_act": "relu"}, "layers.feedforward.activation is 'relu' instead of 'silu'"),
        ("qwen3_moe", {"norm_topk_prob": None}, "layers.feedforward.renormalize is"),
        ("qwen3_moe", {"num_experts_per_tok": 3}, "layers.feedforward.top_k is 3 instead of 2"),
    ],
    ids=str,
)
def test_a_wrong_answer_is_named(kit: Path, tmp_path: Path, family: str, fields: dict[str, Any], name: str) -> None:
    """transformers reads another config than the kit's."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Model]:
        shutil.copytree(folder, tmp_path / folder.name)
        file = tmp_path / folder.name / "config.json"
        config = json.loads(file.read_text())
        changed = {key: not config[key] if key == "norm_topk_prob" else value for key, value in fields.items()}
        file.write_text(json.dumps(config | changed))
        yield TransformersModel(tmp_path / folder.name, torch.float32, "eager")

    findings = list(run_kit(kit, opened, families=[family]))
    named = {each.bug for each in findings if each.status == WRONG and each.property == "logits"}
    assert any(bug is not None and bug.startswith(name) for bug in named), table(findings)
    assert {each.layer for each in findings if each.status == WRONG and each.way == "whole"} <= {0, 1, None}


def test_a_lost_cache_is_named(kit: Path) -> None:
    class Forgetful(HeddleModel):
        def answer(self, case: Any, rows: Any) -> Any:
            if case["way"] != "cut" or case["cuts"] != [7, 8, 10, 19]:
                return super().answer(case, rows)
            whole = super().answer({"way": "whole", "rows": [0]}, rows)[0].logits
            lost = super().answer({"way": "whole", "rows": [0]}, [rows[0][7:]])[0].logits
            return [type(super().answer({"way": "whole", "rows": [0]}, rows)[0])(0, 0, torch.cat((whole[:7], lost)))]

    @contextmanager
    def opened(folder: Path) -> Iterator[Model]:
        yield Forgetful(folder, torch.float32)

    wrong = [each for each in run_kit(kit, opened, families=["mistral"]) if each.status == WRONG]
    assert [(each.property, each.bug) for each in wrong] == [("cuts", "the cache is lost at a cut")]


def wrong_findings(kit: Path, model: type[TransformersModel]) -> set[tuple[str, str | None]]:
    """The properties and names of what a class that feeds transformers wrongly gets."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Model]:
        yield model(folder, torch.float32, "eager")

    return {(each.property, each.bug) for each in run_kit(kit, opened, families=["mistral"]) if each.status == WRONG}


def test_positions_that_restart_at_cuts_are_named(kit: Path) -> None:
    class Restarting(TransformersModel):
        def _run(self, tokens: Any, start: int = 0, **inputs: Any) -> Any:
            return super()._run(tokens, 0, **inputs)

    found = wrong_findings(kit, Restarting)
    assert ("cuts", "positions restart at each cut") in found
    assert {what for what, _ in found} == {"cuts", "batch change"}


def test_positions_after_rollback_are_named(kit: Path) -> None:
    class Late(HeddleModel):
        def answer(self, case: Any, rows: Any) -> Any:
            answers = super().answer(case, rows)
            if case["way"] == "rollback":
                rotations = [each for each in self.model.modules() if isinstance(each, Rotation)]
                assert rotations
                positions = torch.tensor([[*range(12), *range(20, 29)]])
                handles = [
                    each.register_forward_pre_hook(
                        lambda _, inputs: (inputs[0], replace(inputs[1], positions=positions, start=None, cache={}))
                    )
                    for each in rotations
                ]
                logits = super().answer({"way": "whole", "rows": [3]}, rows)[0].logits
                for handle in handles:
                    handle.remove()
                answers[1] = replace(answers[1], logits=logits[12:])
            return answers

    @contextmanager
    def opened(folder: Path) -> Iterator[Model]:
        yield Late(folder, torch.float32)

    wrong = [each for each in run_kit(kit, opened, families=["mistral"]) if each.status == WRONG]
    assert {(each.property, each.bug) for each in wrong} == {("rollback", "removed tokens still count as positions")}, (
        table(wrong)
    )


def test_a_batch_that_goes_on_at_one_position_is_wrong(kit: Path) -> None:
    class OnePosition(TransformersModel):
        def _padded(self, tokens: Any, mask: Any, read: int = 0) -> Any:
            return super()._padded(tokens, torch.ones_like(mask) if read else mask, read)

    assert {what for what, _ in wrong_findings(kit, OnePosition)} == {"padding"}


def test_a_cache_of_the_text_before_is_named(kit: Path) -> None:
    class Leftover(TransformersModel):
        left = None

        def _run(self, tokens: Any, start: int = 0, **inputs: Any) -> Any:
            result = super()._run(tokens, start, **{"past_key_values": self.left, **inputs, "use_cache": True})
            self.left = result.past_key_values if len(tokens) == 48 else None
            return result

    found = wrong_findings(kit, Leftover)
    assert ("logits", "the text before is still in the cache, positions restart") in found


def test_half_precision_angles_are_seen_at_long_positions(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls(rotary_table, "angle_dtype", lambda angle_dtype, dtype: dtype)(monkeypatch)
    findings = run_kit(kit, engine_of("heddle", "bfloat16"), "bfloat16", ["mistral"])
    assert {each.property for each in findings if each.status == WRONG} == {"long positions"}


def test_not_a_number_is_wrong(kit: Path) -> None:
    def broken(model: Decoder) -> None:
        model.final_norm.register_forward_hook(lambda module, arguments, output: output * float("nan"))

    @contextmanager
    def opened(folder: Path) -> Iterator[Model]:
        model = HeddleModel(folder, torch.float32)
        broken(model.model)
        yield model

    statuses = {each.status for each in run_kit(kit, opened)}
    assert statuses == {WRONG}


ENGINE = """
import json, sys
import torch
from heddle.exchange.load import load
model, text = load(sys.argv[1], dtype=torch.float32).model, []
for line in sys.stdin:
    request = json.loads(line)
    text = text[: request["keep"]] + request["tokens"]
    with torch.no_grad():
        logits = model.head(model(torch.tensor([text]))[0])[0, request["keep"] :]
    print(json.dumps({"logits": (FACTOR * logits).tolist()}), flush=True)
"""


def test_the_reader_needs_no_heddle_and_finds_a_wrong_scale(kit: Path, tmp_path: Path) -> None:
    for factor, code in ((1, 0), (2, 1)):
        (tmp_path / "engine.py").write_text(ENGINE.replace("FACTOR", str(factor)))
        command = f"{sys.executable} {tmp_path / 'engine.py'} {{model}}"
        result = subprocess.run(
            [sys.executable, "-I", kit / "reader.py", kit, command], capture_output=True, text=True, check=False
        )
        assert result.returncode == code, result.stderr
        assert "mistral/window  cuts: right" in result.stdout or factor == 2
    assert "mistral/window  logits: WRONG" in result.stdout
    assert "head.scale is 2.0 instead of 1.0" in result.stdout


def test_a_command_is_an_engine(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE.replace("FACTOR", "1"))
    engine = engine_of(f"{sys.executable} {tmp_path / 'engine.py'} {{model}}", "float32")
    findings = list(run_kit(kit, engine, families=["mistral"]))
    statuses = {each.property: each.status for each in findings}
    right = ("logits", "cuts", "rollback", "greedy text")
    assert statuses == dict.fromkeys(right, RIGHT) | dict.fromkeys(("padding", "packing", "batch change"), "not seen")


def test_the_reader_reads_what_was_written(kit: Path) -> None:
    for folder, document in reader.models(kit):
        tensors = reader.tensors(folder / GOLDENS_FILE)
        for name, tensor in read_tensor_file(folder / GOLDENS_FILE):
            assert tensors[name] == (
                list(tensor.shape),
                type(tensors[name][1])(tensors[name][1].typecode, tensor.flatten().tolist()),
            )
        assert len(document["bugs"]) > 20


def test_the_command_line(kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.xml"
    code = run_command(
        ["conformance", "run", str(kit), "--engine", "heddle", "--family", "mistral", "--junit", str(out)]
    )
    assert code == 0
    assert "0 wrong, 0 not seen" in capsys.readouterr().out
    suite = ElementTree.parse(out).getroot()
    assert suite.get("failures") == "0"
    assert len(suite) == int(suite.get("tests", "0")) > 10


def test_what_is_wrong_is_an_error_code_and_a_line(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = kit.with_name("damaged")
    shutil.copytree(kit, damaged)
    file = damaged / "mistral/window/cases.json"
    document = json.loads(file.read_text())
    document["rows"][0][0] = 1 + document["rows"][0][0] % 90
    file.write_text(json.dumps(document))
    assert run_command(["conformance", "run", str(damaged), "--engine", "heddle", "--family", "mistral", "-q"]) == 1
    assert "logits WRONG" in capsys.readouterr().out


def test_junit_says_what_was_wrong_and_not_seen() -> None:
    findings = [
        Finding("a", "b", "logits", "whole", WRONG, 0.5, 0.1, 2, "window is 8 instead of 7"),
        Finding("a", "b", "packing", "packed", "not seen", reason="no rows"),
    ]
    suite = ElementTree.fromstring(junit(findings, "engine"))
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "1")
    assert "window is 8" in str(suite[0][0].get("message"))
    assert table(findings)[1].endswith("off by 0.5, first in layer 2: window is 8 instead of 7")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "KIT"], "exists already"),
        (["build", "NEW", "--family", "lama"], "--family lama: unknown"),
        (["build", "NEW", "--engine", "heddle"], "is for run"),
        (["run", "KIT"], "--engine: is missing"),
        (["run", "NEW", "--engine", "heddle"], "is no conformance kit"),
        (["run", "KIT", "--engine", "heddle", "--family", "bert"], "is not in"),
        (["run", "KIT", "--engine", "vllm"], "--engine vllm: unknown"),
        (["run", "KIT", "--engine", "nothing-here {model}"], "does not start"),
        (["run", "KIT", "--engine", "nothing_here:f"], "No module named"),
        (["run", "KIT", "--engine", "heddle", "--precision", "fp8"], "--precision fp8: unknown"),
        (["test", "KIT"], "ACTION test: unknown"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    places = {"KIT": str(kit), "NEW": str(tmp_path / "new")}
    assert run_command(["conformance", *(places.get(each, each) for each in arguments)]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1


def test_mutants_are_single_changes_of_what_gives_logits() -> None:
    source = """
def f(self, q, k, labels=None):
    if labels is not None:
        loss = q * 2
    if q.shape[0] < 1:
        raise ValueError("a" + "b")
    q = self.norm(q).transpose(1, 2) * 0.5
    return torch.where(q, k)
"""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    found = {(getattr(node, "lineno", 0), change) for node, change, _ in changeable(function)}
    assert {line for line, change in found if change != "condition"} == {7, 8}
    assert {change for _, change in found} == {"condition"} | {
        "statement left out", "factor left out", "operation", "constant", "transpose left out", "call left out",
        "arguments exchanged",
    }  # fmt: skip
    for node, _, new in changeable(function):
        assert new is None or ast.unparse(new) != ast.unparse(node)
