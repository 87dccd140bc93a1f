"""What a folder says of its model: the length that it was trained or made for, and the dtype of its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.cli.main import run_command
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.imported_checkpoint import context_length
from heddle.exchange.load import load as load_transformers
from heddle.lab.explore.page import explorer_page
from heddle.model.load_config import load_config
from heddle.serving import server
from heddle.storage.model import save, stored_dtype, trained_length
from tests import small
from tests.html_page import Page

LENGTH = 16  # of the workspace's run


def test_a_run_and_its_checkpoints_know_the_length_of_their_training(workspace: Path, tmp_path: Path) -> None:
    run = workspace / "run"
    [checkpoint] = (run / "checkpoints").glob("step-*")
    assert [trained_length(folder) for folder in (run, checkpoint, workspace)] == [LENGTH, LENGTH, None]
    model = heddle.build(small.config())
    model.imported_config = {"model_type": "llama", "max_position_embeddings": 77}
    save(model, tmp_path / "imported")
    assert [context_length(folder) for folder in (run, tmp_path / "imported", "preset:gqa-tiny")] == [LENGTH, 77, None]


def test_a_server_says_the_length_of_the_training(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "run_server", lambda application, listener: None)
    assert run_command(["serve", str(workspace / "run"), "--port", "0", "--device", "cpu"]) == 0
    assert f"trained on sequences of {LENGTH}" in capsys.readouterr().err


def first_length(page: str) -> int:
    tokens: int = json.loads(Page(page).scripts[0])["start"]["design"]["tokens"]
    return tokens


def test_the_explorer_opens_at_the_length_of_the_model(workspace: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert run_command(["explore", str(workspace / "run"), "--out", str(file)]) == 0
    assert first_length(file.read_text(encoding="utf-8")) == LENGTH
    config = load_config("preset:gqa-tiny", ["embedding.position={kind: learned, length: 9000}", "vocab_size=99"])
    assert first_length(explorer_page(config=config)) == 9000
    assert first_length(explorer_page(config=load_config("preset:gqa-tiny", ["vocab_size=99"]))) == 4096


def test_show_counts_bytes_in_the_dtype_of_the_weights(workspace: Path, tmp_path: Path) -> None:
    model = heddle.build(small.config(), dtype=torch.bfloat16)
    save(model, tmp_path / "half")
    assert stored_dtype(workspace / "run") == torch.float32
    assert stored_dtype(workspace) is None

    def shown(**options: Any) -> tuple[str, int]:
        facts = heddle.show(str(tmp_path / "half"), context_length=[8], **options).facts
        return facts["dtype"], facts["weight_bytes"] // facts["parameters"]

    assert shown() == ("bfloat16", 2)
    assert shown(precision="fp32") == ("float32", 4)


def test_each_loader_names_the_other(workspace: Path, tmp_path: Path) -> None:
    [checkpoint] = (workspace / "run" / "checkpoints").glob("step-*")
    for folder in (workspace / "run", checkpoint):
        with pytest.raises((CheckpointError, ConfigError), match=r"heddle\.load"):
            load_transformers(folder)
    (workspace / "exported" / "manifest.json").rename(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"heddle\.exchange\.transformers\.load"):
        heddle.load(workspace / "exported")
    (tmp_path / "manifest.json").rename(workspace / "exported" / "manifest.json")
    with pytest.raises(CheckpointError, match=r"heddle\.exchange\.transformers\.load"):
        heddle.load(workspace / "exported")
