"""What each verb prints, for people and for programs, and where."""

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
from heddle.cli.main import VERBS, run
from heddle.generation.generate import generate
from heddle.model.load_config import load_config
from heddle.storage.checkpoints import steps
from heddle.storage.model import load
from heddle.storage.run_log import RUN, read_log
from tests import small
from tests.small import forget_parts

SIZE = ["--context", "16", "--batch-size", "4", "--device", "cpu"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str]:
    """Standard output and error of a command that succeeds."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A design, a text, and a run that trained on it."""
    root = tmp_path_factory.mktemp("place")
    small.folder(root / "text")
    small.design_file(root / "a design.yaml")
    assert run(train(root, root / "run", "--steps", "5", "--quiet")) == 0
    return root


def train(place: Path, out: Path, *more: str) -> list[str]:
    return ["train", f"{place}/a design.yaml", "--data", f"{place}/text", "--out", str(out), *SIZE, *more]


def test_help_lists_the_verbs_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "--help")
    listed = re.findall(r"^  (\w+)  ", out.partition("Commands:")[2], re.MULTILINE)
    named = [verb.__name__.rstrip("_") for verb in VERBS]
    assert listed == named == ["show", "check", "train", "compare", "generate", "inspect", "import", "export"]
    assert call(capsys)[0] == out
    assert call(capsys, "--version")[0] == f"heddle {__version__}\n"


@pytest.mark.parametrize("verb", [verb.__name__.rstrip("_") for verb in VERBS])
def test_every_verb_explains_each_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, verb, "--help")
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)(?: [A-Z=]+)?  +(\S?)", out, re.MULTILINE)
    assert len(options) >= 2
    assert all(words for _, words in options), out
    assert "<" not in out.partition("Options:")[2]


def test_help_and_mistakes_import_nothing_heavy() -> None:
    code = (
        "import sys; from heddle.cli.main import run; run(['--help']); run(['train', '--help']); run(['frob']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'plotly', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_inspect(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "page.html"
    out, err = call(capsys, "inspect", place / "run", "--text", "The weaver <lifts>", "--out", page, "--device", "cpu")
    assert (out, err) == (f"{page}\n", "")
    text = page.read_text(encoding="utf-8")
    assert "heads of run look at" in text
    assert "&lt;" in text
    assert "lifts>" not in text
    assert run(["inspect", f"{place}/run", "--text", "x", "--out", f"{place}/text", "--device", "cpu"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_show(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, "show", f"{place}/a design.yaml", "--device", "cpu", "layers.0.repeat=3")
    assert err == ""
    assert out.splitlines()[0] == f"{place}/a design.yaml".replace("\n", "")
    assert "  3 ×  attention heads=2 kv_heads=1" in out
    assert "kernels in training" in out
    assert "kernels in decode" in out
    wide = [line for line in out.splitlines()[1:] if len(line) > 80 and not line.startswith("      not ")]
    assert wide == []


def test_show_of_presets_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gqa-medium", "local_global-small"):
        out, _ = call(capsys, "show", f"preset:{name}", "--device", "cpu")
        assert [line for line in out.splitlines() if len(line) > 80 and not line.startswith("      not ")] == []


def test_show_as_json(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{place}/a design.yaml"
    facts = json.loads(call(capsys, "show", path, "--json", "--context", "64", "--batch", "3", "--device", "cpu")[0])
    config = load_config(path)
    assert load_config(facts["design"]) == config
    assert facts["parameters"] == sum(parameter.numel() for parameter in load(place / "run")[0].parameters())
    assert [one["context"] for one in facts["contexts"]] == [64]
    assert facts["batch"] == 3
    assert facts["contexts"][0]["state_bytes"] > 0
    assert {kernel["operation"] for kernel in facts["kernels"]["decode"]} >= {"attention", "linear"}
    forced = json.loads(call(capsys, "show", path, "--json", "--kernel", "attention=reference", "--device", "cpu")[0])
    assert {k["form"] for k in forced["kernels"]["decode"] if k["operation"] == "attention"} == {"reference"}


def test_show_of_a_bidirectional_design_keeps_no_state(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "show", f"{place}/a design.yaml", "layers.0.mixer.causal=false", "--device", "cpu")
    assert "kernels in decode" not in out


def test_the_schema_is_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(call(capsys, "show", "--schema")[0])
    jsonschema.Draft202012Validator.check_schema(made)
    jsonschema.Draft202012Validator(made).validate(small.design())


def test_check(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(call(capsys, "check", f"{place}/a design.yaml", "--json")[0])
    assert len(results) >= 6
    assert all(result["passed"] for result in results)


def test_train_tells_people(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *train(place, tmp_path / "run", "--steps", "3"))
    lines = out.splitlines()
    assert re.fullmatch(rf"{tmp_path}/run: \d\.\d{{4}} bits per byte on held-out text after 3 steps", lines[0])
    assert lines[1] == "a sample:"
    assert "corpus text, hash " in err
    assert "\x1b" not in out + err


def test_train_tells_programs(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = call(capsys, *train(place, tmp_path / "run", "--tokens", "200", "--quiet", "--json"))
    assert err == ""
    result = json.loads(out)
    assert result["steps"] == 3  # whole steps of 64 tokens
    assert result["steps_not_taken"] == 0
    assert 0 < result["bits_per_byte"] < 9
    assert result["run"] == str(tmp_path / "run")
    again, _ = call(capsys, *train(place, tmp_path / "run", "--tokens", "200", "--quiet", "--json"))
    assert again == out


def test_train_on_a_recall_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "preset:mha-tiny", "width=16", "layers.0.repeat=1", "--data", "recall:parity,length=8"]
    asked += ["--steps", "3", "--device", "cpu", "--threads", "1", "--out", str(tmp_path / "run"), "--quiet"]
    out, err = call(capsys, *asked)
    assert re.fullmatch(r".*: \d+\.\d% right answers on held-out rows \(blindly 50\.0%\) after 3 steps\n", out)
    assert err == ""
    result = json.loads(call(capsys, *asked, "--json")[0])
    assert result.keys() == {"run", "steps", "steps_not_taken", "accuracy", "chance"}
    made = json.loads((tmp_path / "run" / RUN).read_text())
    assert made["design"]["vocab_size"] == 2
    assert made["settings"]["context"] == 8
    assert made["data"]["options"] == {"length": 8}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--context", "9"], "--context 9: recall:mqar has rows of 36 tokens; say length=9 in --data"),
        (["--vocab-size", "300"], "--vocab-size 300: recall:mqar has a vocabulary of its own; leave --vocab-size out"),
        (["--tokenizer", "t.json"], "--tokenizer t.json: recall:mqar has a vocabulary of its own; leave --tokenizer"),
        (["--data", "stdlib"], "data recall:mqar is a task, not text: give it to train as the only --data"),
        (["vocab_size=48"], "recall:mqar,pairs=12,keys=24,length=36 has 49 tokens, but vocab_size is 48: set"),
    ],
)
def test_what_does_not_go_with_a_recall_task(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train", "preset:mha-tiny", "--data", "recall:mqar", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert run([*asked, *more]) == 2
    err = capsys.readouterr().err
    assert f"heddle: {says}" in err
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_made_it(place: Path) -> None:
    made: dict[str, Any] = json.loads((place / "run" / RUN).read_text())
    assert made["settings"]["steps"] == 5
    assert made["design"] == load_config(f"{place}/a design.yaml").dump()
    assert made["command"].split()[0] == "heddle"
    assert made["versions"].keys() == {"heddle", "torch", "numpy", "python"}
    assert made["runtime"]["device"] == "cpu"
    assert made["data_report"]["sources"][0]["name"] == "text"
    log = read_log(place / "run")
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert all(line["taken"] and line["loss"] > 0 and line["gradient_norm"] > 0 for line in log)
    assert steps(place / "run") == [5]


def test_evaluations_and_checkpoints_on_the_way(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, *train(place, tmp_path, "--steps", "5", "--evaluate-every", "2", "--save-every", "2"))
    log = read_log(tmp_path)
    assert [line["step"] for line in log if "validation_bits_per_byte" in line] == [2, 4, 5]
    assert steps(tmp_path) == [4, 5]


def test_options_that_do_not_change_the_result(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = []
    for name, more in (("a", ()), ("b", ("--accumulate", "4")), ("c", ("--checkpoint-activations",))):
        out, _ = call(capsys, *train(place, tmp_path / name, "--steps", "2", "--json", *more))
        outs.append(json.loads(out)["bits_per_byte"])
    assert outs == pytest.approx([outs[0]] * 3, rel=1e-5)


def test_generate_streams_one_prompt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load(place / "run")
    assert tokenizer is not None
    text = generate(model, ["The "], tokenizer, max_new_tokens=12)[0]
    out, err = call(capsys, "generate", place / "run", "--prompt", "The ", "--max-new-tokens", "12", "--device", "cpu")
    assert (out, err) == (text + "\n", "")
    sampled = ("--temperature", "1", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "12", "--device", "cpu")
    first, _ = call(capsys, "generate", place / "run", *sampled)
    assert call(capsys, "generate", place / "run", *sampled)[0] == first


def test_generate_answers_several_prompts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "The", "--prompt", "機", "--max-new-tokens", "8", "--device", "cpu"]
    out, _ = call(capsys, "generate", place / "run", *prompts)
    assert re.findall(r"^--- \d of 2: .*$", out, re.MULTILINE) == ["--- 1 of 2: 'The'", "--- 2 of 2: '機'"]
    answers = json.loads(call(capsys, "generate", place / "run", *prompts, "--json")[0])
    assert [answer["prompt"] for answer in answers] == ["The", "機"]
    assert all(answer["text"] in out for answer in answers)


def test_generate_with_a_draft_and_with_beams(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ("generate", place / "run", "--prompt", "The ", "--max-new-tokens", "12", "--device", "cpu")
    out, err = call(capsys, *ask, "--draft", place / "run", "--lookahead", "3")
    assert out == call(capsys, *ask)[0]
    assert re.match(r"draft: \d+ of \d+ guesses kept in \d calls; \d+ tokens", err)
    assert err.count("\n") == 1
    assert call(capsys, *ask, "--draft", place / "run", "--quiet") == (out, "")
    model, tokenizer = load(place / "run")
    assert tokenizer is not None
    text = generate(model, ["The "], tokenizer, max_new_tokens=12, beams=3)[0]
    assert call(capsys, *ask, "--beams", "3") == (text + "\n", "")


def test_generate_reads_a_prompt_from_a_pipe(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--max-new-tokens", "8", "--device", "cpu")
    expected, _ = call(capsys, "generate", place / "run", "--prompt", "織機 and", *options)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("織機 and".encode())))
    assert call(capsys, "generate", place / "run", "--prompt", "-", *options)[0] == expected


def test_a_part_of_ones_own(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    out, _ = call(capsys, "show", f"{place}/a design.yaml", "norm.kind=halved", "--part", part, "--device", "cpu")
    assert "parameters" in out
    forget_parts()


def test_training_goes_on_from_a_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] for n in range(30)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    asked = ["--from", f"{place}/run", "--steps", "3", "--data", f"chat:{tmp_path}/talks.jsonl", "--context", "48"]
    more = ["--batch-size", "4", "--device", "cpu"]
    out, err = call(capsys, "train", *asked, *more, "--out", tmp_path / "chat")
    assert re.fullmatch(r".*chat: [\d.]+ bits per byte of the assistant's text in held-out .* after 3 steps\n", out)
    assert "are the assistant's" in err
    out, _ = call(
        capsys, "train", "residual.dropout=0.1", *asked, *more, "--lora", "2", "--out", tmp_path / "l", "--json"
    )
    assert set(json.loads(out)) == {"run", "steps", "steps_not_taken", "bits_per_byte"}
    run_of = json.loads((tmp_path / "l" / RUN).read_text())
    assert run_of["lora"] == {"rank": 2, "targets": ["layers.*.mixer.q", "layers.*.mixer.v"]}
    assert run_of["design"]["residual"]["dropout"] == 0.1
    assert load(tmp_path / "l")[0].config.residual != load(place / "run")[0].config.residual
    call(capsys, "generate", tmp_path / "l", "--max-new-tokens", "2", "--device", "cpu")
