"""Models as folders: every bit comes back, and what does not fit is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.conversion.convert import open_source
from heddle.conversion.weights import build_model
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.imported_checkpoint import open_checkpoint
from heddle.laws.harness import forward_no_grad
from heddle.model.decoder import Decoder, build
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.model import CONFIG_FILE, WEIGHTS_FILE, load, model_documents, model_tensors, save
from heddle.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from heddle.training.loop import train
from tests import small
from tests.cases import case, each_part


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.head(forward_no_grad(model, torch.arange(24).view(2, 12)))


@pytest.mark.parametrize("name", each_part())
def test_every_bit_comes_back(name: str, tmp_path: Path) -> None:
    model = build(case(name), seed=5).eval()
    save(model, tmp_path / "model")
    back, tokenizer = load(tmp_path / "model")
    assert tokenizer is None
    assert back.config == model.config
    assert not back.training
    assert {n: p.shape for n, p in back.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_tied_and_is_written_once(tied: bool, tmp_path: Path) -> None:
    model = build(small.config(small.design(head={"tied": tied})))
    save(model, tmp_path / "model")
    assert ("head.weight" in read_folder(tmp_path / "model").tensors(WEIGHTS_FILE)) is not tied
    back, _ = load(tmp_path / "model")
    assert (back.head.weight is back.embed.weight) is tied


@pytest.mark.parametrize("load_dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(load_dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(small.config(), dtype=load_dtype)
    save(model, tmp_path / "model")
    assert {p.dtype for p in load(tmp_path / "model")[0].parameters()} == {load_dtype}
    narrow, _ = load(tmp_path / "model", dtype=torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("part", ["embed", "layers.0.mixer", "layers.0.feedforward.router", "final_norm"])
def test_matrices_of_two_dtypes_need_one(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python is told where a model cannot be run as it is, and a conversion reads it in the wider dtype there."""
    model, folder, tokens = build(case("moe"), dtype=torch.bfloat16), tmp_path / "model", torch.tensor([[1, 2]])
    model.get_submodule(part).to(torch.float32)
    save(model, folder)
    expected = forward_no_grad(load(folder, dtype=torch.float32)[0], tokens)  # as the warning says
    open_checkpoint(folder)  # an export keeps them
    assert not capsys.readouterr().err
    kept, _ = load(folder)
    warned = "dtype=torch.float32" in capsys.readouterr().err
    assert warned is (part in ("embed", "layers.0.mixer"))
    converted = build_model(open_source(folder).weights)
    if warned:
        with pytest.raises(RuntimeError, match="dtype"):
            forward_no_grad(kept, tokens)
        assert torch.equal(forward_no_grad(converted, tokens), expected)
    else:
        assert torch.equal(forward_no_grad(converted, tokens), forward_no_grad(kept, tokens))


def test_the_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([small.text(2000)], small.VOCABULARY)
    save(build(small.config()), tmp_path / "model", tokenizer)
    _, back = load(tmp_path / "model")
    assert back is not None
    assert back.hash == tokenizer.hash
    assert back.encode("綜絖 and thread") == tokenizer.encode("綜絖 and thread")


def test_saving_again_replaces_whole_and_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    first, second = (build(small.config(), seed=seed) for seed in (1, 2))
    save(first, tmp_path / "model")
    save(second, tmp_path / "model")
    assert torch.equal(logits(load(tmp_path / "model")[0]), logits(second.eval()))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="did not write"):
        save(first, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="cannot be created as a folder"):
        save(first, tmp_path / "mine" / "letter.txt" / "model")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_run_gives_its_newest_checkpoint_that_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = small.corpus(tmp_path / "text")
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="run"):
        load(run)
    train(small.job(texts, run, steps=4, save_every=2))
    newest, tokenizer = load(run)
    assert tokenizer is not None
    assert torch.equal(logits(newest), logits(load(checkpoint_folder(run, 4))[0]))
    (checkpoint_folder(run, 4) / WEIGHTS_FILE).write_bytes(b"")
    capsys.readouterr()
    older, _ = load(run)
    assert str(checkpoint_folder(run, 4)) in capsys.readouterr().err
    assert torch.equal(logits(older), logits(load(checkpoint_folder(run, 2))[0]))
    assert not torch.equal(logits(older), logits(newest))
    (checkpoint_folder(run, 2) / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=WEIGHTS_FILE):
        load(run)


def written(folder: Path, tensors: dict[str, Tensor] | None = None, design: Any = None) -> Path:
    """A folder with a valid manifest around contents that need not fit."""
    model = build(small.config())
    documents = model_documents(model, None)
    if design is not None:
        documents[CONFIG_FILE] = design if isinstance(design, str) else json.dumps(design)
    tensors_by_name = model_tensors(model) if tensors is None else tensors
    write_folder(folder, tensors={WEIGHTS_FILE: tensors_by_name}, documents=documents, kind="model")
    return folder


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    tensors_by_name: dict[str, Tensor | None] = {**model_tensors(build(small.config())), **tensors}
    return {name: tensor for name, tensor in tensors_by_name.items() if tensor is not None}


UP = "layers.0.feedforward.up.weight"


@pytest.mark.parametrize(
    ("tensors", "design", "says"),
    [
        ({"embed.weight": None}, None, "'embed.weight'"),
        ({"extra": torch.zeros(2)}, None, "'extra'"),
        ({UP: torch.zeros(24, 17)}, None, "[24, 17]"),
        ({}, small.design(width=32), "has shape"),
        ({}, small.design(head={"tied": False}), "'head.weight'"),
        ({}, "not json", f"{CONFIG_FILE}: is not a table in JSON"),
        ({}, "[]", f"{CONFIG_FILE}: is not a table in JSON"),
        ({}, small.design(width=0), "width:"),
        ({}, small.design() | {"layers": [{"mixer": {"kind": "os.system"}}]}, "unknown kind 'os.system'"),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, Any], design: Any, says: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", changed(**tensors), design)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(folder)
    assert says in str(caught.value)


def test_an_altered_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    save(build(small.config()), tmp_path / "model")
    path = tmp_path / "model" / WEIGHTS_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "model")
    assert WEIGHTS_FILE in str(caught.value)
    assert "layers.0" in str(caught.value)


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    model = build(small.config())
    documents = model_documents(model, None) | {TOKENIZER_FILE: "{}"}
    write_folder(tmp_path / "model", tensors={WEIGHTS_FILE: model_tensors(model)}, documents=documents, kind="model")
    with pytest.raises(Exception, match=r"tokenizer\.json"):
        load(tmp_path / "model")


def test_nothing_in_a_folder_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(build(small.config()), folder)
    (folder / "attention.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    assert isinstance(load(folder)[0], Decoder)
