"""Conformance kits: equal wherever they are built, right engines are right, and wrong ones are named."""

import ast
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from heddle.cli.main import run_command
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.load import load
from heddle.exchange.transformers.cache import CACHE_NAME
from heddle.exchange.transformers.peer import opened
from heddle.lab.conformance import reader
from heddle.lab.conformance.build import (
    GOLDENS_FILE,
    build_kit,
    build_model,
    build_quantized,
    design,
    rounded,
    tokenizer,
    variants,
)
from heddle.lab.conformance.run import (
    NOT_SEEN,
    RIGHT,
    UNCLEAR,
    WRONG,
    Finding,
    HeddleModel,
    Model,
    ServerModel,
    TransformersModel,
    engine_of,
    junit,
    run_kit,
    table,
)
from heddle.model.decoder import build
from heddle.numerics.rotary import rotary_table
from heddle.parts.positions import Rotation
from heddle.storage.tensor_file import read_tensor_file
from tests.exchange.cases import CASES
from tests.laws.planting import calls
from tests.laws.test_planted import BUGS
from tools.conformance_mutants import changeable
from tools.llama_cpp.runner import HERE, install

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
    findings = list(run_kit(kit, engine_of("heddle", "bfloat16"), "bfloat16"))
    assert {each.status for each in findings if each.way != "greedy" and each.family == "mistral"} == {RIGHT}
    assert {each.status for each in findings} == {RIGHT, NOT_SEEN}
    assert {each.reason for each in findings if each.status == NOT_SEEN} == {UNCLEAR}  # experts, and narrow leads


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

    findings = run_kit(kit, lambda folder: nullcontext(Forgetful(folder, torch.float32)), families=["mistral"])
    wrong = [each for each in findings if each.status == WRONG]
    assert [(each.property, each.bug) for each in wrong] == [("cuts", "the cache is lost at a cut")]


def wrong_findings(kit: Path, model: type[TransformersModel]) -> set[tuple[str, str | None]]:
    """The properties and names of what a class that feeds transformers wrongly gets."""
    findings = run_kit(kit, lambda folder: nullcontext(model(folder, torch.float32, "eager")), families=["mistral"])
    return {(each.property, each.bug) for each in findings if each.status == WRONG}


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
            if case["way"] == "rollback" and case["keep"]:
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

    findings = run_kit(kit, lambda folder: nullcontext(Late(folder, torch.float32)), families=["mistral"])
    wrong = [each for each in findings if each.status == WRONG]
    assert {(each.property, each.bug) for each in wrong} == {("rollback", "removed tokens still count as positions")}, (
        table(wrong)
    )


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("a ring buffer unrolled one step too far", "a ring buffer is unrolled one slot too far"),
        ("a ring buffer overwritten before it is read", "a ring buffer is overwritten before it is read"),
        ("positions of a ring buffer rolled the wrong way", "a ring buffer is unrolled the wrong way"),
    ],
)
def test_a_mistake_of_a_cache_is_named(kit: Path, monkeypatch: pytest.MonkeyPatch, description: str, name: str) -> None:
    next(bug.plant for bug in BUGS if bug.description == description)(monkeypatch)
    findings = run_kit(kit, engine_of("heddle", "float32"), families=["mistral"])
    assert name in {each.bug for each in findings}


def test_a_batch_that_goes_on_at_one_position_is_wrong(kit: Path) -> None:
    class OnePosition(TransformersModel):
        def _padded(self, tokens: Any, mask: Any, cache: Any, read: int = 0) -> Any:
            return super()._padded(tokens, torch.ones_like(mask) if read else mask, cache, read)

    assert {what for what, _ in wrong_findings(kit, OnePosition)} == {"padding"}


def test_a_cache_of_the_text_before_is_named(kit: Path) -> None:
    class Leftover(TransformersModel):
        left = None

        def _run(self, tokens: Any, start: int = 0, **inputs: Any) -> Any:
            result = super()._run(tokens, start, **{CACHE_NAME: self.left, **inputs, "use_cache": True})
            self.left = getattr(result, CACHE_NAME) if len(tokens) == 48 else None
            return result

    found = wrong_findings(kit, Leftover)
    assert ("logits", "the text before is still in the cache") in found


def test_half_precision_angles_are_seen_at_long_positions(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls(rotary_table, "angle_dtype", lambda angle_dtype, dtype: dtype)(monkeypatch)
    findings = run_kit(kit, engine_of("heddle", "bfloat16"), "bfloat16", ["mistral"])
    assert {each.property for each in findings if each.status == WRONG} == {"long positions"}


@pytest.mark.parametrize("name", ["cwm", "emu3_text_model", "modernbert-decoder"])
def test_a_class_that_refuses_null_for_tokens_reads_an_export(name: str, tmp_path: Path) -> None:
    family = families()[name]
    export(build(design(family, next(iter(variants()[name].values())))), tmp_path / "model", family=name)
    assert type(opened(tmp_path / "model", torch.float32, "eager")).__name__ == family.architecture


def test_not_a_number_is_wrong(kit: Path) -> None:
    def broken(folder: Path) -> nullcontext[HeddleModel]:
        model = HeddleModel(folder, torch.float32)
        model.model.final_norm.register_forward_hook(lambda module, arguments, output: output * float("nan"))
        return nullcontext(model)

    assert {each.status for each in run_kit(kit, broken)} == {WRONG}


ENGINE = """
import json, sys
import torch
from heddle.exchange.export import export
from heddle.exchange.load import load
model, text = load(sys.argv[1], dtype=torch.float32).model, []
for line in sys.stdin:
    request = json.loads(line)
    text = text[: request["keep"]] + request["tokens"]
    with torch.no_grad():
        logits = model.head(model(torch.tensor([text]))[0])[0, request["keep"] :]
    print(json.dumps({"logits": logits.tolist()}), flush=True)
"""


@pytest.fixture(scope="module")
def compiled(kit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader in C++."""
    out = tmp_path_factory.mktemp("reader") / "reader"
    subprocess.run(["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", kit / "reader.cpp", "-o", out], check=True)
    return out


# Answers with the golden logits of the row that begins with the text, times a factor. It imports no heddle.
KNOWING = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[2])
import reader
folder, factor, text = pathlib.Path(sys.argv[1]), float(sys.argv[3]), []
rows = json.loads((folder / "cases.json").read_text())["rows"]
golden = reader.tensors(folder / "goldens.safetensors")
for line in sys.stdin:
    request = json.loads(line)
    text = text[: request["keep"]] + request["tokens"]
    row = next(index for index, row in enumerate(rows) if row[: len(text)] == text)
    (_, width), numbers = golden[f"rows.{row}.logits"]
    places = range(request["keep"], len(text))
    logits = [[factor * x for x in numbers[place * width : (place + 1) * width]] for place in places]
    print(json.dumps({"logits": logits}), flush=True)
"""


@pytest.mark.parametrize("language", ["python", "node", "c++"])
def test_the_readers_need_no_heddle_and_find_a_wrong_scale(
    kit: Path, compiled: Path, tmp_path: Path, language: str
) -> None:
    programs: dict[str, list[str | Path]] = {
        "python": [sys.executable, "-I", kit / "reader.py"], "node": ["node", kit / "reader.mjs"], "c++": [compiled],
    }  # fmt: skip
    (tmp_path / "engine.py").write_text(KNOWING)
    for factor, code in ((1, 0), (2, 1)):
        engine = f"{sys.executable} -I {tmp_path / 'engine.py'} {{model}} {kit} {factor}"
        result = subprocess.run([*programs[language], kit, engine], capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr
        lines = set(result.stdout.splitlines())
        if factor == 1:
            properties = ("logits", "cuts", "rollback")
            assert {f"mistral/window  {name}: right" for name in properties} <= lines
            assert len(lines) == 8
    assert any(line.startswith("mistral/window  logits: WRONG by ") for line in lines)
    assert all(line.endswith(": head.scale is 2.0 instead of 1.0") for line in lines if "logits" in line)


def test_an_engine_that_ends_is_not_seen_by_the_readers(kit: Path, compiled: Path) -> None:
    for program in (["node", kit / "reader.mjs"], [compiled], [sys.executable, "-I", kit / "reader.py"]):
        result = subprocess.run([*program, kit, "false"], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert all(line.endswith(": not seen: ended") for line in result.stdout.splitlines())
        assert len(result.stdout.splitlines()) == 8


def test_a_command_is_an_engine(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    engine = engine_of(f"{sys.executable} {tmp_path / 'engine.py'} {{model}}", "float32")
    findings = list(run_kit(kit, engine, families=["mistral"]))
    statuses = {each.property: each.status for each in findings}
    right = ("logits", "long positions", "cuts", "rollback", "greedy text")
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
    out, page = tmp_path / "results.xml", tmp_path / "page.html"
    arguments = ["--family", "mistral", "--junit", str(out), "--page", str(page)]
    assert run_command(["conformance", "run", str(kit), "--engine", "heddle", *arguments]) == 0
    assert "Nothing is wrong in 16 cases" in page.read_text()
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
    page = kit.with_name("page.html")
    command = ["conformance", "run", str(damaged), "--engine", "heddle", "--family", "mistral", "-q"]
    assert run_command([*command, "--page", str(page)]) == 1
    assert "logits WRONG" in capsys.readouterr().out
    assert re.search(r"[1-9]\d* of 16 cases are wrong", page.read_text())
    assert '<td class="wrong">wrong</td>' in page.read_text()


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
        (["build", "NEW", "--gguf", "q4_0"], "--gguf q4_0: unknown"),
        (["run", "KIT", "--engine", "heddle", "--gguf", "q8_0"], "is for build"),
        (["run", "KIT", "--engine", "heddle", "--precision", "q8_0"], "build the kit with --gguf q8_0"),
        (["run", "KIT"], "--engine: is missing"),
        (["run", "NEW", "--engine", "heddle"], "is not a conformance kit"),
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


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit of one Llama of one layer, whose weights are those of its GGUF in Q8_0."""
    out = tmp_path_factory.mktemp("quantized")
    fields = variants()["llama"]["plain"] | {"num_hidden_layers": 1}
    entry = build_quantized(out / "llama/plain-q8_0", families()["llama"], fields)
    assert entry is not None
    (out / "kit.json").write_text(json.dumps({"models": [{"family": "llama", "variant": "plain-q8_0"} | entry]}))
    return out


def test_llama_cpp_is_right_in_q8_0(quantized: Path) -> None:
    """Its engine is run as a command, on the GGUF."""
    install()
    findings = list(run_kit(quantized, engine_of(f"llama.cpp:{HERE}", "q8_0"), "q8_0"))
    statuses = {each.property: each.status for each in findings}
    unseen = ("padding", "packing", "batch change")
    assert statuses == dict.fromkeys(("logits", "long positions", "cuts", "rollback"), RIGHT) | dict.fromkeys(
        unseen, NOT_SEEN
    )
    assert max(each.distance for each in findings) > 1e-3  # it rounds activations


def test_a_wrong_answer_within_the_noise_of_q8_0_is_named(quantized: Path, tmp_path: Path) -> None:
    shutil.copytree(quantized, tmp_path / "kit")
    file = tmp_path / "kit/llama/plain-q8_0/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu2"}))
    file.with_name("manifest.json").unlink()
    findings = list(run_kit(tmp_path / "kit", engine_of("heddle", "q8_0"), "q8_0"))
    assert "layers.feedforward.activation is 'relu2' instead of 'silu'" in {each.bug for each in findings}
    assert WRONG not in {each.status for each in run_kit(quantized, engine_of("heddle", "q8_0"), "q8_0")}


def test_activations_are_rounded_as_ggml_does() -> None:
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * torch.tensor([[10.0**n] for n in range(-3, 4)])
    theirs = dequantize(quantize(x.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert torch.equal(rounded(x), torch.from_numpy(theirs))
    assert not torch.equal(rounded(x), x)


def test_the_tokenizer_has_a_token_for_each_row(quantized: Path) -> None:
    folder = quantized / "llama/plain-q8_0"
    read = load(folder).tokenizer
    assert read is not None
    assert read.vocab_size == load(folder).model.config.vocab_size == 97
    assert read.decode(tokenizer().encode("the { end }")) == "the { end }"


@pytest.mark.parametrize("mode", ["static", "assisted"])
def test_other_ways_of_transformers_are_right(quantized: Path, mode: str) -> None:
    """On dequantized weights, where a draft writes no text that is sure."""
    findings = list(run_kit(quantized, engine_of(f"transformers:{mode}", "q8_0"), "q8_0"))
    right = {"static": {"logits", "long positions", "padding", "cuts"}, "assisted": set()}[mode]
    assert {each.property for each in findings if each.status == RIGHT} == right
    assert WRONG not in {each.status for each in findings}, table(findings)


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of one model.

    factor: of its logits. told: tokens whose log probabilities it tells. echoes: whether also those of a prompt.
    """

    model: HeddleModel
    factor, told, echoes = 1.0, 5, True

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say nothing."""

    def _say(self, content: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._say({"data": [{"id": "one"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("echo") and not self.echoes:
            return self._say({"error": "echo: not here"}, 400)
        choices = [{"index": index, "logprobs": self._scores(row, body)} for index, row in enumerate(body["prompt"])]
        return self._say({"choices": choices[::-1]})

    def _scores(self, row: list[int], body: dict[str, Any]) -> dict[str, Any]:
        written = self.model.greedy(row, body["max_tokens"])
        logits = self.model.answer({"way": "whole", "rows": [0]}, [[*row, *written]])[0].logits
        best = (self.factor * logits).log_softmax(-1).topk(max(1, self.told))
        start = 0 if body.get("echo") else len(row)
        texts = [[tokenizer().decode([index]) for index in one] for one in best.indices.tolist()]
        found: list[dict[str, float] | None] = [None]
        found += [dict(zip(*pair, strict=True)) for pair in zip(texts, best.values.tolist(), strict=True)]
        tokens = [*row, *written]
        return {
            "tokens": [tokenizer().decode([token]) for token in tokens[start:]],
            "token_logprobs": [None] * len(tokens[start:]),
            "top_logprobs": found[start : len(tokens)] if self.told else None,
        }


@contextmanager
def served(folder: Path, **fields: Any) -> Iterator[ServerModel]:
    """A server in a thread, and the engine that asks it."""
    kind = type("Kind", (Server,), {"model": HeddleModel(folder, torch.float32), **fields})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield ServerModel(f"http://127.0.0.1:{server.server_port}/v1", folder)
        finally:
            server.shutdown()


@pytest.mark.parametrize("echoes", [True, False])
def test_a_server_is_seen_by_its_log_probabilities(kit: Path, echoes: bool) -> None:
    findings = list(run_kit(kit, lambda folder: served(folder, echoes=echoes), families=["mistral"]))
    assert {each.property for each in findings if each.status == RIGHT} == {
        "logits",
        "long positions",
        "padding",
        "greedy text",
    }, table(findings)
    assert WRONG not in {each.status for each in findings}


def test_a_wrong_server_is_named_and_a_silent_one_is_not_seen(kit: Path) -> None:
    findings = list(run_kit(kit, lambda folder: served(folder, factor=2.0), families=["mistral"]))
    named = {each.bug for each in findings if each.status == WRONG}
    assert "head.scale is 2.0 instead of 1.0" in named, table(findings)
    findings = list(run_kit(kit, lambda folder: served(folder, told=0), families=["mistral"]))
    assert {each.property for each in findings if each.status != NOT_SEEN} == {"greedy text"}  # it tells its tokens


def test_a_server_that_does_not_start_is_one_sentence(quantized: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        list(run_kit(quantized, engine_of("http://127.0.0.1:9/v1 false {model}", "q8_0"), "q8_0"))
    with pytest.raises(ConfigError, match="lacks its command"):
        engine_of("http://127.0.0.1:9/v1", "q8_0")
    with pytest.raises(ConfigError, match="is not on this machine"):
        engine_of("http://192.0.2.1:9/v1 false {model}", "q8_0")


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
