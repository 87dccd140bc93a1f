"""Files and options that no program wrote: nested, huge, negative or endless. Each is refused in one sentence."""

import base64
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import MAX_LIST, MAX_SENTENCE, run_command
from heddle.model.load_config import MAX_FILE_BYTES, MAX_YAML_BYTES
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import FolderContents, read_folder, write_folder

SIZE = ["--sequence-length", "16", "--batch-size", "4", "--steps", "2", "--device", "cpu"]
DIGITS = "9" * 4000
NESTED = "[" * 100_000 + "]" * 100_000
NESTED_TABLES = '{"a":' * 100_000 + "1" + "}" * 100_000
KEYS = json.dumps({f"k{index}": 0 for index in range(250_000)})
PROGRESS = '{"step": %s, "skipped_steps": 0, "consecutive_skips": 0}'


@pytest.fixture(scope="module")
def workspace(workspace: Path) -> Path:
    """With an export as others write it, without hashes."""
    (workspace / "exported" / "manifest.json").unlink()
    return workspace


def train(workspace: Path, out: Path, *design: str) -> list[str]:
    source = design or (f"{workspace}/good.yaml",)
    return ["train", *source, "--data", f"{workspace}/text", "--out", f"{out}", "--quiet", *SIZE]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one sentence that a command line is refused with."""
    capsys.readouterr()
    assert run_command(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("heddle: ")
    paths = sum(len(word) for word in lines[0].split(" ") if "/" in word)
    assert len(lines[0]) - paths < (MAX_LIST if "choices: " in lines[0] else MAX_SENTENCE) + 20
    return lines[0].removeprefix("heddle: ")


DESIGNS = {
    "nested.json": (NESTED, r"JSON .*nest"),
    "tables.json": (NESTED_TABLES, r"JSON .*nest"),
    "width.json": (f'{{"width": {NESTED}}}', "nest"),
    "nested.yaml": (NESTED, "YAML"),
    "tables.yaml": ("{a: " * 100_000, "YAML"),
    "blocks.yaml": ("- " * 100_000, "YAML"),
    "nested.toml": (f"a = {NESTED[:20_000]}", r"TOML .*nest"),
    "dots.toml": (f"a{'.a' * 3000} = 1", "nest"),
    "dots-long.toml": (f"a{'.a' * 100_000} = 1", "65536 bytes"),
    "tables.toml": ("".join(f"[a{index}]\n" for index in range(250_000)), "65536 bytes"),
    "keys.json": (KEYS[:-1] + "}", "'k0'|4194304 bytes"),
    "keys.yaml": ("".join(f"k{index}: 0\n" for index in range(90_000)), "20000 keys"),
    "words.yaml": ("a\n" * 600_000, "1048576 bytes"),
    "digits.json": (f'{{"width": {DIGITS}}}', "width: .*…"),
    "digits.yaml": (f"width: {DIGITS}", "width: .*…"),
    "digits.toml": (f"width = {DIGITS}", "width: .*…"),
    "hex.yaml": (f"width: 0x{'f' * 4000}", "width: .*0xffff.*…"),
    "hex.toml": (f"width = 0x{'f' * 4000}", "width: .*0xffff.*…"),
    "hex-key.yaml": (f"? 0x{'f' * 4000}\n: 1", "4300 digits"),
    "many.json": (f'{{"width": {DIGITS * 2}}}', "4300 digits"),
    "many.toml": (f"width = {DIGITS * 2}", "4300 digits"),
    "long-key.json": (json.dumps({"k" * 4_000_000: 1}), "'kkk.*…; choices: "),
    "long-kind.json": (
        json.dumps({"width": 16, "layers": [{"mixer": {"kind": "k" * 3_000_000}}]}),
        r"layers\[0\].mixer: .*'kkk.*…; choices: ",
    ),
    "time.yaml": ("width: !!timestamp x", r"line 1: .*tag"),
    "truth.yaml": ("width: !!bool x", r"line 1: .*tag"),
    "code.yaml": ("!!python/object:os.system x", r"line 1: .*tag"),
    "set.yaml": ("!!set {a, b}", r"line 1: .*tag"),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = DESIGNS[name]
    (tmp_path / name).write_text(text)
    assert re.search(words, refusal(["show", f"{tmp_path}/{name}", "--device", "cpu"], capsys))


def test_the_largest_designs_that_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Limits of size stand in for limits of time: the slowest text of that size is parsed in about a second."""
    for suffix, limit in {**MAX_FILE_BYTES, ".yaml": MAX_YAML_BYTES}.items():
        path = tmp_path / f"largest{suffix}"
        path.write_text(" " * limit)
        assert "is larger than" not in refusal(["show", str(path)], capsys)
        path.write_text(" " * (limit + 1))
        assert f"{limit} bytes" in refusal(["show", str(path)], capsys)


OVERRIDES = [
    f"width={DIGITS}",
    f"width=0x{'f' * 4000}",
    f"width={NESTED}",
    f"layers.{DIGITS * 2}.repeat=1",
    f"{'a.' * 10_000}a=1",
    "width=" + "{a: " * 1000,
    "x" * 100_000 + "=1",
]


@pytest.mark.parametrize("override", OVERRIDES, ids=[override[:20] for override in OVERRIDES])
def test_an_override_is_refused(override: str, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(["show", f"{workspace}/good.yaml", override, "--device", "cpu"], capsys)


NUMBERS = {
    "--steps": "steps .*: must be at most 10^12",
    "--tokens": "steps .*: must be at most 10^12",
    "--batch-size": "batch_size .*: must be at most 10^12",
    "--sequence-length": "sequence_length .*: must be at most 10^12",
    "--save-every": "save_every .*: must be at most 10^12",
    "--threads": "threads .*: must be at most 4096",
    "--seed": "seed .*: must be at least 0 and below 2^62",
}


@pytest.mark.parametrize("option", NUMBERS)
def test_a_number_beyond_every_machine_is_refused(
    option: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = train(workspace, tmp_path / "out")
    if option == "--tokens":
        del arguments[arguments.index("--steps") :][:2]
        arguments = [word for word in arguments if word not in ("--steps", "2")]
    for digits in ("1" + "0" * 30, DIGITS):
        sentence = refusal([*arguments, option, digits], capsys)
        assert re.match(NUMBERS[option].replace("^", r"\^"), sentence), sentence[:200]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--context-length", "--batch-size", "--encoder-length"])
def test_a_length_beyond_every_machine_is_refused(
    option: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for digits in (str(2**63), DIGITS):
        assert "must be at most 10^9" in refusal(["show", f"{workspace}/good.yaml", option, digits], capsys)
    huge = ["--context-length", str(10**9), "--batch-size", str(10**9)]
    assert run_command(["show", f"{workspace}/good.yaml", "--device", "cpu", *huge]) in (0, 2)


TEXTS = {
    "nested": NESTED,
    "tables": NESTED_TABLES,
    "keys": KEYS,
    "digits": DIGITS,
    "empty": "",
    "null": "null",
    "list": "[]",
    "NaN": '{"step": NaN}',
    "twice": '{"step": 2, "step": 2}',
}
DOCUMENTS = {
    **{f"training.json {name}": ("training.json", text, "train") for name, text in TEXTS.items()},
    **{
        f"training.json step {step[:9]}": ("training.json", PROGRESS % step, "train")
        for step in ("-5", "1", "3", "2.0", "true", '"2"', "null", DIGITS)
    },
    "training.json skipped": ("training.json", PROGRESS.replace("0", "-1") % 2, "train"),
    "training.json more": ("training.json", PROGRESS.replace("}", ', "more": 1}') % 2, "train"),
    **{f"config.json {name}": ("config.json", text, "generate") for name, text in TEXTS.items() if text != KEYS},
    **{f"tokenizer.json {name}": ("tokenizer.json", text, "generate") for name, text in TEXTS.items() if text != KEYS},
    **{f"boundary {name}": ("boundary_tokens.json", TEXTS[name], "generate") for name in ("nested", "list", "digits")},
    **{f"imported.json {name}": ("imported.json", TEXTS[name], "export") for name in ("nested", "list", "digits")},
}


@pytest.fixture(scope="module")
def checkpoint(workspace: Path) -> FolderContents:
    return read_folder(checkpoint_folder(workspace / "run", 2))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_whose_hash_is_right_is_refused(
    name: str, workspace: Path, checkpoint: FolderContents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from heddle.tokenization.tokenizer import BOUNDARY_TOKENS_FILE

    file, text, command = DOCUMENTS[name]
    file = BOUNDARY_TOKENS_FILE if file == "boundary_tokens.json" else file
    run = tmp_path / "run"
    shutil.copytree(workspace / "run", run)
    folder = checkpoint_folder(run, 2)
    shutil.rmtree(folder)
    tensors = {name: checkpoint.tensors(name) for name in checkpoint.tensor_sets}
    documents = checkpoint.documents | {file: text}
    write_folder(folder, tensors=tensors, documents=documents, kind="training", log=checkpoint.log)
    arguments = {
        "train": train(workspace, run),
        "generate": ["generate", str(folder), "--device", "cpu"],
        "export": ["export", str(folder), f"{tmp_path}/out"],
    }[command]
    log = (run / "log.jsonl").read_bytes()
    sentence = refusal(arguments, capsys)
    assert file in sentence or "tokenizer" in sentence or "unknown field" in sentence
    assert (run / "log.jsonl").read_bytes() == log
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_other_files_of_a_run_are_refused(
    text: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("run.json", "log.jsonl", "checkpoints/step-00000002/manifest.json"):
        run = tmp_path / file[:3]
        shutil.copytree(workspace / "run", run)
        (run / file).write_text(text)
        command = ["generate", str(run), "--device", "cpu"] if file.startswith("check") else train(workspace, run)
        assert file in refusal(command, capsys)
        assert (run / file).read_text() == text


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_downloaded_folder_is_refused(
    file: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("nested", "tables", "digits", "list"):
        folder = tmp_path / name
        shutil.copytree(workspace / "exported", folder)
        if file.endswith("index.json"):
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / file).write_text(TEXTS[name])
        assert file in refusal(["import", str(folder), f"{tmp_path}/out"], capsys)
    assert not (tmp_path / "out").exists()


ANSWER = '{"role": "assistant", "content": "b"}'
LINES = {
    "nested": NESTED,
    "tables": NESTED_TABLES,
    "digits": DIGITS * 2,
    "messages": '{"messages": ' + NESTED + "}",
    "role": '{"messages": [{"role": ' + KEYS + ', "content": "x"}]}',
    "long": '{"messages": [' + ", ".join([ANSWER] * 1001) + "]}",
    "text": '{"text": ' + DIGITS + "}",
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_data_is_refused(
    name: str, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.jsonl").write_text(LINES[name] + "\n")
    for prefix, source in (("chat:", ["--from", f"{workspace}/run"]), ("hf:", [f"{workspace}/good.yaml"])):
        data = ["--data", f"{prefix}{tmp_path}/lines.jsonl", "--out", f"{tmp_path}/out"]
        sentence = refusal(["train", *source, *data, "--quiet", *SIZE], capsys)
        is_chat = prefix == "hf:" and name in ("role", "long")  # conversations, which chat: reads and refuses
        place = 'conversations in "messages"' if is_chat else "(line|record) 1"
        assert re.search(f"lines.jsonl has .* {place}: ", sentence), sentence[:300]


def many_steps(data: dict[str, Any]) -> None:
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 5000}


def panicking(data: dict[str, Any]) -> None:
    data["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "xxxx"}


def doubling(data: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    data["normalizer"] = {"type": "Sequence", "normalizers": [step] * 40}


def prepending(data: dict[str, Any]) -> None:
    data["normalizer"] = {"type": "Prepend", "prepend": "a" * 100_000}


def mapping(data: dict[str, Any]) -> None:
    texts = struct.pack("<I", 1024) + bytes(1024) + b"a" * 5000 + b"\0"
    data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(texts).decode()}


def backtracking(pattern: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, data["pre_tokenizer"]]}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (doubling, "may turn one character into more than 1000"),
        (prepending, "may turn one character into more than 1000"),
        (mapping, "may turn one character into more than 1000"),
        (many_steps, "in more than 2000 steps"),
        (panicking, "cannot encode every text: it breaks the library"),
        (backtracking("(a+)+b"), "cannot encode every text: "),
        (backtracking("(?:a*a*a*b)|a"), "cannot encode every text: "),
        (backtracking("q[^q]*q[^q]*r|(?:zz*)*y"), "cannot encode every text: "),
        (backtracking("((xy)*x*)*z"), "cannot encode every text: "),
    ],
)
def test_a_tokenizer_that_would_not_end_or_breaks_is_refused(  # the words of a panic stay in the trial's process
    change: Callable[[dict[str, Any]], None],
    words: str,
    workspace: Path,
    checkpoint: FolderContents,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = json.loads(checkpoint.documents["tokenizer.json"])
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    arguments = [*train(workspace, tmp_path / "out"), "--tokenizer", f"{tmp_path}/tokenizer.json"]
    assert re.search(words, refusal(arguments, capfd))


def test_a_comparison_with_a_tokenizer_that_cannot_be_read_leaves_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    options = ["--data", f"{workspace}/text", "--tokenizer", f"{tmp_path}/tokenizer.json", "--out", f"{tmp_path}/out"]
    refusal(["compare", f"{workspace}/good.yaml", *options], capsys)
    assert not (tmp_path / "out").exists()
