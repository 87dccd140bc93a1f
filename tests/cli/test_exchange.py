"""`heddle import` and `heddle export` on the command line, checked against transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import heddle
from heddle.cli.main import run_command
from heddle.data.chat import ChatFormat
from heddle.storage.folder import tensors_sha256
from tests import small
from tests.exchange.hf_models import AutoModelForCausalLM, saved
from tests.exchange.test_tokenizer_files import folder_of
from tests.exchange.tokenizer_cases import MEASURED

SIZES = ["--sequence-length", "32", "--batch-size", "2", "--steps", "3", "--device", "cpu", "-q"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a small text."""
    root = tmp_path_factory.mktemp("trained")
    small.folder(root / "text")
    command = ["train", "preset:gqa-tiny", "layers.0.repeat=2", "--data", f"{root}/text", "--out", f"{root}/run"]
    assert run_command([*command, "--vocab-size", "300", *SIZES]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def gguf(trained: Path) -> Path:
    """The same as a GGUF file, which no test changes."""
    file = trained.with_name("model.gguf")
    assert run_command(["export", str(trained), str(file), "--format", "gguf", "-q"]) == 0
    return file


def test_export_and_import_round_trip(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/hf", "-q"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/hf: exports as: LlamaForCausalLM\n"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["max_position_embeddings"] == 32
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.num_hidden_layers == 2
    assert run_command(["import", f"{tmp_path}/hf", f"{tmp_path}/back", "-q"]) == 0
    assert "llama of" in capsys.readouterr().out
    assert run_command(["export", f"{tmp_path}/back", f"{tmp_path}/again", "-q"]) == 0
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name
    assert tensors_sha256(tmp_path / "again") == tensors_sha256(tmp_path / "hf")


def test_export_as_another_family_that_fits(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/hf", "--family", "mistral", "-q"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/hf: exports as: MistralForCausalLM\n"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.model_type == "mistral"


def test_a_gguf_comes_back(trained: Path, gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["import", str(gguf), f"{tmp_path}/back", "-q"]) == 0
    assert "llama of" in capsys.readouterr().out
    again, tokenizer = heddle.load(tmp_path / "back")
    model, _ = heddle.load(trained)
    assert tokenizer is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.parametrize("options", [[], ["--dtype", "Q8_0"]])
def test_a_file_named_gguf_is_one(options: list[str], trained: Path, tmp_path: Path) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/model.gguf", *options, "-q"]) == 0
    assert (tmp_path / "model.gguf").is_file()
    assert run_command(["export", str(trained), f"{tmp_path}/folder.gguf", "--format", "hf", "-q"]) == 0
    assert (tmp_path / "folder.gguf" / "config.json").is_file()


def test_a_folder_of_transformers_generates_and_is_inspected(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/hf", "-q"]) == 0
    texts = []
    for folder in (trained, tmp_path / "hf"):
        capsys.readouterr()
        words = ["generate", str(folder), "--prompt", "The weaver", "--max-new-tokens", "8", "--device", "cpu", "-q"]
        assert run_command(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    page = f"{tmp_path}/page.html"
    assert run_command(["inspect", f"{tmp_path}/hf", "--text", "The weaver", "--out", page, "--device", "cpu"]) == 0


def test_a_folder_that_another_program_saved_again_says_what_to_remove(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert run_command(["export", str(trained), str(folder), "-q"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        theirs.get_parameter("model.norm.weight").mul_(1.5)
    theirs.save_pretrained(folder)
    assert run_command(["import", str(folder), f"{tmp_path}/back", "-q"]) == 2
    manifest = folder / "manifest.json"
    assert f"remove {manifest}" in capsys.readouterr().err
    manifest.unlink()
    assert run_command(["import", str(folder), f"{tmp_path}/back", "-q"]) == 0
    gain = heddle.load(tmp_path / "back")[0].get_parameter("final_norm.norm.weight")
    assert torch.equal(gain, theirs.get_parameter("model.norm.weight"))


def test_a_model_without_a_tokenizer_says_how_to_give_it_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert run_command(["export", str(trained), str(folder), "-q"]) == 0
    (folder / "manifest.json").unlink()
    tokenizer = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert run_command(["import", str(folder), f"{tmp_path}/mute"]) == 0
    assert "--tokenizer" in capsys.readouterr().err
    asks = ["--prompt", "The weaver", "--max-new-tokens", "2", "--device", "cpu", "-q"]
    assert run_command(["generate", f"{tmp_path}/mute", *asks]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert run_command(["import", str(folder), f"{tmp_path}/again", "--tokenizer", str(tokenizer), "-q"]) == 0
    assert run_command(["generate", f"{tmp_path}/again", *asks]) == 0


def test_a_conversion_names_the_class_that_an_export_writes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/hf", "--family", "mistral", "-q"]) == 0
    assert run_command(["import", f"{tmp_path}/hf", f"{tmp_path}/run", "-q"]) == 0
    capsys.readouterr()
    options = ["--to", "kv_heads=1,groups=contiguous,merge=mean", "--report-tokens", "0", "--device", "cpu", "-q"]
    assert run_command(["convert", f"{tmp_path}/run", "--dry-run", "--json", *options]) == 0
    assert capsys.readouterr().out.count("MistralForCausalLM") == 2
    assert run_command(["convert", f"{tmp_path}/run", f"{tmp_path}/one", *options]) == 0
    capsys.readouterr()
    assert run_command(["export", f"{tmp_path}/one", f"{tmp_path}/out", "-q"]) == 0
    assert "MistralForCausalLM" in capsys.readouterr().out
    assert run_command(["convert", f"{tmp_path}/one", f"{tmp_path}/same", *options]) == 2
    assert capsys.readouterr().err.startswith("heddle: kv_heads: ")


@pytest.mark.parametrize("name", ["sha256-4f2a", "MODEL.GGUF", "model.gguf.download"])
def test_a_gguf_of_another_name_is_read(name: str, gguf: Path, tmp_path: Path) -> None:
    """Caches name files by their hash."""
    shutil.copy(gguf, tmp_path / name)
    assert run_command(["import", f"{tmp_path}/{name}", f"{tmp_path}/back", "-q"]) == 0
    assert heddle.load(tmp_path / "back")[1] is not None
    assert run_command(["verify", f"{tmp_path}/{name}"]) == 0
    assert run_command(["generate", f"{tmp_path}/{name}", "--prompt", "a"]) == 2


def test_a_gguf_gets_a_chat_template_which_an_export_keeps(gguf: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", encoding="utf-8")
    assert run_command(["import", str(gguf), f"{tmp_path}/back", "--chat-template", str(template), "-q"]) == 0
    _, tokenizer = heddle.load(tmp_path / "back")
    assert tokenizer is not None
    assert ChatFormat(tokenizer, tokenizer.companion_files).template == template.read_text(encoding="utf-8")
    assert run_command(["export", f"{tmp_path}/back", f"{tmp_path}/hf", "-q"]) == 0
    rendered = AutoTokenizer.from_pretrained(tmp_path / "hf").apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    assert rendered == "[a]"


def test_export_to_bfloat16(trained: Path, tmp_path: Path) -> None:
    assert run_command(["export", str(trained), f"{tmp_path}/hf", "--dtype", "bf16", "-q"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


def test_a_design_without_a_family_reports_what_would_change_that(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    design = json.dumps({"width": 24, "vocab_size": 61, "layers": [{"mixer": {"kind": "retention", "heads": 2}}]})
    (tmp_path / "design.json").write_text(design)
    assert run_command(["show", f"{tmp_path}/design.json", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["exports_as"]
    assert lines[0] == "exports as: HeddleForCausalLM"
    assert "layers.0.mixer.kind is retention" in lines[1]
    assert "layers.0.mixer.kind=" in lines[2]


@pytest.mark.parametrize("words", [["export", "{run}", "{out}"], ["import", "{run}", "{out}"]])
def test_nothing_is_replaced(
    words: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model folder of another import or training may be the only copy of its weights."""
    out = tmp_path / "out"
    model, tokenizer = heddle.load(trained)
    heddle.save(model, out, tokenizer)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_command([word.format(run=trained, out=out) for word in words]) == 2
    assert f"{out}: exists already; choose another name for the" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["export", "{trained}", "{out}", "--format", "onnx"], "--format onnx"),
        (["export", "{trained}", "{out}", "--dtype", "int4"], "--dtype int4"),
        (["export", "{trained}", "{out}", "--format", "gguf", "--family", "llama"], "--family llama"),
        (["export", "{trained}", "{out}", "--format", "hf", "--dtype", "q4_k_m"], "--dtype q4_k_m"),
        (["export", "{trained}", "{out}", "--format", "gguf", "--library", "libllama.so"], "--library"),
        (["export", "{trained}", "{out}", "--family", "qwen2"], "family 'qwen2'"),
        (["import", "{trained}", "{out}", "--dequantize", "int4"], "--dequantize int4"),
        (["import", "{gguf}", "{out}", "--chat-template", "{bad}"], "cannot be read as Jinja"),
        (["import", "{gguf}", "{out}", "--chat-template", "nowhere"], "nowhere"),
        (["generate", "{gguf}", "--prompt", "The"], "heddle import"),
        (["chat", "{gguf}"], "heddle import"),
        (["convert", "{gguf}", "{out}", "--to", "kv_heads=1"], "heddle import"),
        (["export", "nowhere", "{out}"], "nowhere"),
        (["import", "nowhere", "{out}"], "nowhere"),
        (["import", "{trained}", "{out}"], "config.json"),
    ],
)
def test_user_errors(
    command: list[str], words: str, trained: Path, gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for %}", encoding="utf-8")
    arguments = [part.format(trained=trained, out=tmp_path / "out", bad=bad, gguf=gguf) for part in command]
    assert run_command(arguments) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_foreign_model_keeps_its_family(tmp_path: Path) -> None:
    _, folder = saved("llama", "plain")
    assert run_command(["import", str(folder), f"{tmp_path}/ours", "-q"]) == 0
    assert run_command(["show", f"{tmp_path}/ours"]) == 0
    assert run_command(["export", f"{tmp_path}/ours", f"{tmp_path}/theirs", "-q"]) == 0
    exported, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "theirs", folder))
    for name in set(original) - {"transformers_version", "pretraining_tp"}:
        assert exported[name] == original[name], name


@pytest.mark.parametrize("name", MEASURED)
def test_an_imported_model_is_trained_on_with_its_own_tokenizer_and_leaves_with_it(name: str, tmp_path: Path) -> None:
    folder, text = folder_of(name, tmp_path / "theirs"), small.folder(tmp_path / "text")
    assert run_command(["import", str(folder), f"{tmp_path}/ours", "-q"]) == 0
    command = ["train", "--from", f"{tmp_path}/ours", "--data", str(text), "--lora", "2", "--out", f"{tmp_path}/run"]
    assert run_command([*command, *SIZES]) == 0
    assert run_command(["export", f"{tmp_path}/run", f"{tmp_path}/out", "-q"]) == 0
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes(), file
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
