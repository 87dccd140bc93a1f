"""Trainings that start from a checkpoint: its weights, its tokenizer, its texts, and exactly resumable."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heddle import progress
from heddle.data.corpus import Corpus
from heddle.data.samples import CorpusLoader
from heddle.errors import CheckpointError, ConfigError
from heddle.model.decoder import build
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import read_folder, tensors_sha256
from heddle.storage.model import find_model_folder, load, save
from heddle.storage.run_log import read_log
from heddle.training import checkpoint as snapshot
from heddle.training.evaluation.scores import bits_and_bytes, ratio_of_sums
from heddle.training.init_checkpoint import LoraSettings, open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import evaluate, train
from tests import small
from tests.storage.shared import untimed_log
from tests.training.test_resume import dying

STEPS = 5


@pytest.fixture(scope="module")
def first(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that others go on from."""
    out = tmp_path_factory.mktemp("first")
    train(small.job(texts, out, small.dropping(), 6, learning_rate=1e-2))
    return out


def job(
    texts: Corpus, out: Path, base: Path, *overrides: str, lora: LoraSettings | None = None, **settings: Any
) -> TrainingJob:
    init_checkpoint = open_init_checkpoint(base)
    fresh_job = small.job(texts, out, steps=STEPS, **({"save_every": 1, "evaluate_every": 2} | settings))
    return dataclasses.replace(
        fresh_job, config=init_checkpoint.resolve_config(None, overrides), init_checkpoint=init_checkpoint, lora=lora
    )


STILL = ("layers.0.mixer.dropout=0", "layers.0.feedforward.dropout=0", "embedding.dropout=0", "residual.drop_path=0")


def test_the_first_loss_is_that_of_the_base(texts: Corpus, first: Path, tmp_path: Path) -> None:
    new_job = job(texts, tmp_path, first, *STILL, seed=5)
    result = train(new_job)
    base, _ = load(first)
    drawn = CorpusLoader(texts.train, texts.weights, 16, 4, 5, texts.tokenizer.eod_id).batch(0)
    byte_lengths = np.ones(small.VOCABULARY, dtype=np.int64)  # end tokens count in a loss
    nats = ratio_of_sums(bits_and_bytes(base, [drawn], byte_lengths)) * math.log(2)
    assert read_log(tmp_path)[0]["loss"] == pytest.approx(nats, rel=1e-6)
    assert result.bits_per_byte < ratio_of_sums(evaluate(base, new_job))


def test_weights_texts_and_tokenizer_go_along(texts: Corpus, first: Path, tmp_path: Path) -> None:
    model, tokenizer = load(first)
    save(model.to(torch.bfloat16), tmp_path / "model", tokenizer)
    contents = read_folder(tmp_path / "model")
    init_checkpoint = dataclasses.replace(
        open_init_checkpoint(tmp_path / "model"), documents={"chat_template.jinja": "{{ 1 }}"}
    )
    assert init_checkpoint.tokenizer is not None
    assert init_checkpoint.tokenizer.hash == texts.tokenizer.hash
    started = init_checkpoint.build_model(init_checkpoint.config, "cpu")
    for (name, weight), old in zip(started.named_parameters(), model.parameters(), strict=True):
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight.to(torch.bfloat16), old)
    assert init_checkpoint.weights_sha256 == tensors_sha256(contents)
    new_job = dataclasses.replace(job(texts, tmp_path / "run", first), init_checkpoint=init_checkpoint)
    train(new_job)
    again = open_init_checkpoint(tmp_path / "run")
    assert again.documents == init_checkpoint.documents
    assert find_model_folder(tmp_path / "run") == checkpoint_folder(tmp_path / "run", STEPS)


def ending(out: Path) -> tuple[str, list[dict[str, Any]]]:
    return tensors_sha256(checkpoint_folder(out, STEPS)), untimed_log(out)


def test_a_run_that_saved_nothing_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        find_model_folder(tmp_path)


def test_a_long_evaluation_shows_its_progress(
    texts: Corpus, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    windows = evaluate(load(first)[0], job(texts, tmp_path / "run", first))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluating: ")]
    assert len(windows) > len(lines) > 1
    assert "(100%)" in lines[-1]


@pytest.mark.parametrize("lora", [None, LoraSettings(2)])
@pytest.mark.parametrize("name", ["accumulate_gradients", "save_run"])
def test_an_interrupted_training_ends_with_the_same_bits(
    texts: Corpus, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lora: LoraSettings | None
) -> None:
    train(job(texts, tmp_path / "whole", first, lora=lora))
    for at in range(1, STEPS + 1, 2):
        out = tmp_path / str(at)
        with dying(monkeypatch, name, at, before=True):
            train(job(texts, out, first, lora=lora))
        torch.manual_seed(99)
        train(job(texts, out, first, lora=lora))
        assert ending(out) == ending(tmp_path / "whole"), at


def test_adapters_learn_alone_and_are_merged_in_checkpoints(texts: Corpus, first: Path, tmp_path: Path) -> None:
    new_job = job(
        texts, tmp_path, first, *STILL, lora=LoraSettings(2, ("layers.*.mixer.q", "layers.*.feedforward.down"))
    )
    result = train(new_job)
    base, _ = load(first)
    merged, _ = load(tmp_path)
    old = dict(base.named_parameters())
    changed = {name for name, weight in merged.named_parameters() if not torch.equal(weight, old[name])}
    assert changed == {f"layers.{n}.{path}.weight" for n in (0, 1) for path in ("mixer.q", "feedforward.down")}
    for (bits, size), (like, same) in zip(result.scores, evaluate(merged, new_job), strict=True):
        assert size == same
        assert bits == pytest.approx(like, rel=1e-5)
    assert ratio_of_sums(result.scores) < ratio_of_sums(evaluate(base, new_job))
    with pytest.raises(CheckpointError, match=r"lora\.rank.*2.*3"):
        train(dataclasses.replace(new_job, lora=LoraSettings(3, ("layers.*.mixer.q", "layers.*.feedforward.down"))))
    with pytest.raises(CheckpointError, match=r"lora was .*null"):
        train(dataclasses.replace(new_job, lora=None))


def test_forgetting_the_base_is_caught(
    texts: Corpus, first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(job(texts, tmp_path / "right", first))
    monkeypatch.setattr(TrainingJob, "build_model", lambda self: build(self.config, seed=self.settings.seed))
    train(job(texts, tmp_path / "wrong", first))
    assert read_log(tmp_path / "wrong")[0]["loss"] > read_log(tmp_path / "right")[0]["loss"] + 0.05


def test_another_base_is_refused(texts: Corpus, first: Path, tmp_path: Path) -> None:
    train(job(texts, tmp_path / "run", first))
    other = checkpoint_folder(first, 3)
    with pytest.raises(CheckpointError, match=r"run:.*init_checkpoint.*\"[0-9a-f]{64}\""):
        train(job(texts, tmp_path / "run", other))
    with pytest.raises(CheckpointError, match="init_checkpoint"):
        train(dataclasses.replace(job(texts, tmp_path / "run", first), init_checkpoint=None))
    copy = tmp_path / "copy"
    shutil.copytree(find_model_folder(first), copy)  # elsewhere it is still the same
    train(job(texts, tmp_path / "run", copy))
    moments = read_folder(copy).tensors(snapshot.TRAINING_TENSORS_FILE)
    assert open_init_checkpoint(copy).weights_sha256 == open_init_checkpoint(first).weights_sha256
    assert moments


def test_a_design_named_again_must_be_the_same(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = open_init_checkpoint(first)
    file = str(small.design_file(tmp_path / "same.yaml", small.dropping() | {"vocab_size": None}))
    assert base.resolve_config(file, []) == base.resolve_config(None, []) == base.config
    wide = str(small.design_file(tmp_path / "wide.yaml", small.dropping() | {"width": 32}))
    assert base.resolve_config(wide, ["width=16"]) == base.config
    with pytest.raises(ConfigError, match=r"wide\.yaml:.*16"):
        base.resolve_config(wide, [])
    assert capsys.readouterr().err == ""
    changed = base.resolve_config(file, ["layers.*.mixer.position.base=500000"])
    assert changed != base.config
    assert "position.base was 10000.0" in capsys.readouterr().err
    assert base.build_model(changed, "cpu").config == changed


@pytest.mark.parametrize("override", ["width=32", "layers.0.repeat=3", "head.tied=false", "layers.0.mixer.kv_heads=1"])
def test_an_override_that_changes_weights_is_refused(first: Path, override: str) -> None:
    base = open_init_checkpoint(first)
    with pytest.raises(ConfigError, match=r"tensor '.*'.*override"):
        base.build_model(base.resolve_config(None, [override]), "cpu")
