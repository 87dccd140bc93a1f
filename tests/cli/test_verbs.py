"""What each command prints, as text and as JSON, on stdout and stderr."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from heddle import __version__
from heddle.cli.main import COMMANDS, SUBCOMMANDS, VERBS, run_command
from heddle.errors import pip_install
from heddle.generation.generate import generate
from heddle.lab.bench import run as bench_run
from heddle.model.copies import quantize_weights
from heddle.model.load_config import load_config
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.model import load
from heddle.storage.run_log import RUN_FILE, read_log
from heddle.training import loop
from tests import small
from tests.small import forget_parts

SIZE = ["--sequence-length", "16", "--batch-size", "4", "--device", "cpu"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str]:
    """Standard output and error of a command that succeeds."""
    capsys.readouterr()
    code = run_command([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design, a text, and a run that trained on it."""
    root = tmp_path_factory.mktemp("workspace")
    small.folder(root / "text")
    small.design_file(root / "a design.yaml")
    assert run_command(train(root, root / "run", "--steps", "5", "--quiet")) == 0
    return root


def train(workspace: Path, out: Path, *options: str) -> list[str]:
    return ["train", f"{workspace}/a design.yaml", "--data", f"{workspace}/text", "--out", str(out), *SIZE, *options]


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "--help")
    groups = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", out, re.MULTILINE))
    listed = {group: re.findall(r"^  (\w+) ", lines, re.MULTILINE) for group, lines in groups.items() if group in VERBS}
    assert listed == {group: list(verbs) for group, verbs in VERBS.items()}
    assert sum(map(len, VERBS.values())) <= 12
    for verb, words in SUBCOMMANDS.items():
        assert f"{verb} {', '.join(words)}" in " ".join(out.split())
    assert "--part FILE" in call(capsys, "train", "--help")[0]
    assert call(capsys)[0] == out
    assert call(capsys, "--version")[0] == f"heddle {__version__}\n"


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"{verb} {word}" for verb, words in SUBCOMMANDS.items() for word in words)]
)
def test_every_command_explains_each_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *command.split(), "--help")
    assert err == ""
    is_short = "--help-all" in out
    assert out.count("\n  --") <= 16
    if is_short:
        shown = out
        out, err = call(capsys, *command.split(), "--help-all")
        assert set(re.findall(r"^  --[\w-]+", shown, re.MULTILINE)) < set(re.findall(r"^  --[\w-]+", out, re.MULTILINE))
    assert max(map(len, out.splitlines())) <= 80
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)(?: [A-Z=,]+)?\s{2,}(\S?)", out, re.MULTILINE)
    assert len(options) >= 2
    assert all(first and first != "-" for _, first in options), out
    assert "<" not in out.partition("Options:")[2]
    listed = re.findall(
        r"^  (\S+)", re.split(r"^\w+:\n", out.partition("\nOptions:\n")[2], flags=re.MULTILINE)[0], re.MULTILINE
    )
    assert all(word.startswith("-") for word in listed), "arguments have a section of their own"
    assert out.startswith(f"Usage: heddle {command.split()[-1]} ")


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    code = (
        f"import sys; from {run_command.__module__} import run_command\n"
        "for words in (['--help'], ['train', '--help'], ['frob']): run_command(words)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'plotly', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_inspect(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "page.html"
    out, err = call(
        capsys, "inspect", workspace / "run", "--text", "The weaver <lifts>", "--out", page, "--device", "cpu"
    )
    assert (out, err) == (f"{page}\n", "")
    text = page.read_text(encoding="utf-8")
    assert "heads of run" in text
    assert "&lt;" in text
    assert "lifts>" not in text
    assert (
        run_command(["inspect", f"{workspace}/run", "--text", "x", "--out", f"{workspace}/text", "--device", "cpu"])
        == 2
    )
    assert "text:" in capsys.readouterr().err


def test_show(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "show", f"{workspace}/a design.yaml", "--device", "cpu", "layers.0.repeat=3")
    assert err == ""
    assert out.splitlines()[0] == f"{workspace}/a design.yaml".replace("\n", "")
    assert "  3 ×  attention heads=2 kv_heads=1" in out
    assert "kernels in training" in out
    assert "kernels in decode" in out
    wide = [line for line in out.splitlines()[1:] if len(line) > 80]
    assert [line.partition(" '")[0] for line in wide] == ["heddle doctor"], "a long path"


def test_show_of_presets_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gqa-medium", "local_global-small"):
        out, _ = call(capsys, "show", f"preset:{name}", "--device", "cpu")
        assert [line for line in out.splitlines() if len(line) > 80] == []


def test_show_prints_each_kernel_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Products of several sizes have the same kernel for several reasons, which `heddle doctor` prints."""
    design = ("preset:gqa-tiny", "width=64", "layers.*.mixer.heads=4", "layers.*.feedforward.hidden=160")
    out, _ = call(capsys, "show", *design, "--json")
    decode = [(each["operation"], each["kernel"]) for each in json.loads(out)["kernels"]["decode"]]
    assert len(decode) > len(set(decode))
    out, _ = call(capsys, "show", *design)
    lines = out.partition("kernels in decode\n")[2].partition("\n\n")[0].splitlines()
    assert sorted(line.split(",")[0].strip() for line in lines) == sorted(" = ".join(each) for each in set(decode))


def test_show_prints_a_repeated_group_once(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(
        capsys, "show", "preset:hybrid-1b", "--batch-size", "16", "--context-length", "512", "--device", "cpu"
    )
    table = out.partition("cost of")[0]
    assert [line.split()[:3] for line in table.splitlines() if " × " in line or " times" in line] == [
        ["4", "times"],
        ["3", "×", "gated_delta"],
        ["1", "×", "attention"],
    ]
    assert "batch 16" in table
    out, _ = call(
        capsys, "show", "preset:hybrid-1b", "layers.0.layers.0.repeat=2", "layers.0.repeat=1", "--device", "cpu"
    )
    assert " times" not in out.partition("cost of")[0]


def test_show_as_json(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{workspace}/a design.yaml"
    facts = json.loads(
        call(capsys, "show", path, "--json", "--context-length", "64", "--batch-size", "3", "--device", "cpu")[0]
    )
    config = load_config(path)
    assert load_config(facts["design"]) == config
    assert facts["parameters"] == sum(parameter.numel() for parameter in load(workspace / "run")[0].parameters())
    assert [context["context_length"] for context in facts["contexts"]] == [64]
    assert facts["batch_size"] == 3
    assert facts["contexts"][0]["state_bytes"] > 0
    assert {kernel["operation"] for kernel in facts["kernels"]["decode"]} >= {"attention", "linear"}
    forced = json.loads(call(capsys, "show", path, "--json", "--kernel", "attention=reference", "--device", "cpu")[0])
    assert {kernel["kernel"] for kernel in forced["kernels"]["decode"] if kernel["operation"] == "attention"} == {
        "reference"
    }


def test_show_of_a_bidirectional_design_keeps_no_state(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "show", f"{workspace}/a design.yaml", "layers.0.mixer.causal=false", "--device", "cpu")
    assert "kernels in decode" not in out


def test_usual_lengths_end_where_learned_positions_end(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of show, plan and bench; a length that is asked for is refused."""
    design = [f"{workspace}/a design.yaml", "embedding.position={kind: learned, length: 300}"]
    facts = json.loads(call(capsys, "show", *design, "--json")[0])
    assert [context["context_length"] for context in facts["contexts"]] == [300]
    assert json.loads(call(capsys, "show", *design, "--profile", "--json")[0])["profile"]
    assert json.loads(call(capsys, "plan", *design, "--json")[0])["sequence_length"] == 300
    assert run_command(["show", *design, "--context-length", "301"]) == 2
    assert "beyond the 300 learned positions" in capsys.readouterr().err
    measured = list[Any]()

    def run_bench(bench: bench_run.Bench, *_: Any) -> list[bench_run.MeasuredWorkload]:
        measured.extend(bench.measured)
        return []

    monkeypatch.setattr(bench_run, "run_bench", run_bench)
    call(capsys, "bench", *design, "--json")
    assert [workload.length for workload in measured] == [300, 128, 128, 300 - bench_run.TOKENS, 300 - bench_run.TOKENS]


def test_the_schema_is_valid(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(call(capsys, "show", "--schema")[0])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(small.design())


def test_check(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(call(capsys, "check", f"{workspace}/a design.yaml", "--json")[0])
    assert len(results) >= 6
    assert all(result["passed"] for result in results)


def test_train_prints_text(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *train(workspace, tmp_path / "run", "--steps", "3"))
    lines = out.splitlines()
    assert re.fullmatch(rf"{tmp_path}/run: \d\.\d{{4}} bits per byte on held-out text after 3 steps", lines[0])
    assert lines[1] == "a sample:"
    assert "corpus text, hash " in err
    assert "\x1b" not in out + err


def test_a_run_that_diverged_is_said_to(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate, is_said in (("30", True), ("0.001", False)):
        _, err = call(capsys, *train(workspace, tmp_path / rate, "--steps", "12", "--lr", rate, "--warmup", "1"))
        assert ("diverged" in err) == is_said


def test_train_prints_json(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *train(workspace, tmp_path / "run", "--tokens", "200", "--quiet", "--json"))
    assert err == ""
    result = json.loads(out)
    assert result["steps"] == 3  # whole steps of 64 tokens
    assert result["skipped_steps"] == 0
    assert 0 < result["bits_per_byte"] < 9
    assert result["run"] == str(tmp_path / "run")
    again, _ = call(capsys, *train(workspace, tmp_path / "run", "--tokens", "200", "--quiet", "--json"))
    assert again == out
    listed, _ = call(capsys, "runs", str(tmp_path), "--json")
    assert json.loads(listed)[0]["final"] == result["bits_per_byte"]


def test_train_on_a_recall_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "preset:mha-tiny", "width=16", "layers.0.repeat=1", "--data", "recall:parity,length=8"]
    arguments += ["--steps", "3", "--device", "cpu", "--threads", "1", "--out", str(tmp_path / "run"), "--quiet"]
    out, err = call(capsys, *arguments)
    assert re.fullmatch(r".*: \d+\.\d% accuracy on held-out sequences \(chance 50\.0%\) after 3 steps\n", out)
    assert err == ""
    result = json.loads(call(capsys, *arguments, "--json")[0])
    assert result.keys() == {"run", "steps", "skipped_steps", "accuracy", "chance"}
    run_file = json.loads((tmp_path / "run" / RUN_FILE).read_text())
    assert run_file["design"]["vocab_size"] == 2
    assert run_file["settings"]["sequence_length"] == 8
    assert run_file["data"]["options"] == {"length": 8}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--sequence-length", "9"],
            "--sequence-length 9: recall:mqar",
        ),
        (["--vocab-size", "300"], "--vocab-size 300: recall:mqar"),
        (["--tokenizer", "t.json"], "--tokenizer t.json: recall:mqar"),
        (["--data", "stdlib"], "data recall:mqar"),
        (["vocab_size=48"], "recall:mqar,pairs=12,keys=24,length=36"),
    ],
)
def test_options_that_conflict_with_a_recall_task_are_refused(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "preset:mha-tiny", "--data", "recall:mqar", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run_command([*arguments, *more]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_than_the_design_has_is_refused(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "preset:gqa-small", "--data", f"{workspace}/text", "--vocab-size", "300", "--device", "cpu"]
    assert run_command([*words, "--out", str(tmp_path / "run")]) == 2
    assert "--vocab-size 300: the design has 8192; leave it out, or give vocab_size=300" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_records_how_it_was_trained(workspace: Path) -> None:
    run_file: dict[str, Any] = json.loads((workspace / "run" / RUN_FILE).read_text())
    assert run_file["settings"]["steps"] == 5
    assert run_file["design"] == load_config(f"{workspace}/a design.yaml").dump()
    assert run_file["command"].split()[0] == "heddle"
    assert run_file["versions"].keys() == {"heddle", "torch", "numpy", "python"}
    assert run_file["runtime"]["device"] == "cpu"
    assert run_file["data_report"]["sources"][0]["name"] == "text"
    log = read_log(workspace / "run")
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert all(not line["skipped"] and line["loss"] > 0 and line["gradient_norm"] > 0 for line in log)
    assert checkpoint_steps(workspace / "run") == [5]


def test_evaluations_and_checkpoints_on_the_way(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, *train(workspace, tmp_path, "--steps", "5", "--evaluate-every", "2", "--save-every", "2"))
    log = read_log(tmp_path)
    assert [line["step"] for line in log if "validation_bits_per_byte" in line] == [2, 4, 5]
    assert checkpoint_steps(tmp_path) == [4, 5]


def test_a_short_training_is_evaluated_on_no_more_than_it_trained_on(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], evaluated: list[int]
) -> None:
    command = train(workspace, tmp_path, "--steps", "2")
    call(capsys, *command)
    call(capsys, *command)
    assert evaluated == [2 * 4 * 16] * 2
    saved = read_json_file(tmp_path / RUN_FILE)
    write_json_file(tmp_path / RUN_FILE, {name: value for name, value in saved.items() if name != "final_tokens"})
    call(capsys, *command)
    assert evaluated[2:] == [loop.FINAL_EVALUATION_TOKENS]  # a run of an earlier version keeps its number


def test_options_that_do_not_change_the_result(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = []
    for name, more in (("a", ()), ("b", ("--gradient-accumulation-steps", "4")), ("c", ("--checkpoint-activations",))):
        out, _ = call(capsys, *train(workspace, tmp_path / name, "--steps", "2", "--json", *more))
        outs.append(json.loads(out)["bits_per_byte"])
    assert outs == pytest.approx([outs[0]] * 3, rel=1e-5)


def test_generate_streams_one_prompt(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load(workspace / "run")
    assert tokenizer is not None
    text = generate(model, ["The "], tokenizer, max_new_tokens=12)[0]
    out, err = call(
        capsys, "generate", workspace / "run", "--prompt", "The ", "--max-new-tokens", "12", "--device", "cpu"
    )
    assert (out, err) == (text + "\n", "")
    sampled = ("--temperature", "1", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "12", "--device", "cpu")
    first, _ = call(capsys, "generate", workspace / "run", *sampled)
    assert call(capsys, "generate", workspace / "run", *sampled)[0] == first


def test_generate_with_weights_of_eight_bits(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = ("width=32", "layers.*.feedforward.hidden=64", "--steps", "1", "--quiet")
    call(capsys, *train(workspace, tmp_path / "run", *wide))
    model, tokenizer = load(tmp_path / "run")
    assert tokenizer is not None
    quantized = quantize_weights(model, 8)
    text = generate(quantized.model, ["The "], tokenizer, max_new_tokens=12)[0]
    command = ("generate", tmp_path / "run", "--prompt", "The ", "--max-new-tokens", "12", "--device", "cpu")
    out, err = call(capsys, *command, "--weights", "int8")
    assert out == text + "\n"
    assert err == f"--weights int8: {quantized.quantized:,} of {quantized.weights:,} weights have 8 bits\n"


def test_generate_answers_several_prompts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "The", "--prompt", "機", "--max-new-tokens", "8", "--device", "cpu"]
    out, _ = call(capsys, "generate", workspace / "run", *prompts)
    assert re.findall(r"^--- \d of 2: .*$", out, re.MULTILINE) == ["--- 1 of 2: 'The'", "--- 2 of 2: '機'"]
    answers = json.loads(call(capsys, "generate", workspace / "run", *prompts, "--json")[0])
    assert [answer["prompt"] for answer in answers] == ["The", "機"]
    assert all(answer["text"] in out for answer in answers)


def test_generate_with_a_draft_and_with_beams(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", workspace / "run", "--prompt", "The ", "--max-new-tokens", "12", "--device", "cpu")
    out, err = call(capsys, *command, "--draft-model", workspace / "run", "--speculative-tokens", "3")
    assert out == call(capsys, *command)[0]
    assert re.match(r"draft: \d+ of \d+ proposed tokens accepted in \d rounds; \d+ tokens", err)
    assert err.count("\n") == 1
    assert call(capsys, *command, "--draft-model", workspace / "run", "--quiet") == (out, "")
    model, tokenizer = load(workspace / "run")
    assert tokenizer is not None
    text = generate(model, ["The "], tokenizer, max_new_tokens=12, num_beams=3)[0]
    assert call(capsys, *command, "--num-beams", "3") == (text + "\n", "")


def test_generate_reads_a_prompt_from_a_pipe(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-new-tokens", "8", "--device", "cpu")
    expected, _ = call(capsys, "generate", workspace / "run", "--prompt", "織機 and", *options)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("織機 and".encode())))
    assert call(capsys, "generate", workspace / "run", "--prompt", "-", *options)[0] == expected


def test_a_custom_part(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "halved.py"
    part.write_text(
        '"""A norm that halves."""\n'
        "from torch import nn\n"
        "from heddle.parts.norms import NormConfig\n\n"
        "class Halved(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x / 2\n\n"
        "class HalvedConfig(NormConfig):\n"
        "    def build(self, width):\n"
        "        return Halved()\n"
    )
    out, _ = call(capsys, "show", f"{workspace}/a design.yaml", "norm.kind=halved", "--part", part, "--device", "cpu")
    assert "parameters" in out
    forget_parts()


def test_training_from_a_run(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(30)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))
    arguments = [
        "--from",
        f"{workspace}/run",
        "--steps",
        "3",
        "--data",
        f"chat:{tmp_path}/talks.jsonl",
        "--sequence-length",
        "48",
    ]
    more = ["--batch-size", "4", "--device", "cpu"]
    out, err = call(capsys, "train", *arguments, *more, "--out", tmp_path / "chat")
    assert re.fullmatch(r".*chat: [\d.]+ bits per byte of the assistant's text in held-out .* after 3 steps\n", out)
    assert "assistant tokens" in err
    out, _ = call(
        capsys, "train", "residual.dropout=0.1", *arguments, *more, "--lora", "2", "--out", tmp_path / "l", "--json"
    )
    assert set(json.loads(out)) == {"run", "steps", "skipped_steps", "bits_per_byte"}
    run_file = json.loads((tmp_path / "l" / RUN_FILE).read_text())
    assert run_file["lora"] == {"rank": 2, "targets": ["layers.*.mixer.q", "layers.*.mixer.v"]}
    assert run_file["design"]["residual"]["dropout"] == 0.1
    assert load(tmp_path / "l")[0].config.residual != load(workspace / "run")[0].config.residual
    call(capsys, "generate", tmp_path / "l", "--max-new-tokens", "2", "--device", "cpu")


def test_an_extra_is_installed_from_where_heddle_lies(tmp_path: Path) -> None:
    assert pip_install("hf", tmp_path) == "pip install 'heddle-lm[hf]'"
    (tmp_path / "src" / "heddle").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert pip_install("hf", tmp_path) == f"pip install -e '{tmp_path}[hf]'"
