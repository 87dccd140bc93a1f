"""A design, texts and a training job so small that training takes a fraction of a second."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from heddle.cli.main import run_command
from heddle.config import PARTS, kind_class
from heddle.data.corpus import Corpus, prepare_corpus
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from heddle.signals import Interrupted
from heddle.training import loop
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings

VOCABULARY = 300
MOE: dict[str, Any] = {
    "kind": "moe", "expert": "mlp", "experts": 3, "top_k": 1, "hidden": 8, "renormalize": False, "aux_loss": 0.5,
    "bias_update": 0.125,
}  # fmt: skip
SENTENCES = (
    "The weaver lifts a thread and throws the shuttle.",
    "Another cloth is on the same loom in the evening.",
    "def weave(warp, weft):\n    return [lift(thread) for thread in warp if thread in weft]",
    "機を織る人は糸を上げて杼を通す。",
    "同じ織機でも、綜絖を替えれば別の布になる。",
    "朝の市場には青い布と赤い布が並んでいた。",
    "La navette passe, le fil monte, l'étoffe grandit.",
)


def text(size: int, seed: int = 0) -> str:
    """About `size` characters of sentences in a fixed random order."""
    draw = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < size:
        parts.append(draw.choice(SENTENCES) + draw.choice((" ", "\n", "\n\n")))
        length += len(parts[-1])
    return "".join(parts)


def folder(path: Path, documents: int = 30, size: int = 500) -> Path:
    """A folder of short texts; returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (path / f"{number:03d}.txt").write_text(text(size, number), encoding="utf-8")
    return path


def design(width: int = 16, **fields: Any) -> dict[str, Any]:
    """Two heads sharing one pair of keys and values, one layer."""
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 1, "position": {"kind": "rope"}}
    layer = {"mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24}}
    return {"vocab_size": VOCABULARY, "width": width, "layers": [layer]} | fields


def dropping() -> dict[str, Any]:
    """A design with every kind of dropout."""
    mixer = {"kind": "attention", "heads": 2, "dropout": 0.2, "position": {"kind": "rope"}}
    layer = {"repeat": 2, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24, "dropout": 0.2}}
    residual = {"kind": "pre_norm", "drop_path": 0.4}
    return design(layers=[layer], embedding={"dropout": 0.1}, residual=residual)


def config(data: dict[str, Any] | None = None) -> ModelConfig:
    """The config of a design; default: the small design."""
    return load_config(data or design())


def design_file(path: Path, data: dict[str, Any] | None = None) -> Path:
    """Write a design as YAML."""
    path.write_text(yaml.safe_dump(data or design()), encoding="utf-8")
    return path


def trained_run(root: Path, depth: int) -> Path:
    """A folder with a text, and a run of four heads that trained on it for five steps; returns it."""
    folder(root / "text")
    mixer = {"kind": "attention", "heads": 4, "position": {"kind": "rope"}}
    layer = {"repeat": depth, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24}}
    design_file(root / "design.yaml", design(layers=[layer]))
    words = ["train", f"{root}/design.yaml", "--data", f"{root}/text", "--out", f"{root}/run", "--steps", "5"]
    assert run_command([*words, "--sequence-length", "16", "--batch-size", "4", "--device", "cpu", "--quiet"]) == 0
    return root


def corpus(path: Path, documents: int = 30, size: int = 500) -> Corpus:
    """The folder of short texts, tokenized."""
    return prepare_corpus([str(folder(path, documents, size))], vocab_size=VOCABULARY, max_train_tokens=None)


def job(texts: Corpus, out: Path, data: dict[str, Any] | None = None, steps: int = 8, **settings: Any) -> TrainingJob:
    """A training job of a few steps of 4 rows of 16 tokens."""
    values = {"steps": steps, "batch_size": 4, "sequence_length": 16, "save_every": 3} | settings
    return TrainingJob(config=config(data), source=texts, settings=Settings(**values), out=out)


def forget_parts() -> None:
    """Unload all user parts, as if in a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("heddle.parts.") and not Path(module.__file__ or "").is_relative_to(PARTS):
            del sys.modules[name]
    kind_class.cache_clear()


@contextmanager
def signalled(monkeypatch: pytest.MonkeyPatch, step: int, match: str | None = None) -> Iterator[None]:
    """A training within gets a signal after this step, and ends by it."""
    stop_if_diverged = loop._stop_if_diverged

    def watch(job: TrainingJob, run: Any, taken: Any) -> None:
        stop_if_diverged(job, run, taken)
        if run.progress.step == step:
            run.stop_request.signal_number = 15

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_stop_if_diverged", watch)
        with pytest.raises(Interrupted, match=match):
            yield


def same_after_a_signal(make: Callable[[str], TrainingJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """A job stopped after step 3 and resumed has the same scores and weights, bit for bit, as an undisturbed one."""
    undisturbed = train(make("whole"))
    with signalled(monkeypatch, 3):
        train(make("cut"))
    resumed = train(make("cut"))
    assert resumed.scores == undisturbed.scores
    assert all(
        torch.equal(a, b) for a, b in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True)
    )
