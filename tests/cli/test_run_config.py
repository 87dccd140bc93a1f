"""A training as a file of options: it overrides defaults, is overridden, printed and saved; `heddle.train` reads it."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml

import heddle
from heddle.cli.main import run_command
from heddle.errors import ConfigError
from tests import small


@pytest.fixture
def file(tmp_path: Path) -> Path:
    options = {
        "design": small.design(),
        "data": [str(small.folder(tmp_path / "texts"))],
        "vocab_size": 300,
        "steps": 3,
        "batch_size": 2,
        "sequence_length": 16,
        "threads": 1,
        "out": str(tmp_path / "run"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return path


def test_a_file_of_options_is_overridden_and_printed_whole(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "--config", str(file), "--steps", "7", "--print-config"]) == 0
    options = yaml.safe_load(printed := capsys.readouterr().out)
    assert options["design"] == small.design()
    assert (options["steps"], options["batch_size"], options["lr"], options["quiet"]) == (7, 2, 3e-3, False)
    file.write_text(printed, encoding="utf-8")
    assert run_command(["train", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_python_trains_as_the_command_does(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "--config", str(file), "--json"]) == 0
    command = json.loads(capsys.readouterr().out)
    saved = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert saved["options"]["steps"] == 3
    for number, config in enumerate((file, tmp_path / "run")):  # a run's folder is such a file too
        run = heddle.train(config=config, out=tmp_path / f"again{number}", json=False)
        assert run.folder == tmp_path / f"again{number}"
        assert run.report == command | {"run": str(run.folder)}
        assert repr(run) == f"TrainedRun(folder={run.folder!r})"
    loaded, tokenizer = heddle.load(run.folder)
    assert tokenizer is not None
    text = heddle.generate(loaded, "def ", tokenizer, max_new_tokens=5)
    assert run.generate("def ", max_new_tokens=5) == text
    assert run.generate(["def ", "a"], max_new_tokens=5)[0] == text
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, run.model.state_dict()[name])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("setps: 3", "setps:"),
        ("steps: 1.5", "--steps 1.5:"),
        ("steps: [1, 2]", "steps:"),
        ("steps: true", "steps:"),
        ("- steps", "not a table"),
        ("print_config: true", "print_config: unknown option"),
    ],
)
def test_a_bad_file_is_a_sentence(line: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text(line + "\n", encoding="utf-8")
    assert run_command(["train", "preset:gqa-tiny", "--config", str(tmp_path / "bad.yaml"), "--print-config"]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_file_of_options_is_small_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(5 * 2**30)
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, sentence in (("large.yaml", "has more than"), ("pipe.yaml", "is"), ("none.yaml", "does not exist")):
        assert run_command(["train", "--config", f"{tmp_path / name}"]) == 2
        assert f"{tmp_path / name}: {sentence}" in capsys.readouterr().err


def test_python_refuses_what_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batchsize:.*'batch_size'"):
        heddle.train("preset:gqa-tiny", batchsize=3)
    with pytest.raises(ConfigError, match="nproc:"):
        heddle.train("preset:gqa-tiny", nproc=2)
    ranks = tmp_path / "ranks.yaml"
    ranks.write_text("design: preset:gqa-tiny\nnproc: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="nproc: 2 ranks"):
        heddle.train(config=ranks)
    with pytest.raises(ConfigError, match="--steps"):
        heddle.train("preset:gqa-tiny", steps=1.5)


@pytest.mark.parametrize(("text", "count"), [("100k", 100_000), ("1.5M", 1_500_000), ("2e6", 2_000_000), ("70", 70)])
def test_numbers_of_tokens_have_units(text: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "preset:gqa-tiny", "--tokens", text, "--print-config"]) == 0
    assert f"\ntokens: {count}\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["100q", "1.5", "k", "nan", "inf", "1e400"])
def test_a_number_of_tokens_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "preset:gqa-tiny", "--tokens", text, "--print-config"]) == 2
    assert f"--tokens {text}:" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [("2k", 2000), ("1.5M", 1_500_000), ("7", 7)])
def test_other_whole_numbers_have_the_same_units(text: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "preset:gqa-tiny", "--steps", text, "--print-config"]) == 0
    assert f"\nsteps: {count}\n" in capsys.readouterr().out
    assert run_command(["train", "preset:gqa-tiny", "--steps", "1.5", "--print-config"]) == 2
    assert run_command(["train", "preset:gqa-tiny", "--steps", "k", "--print-config"]) == 2


def test_a_printed_config_works_in_another_folder(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small.design_file(tmp_path / "mine.yaml")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["train", "mine.yaml", "--data", "texts@2", "--data", "stdlib", "--steps", "1", "--print-config"]
    assert run_command(words) == 0
    (tmp_path / "other" / "run.yaml").write_text(printed := capsys.readouterr().out, encoding="utf-8")
    options = yaml.safe_load(printed)
    assert options["design"] == f"{tmp_path}/mine.yaml"
    assert options["data"] == [f"{tmp_path}/texts@2", "stdlib"]
    assert options["out"] == "runs/train", "what is written goes where the command runs"
    monkeypatch.chdir(tmp_path / "other")
    words = ["train", "--config", "run.yaml", "--batch-size", "2", "--sequence-length", "16", "--quiet"]
    assert run_command([*words, "--vocab-size", "300", "--threads", "1", "--data", options["data"][0]]) == 0
    moved = (tmp_path / "other" / "runs" / "train").rename(tmp_path / "moved")
    log = (moved / "log.jsonl").read_bytes()
    (moved / "final.json").unlink()
    monkeypatch.chdir(moved)
    assert run_command(["train", "--config", str(moved)]) == 0, "a run continues where it was moved to"
    assert (moved / "final.json").is_file()
    assert not (moved / "runs").exists()
    assert (moved / "log.jsonl").read_bytes() == log
