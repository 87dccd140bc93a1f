"""Precisions of a training: what is stored and saved in which dtype; a cut run ends with the same bits."""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.data.corpus import Corpus
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.model.decoder import build
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.file_io import read_json_file
from heddle.storage.folder import read_folder, tensors_sha256
from heddle.storage.model import load
from heddle.storage.run_log import read_log
from heddle.training import built_models
from heddle.training.built_models import float8_copy
from heddle.training.distillation import Distillation, LossWeights
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.init_checkpoint import LoraSettings, open_init_checkpoint
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.optimizer import MasterWeights, matrix_parameters
from heddle.training.settings import Settings
from tests import small
from tests.training import float8_stand_in
from tests.training.float8_stand_in import Float8Linear

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "bf16-params": {"precision": "bf16-params"},
    "stochastic": {"precision": "bf16-params", "stochastic_rounding": True},
    "stochastic-muon": {"precision": "bf16-params", "stochastic_rounding": True, "optimizer": "muon"},
    "fp8": {"precision": "bf16", "fp8": True},
    "fp8-params": {"precision": "bf16-params", "fp8": True},
}
EXPERTS = {"kind": "moe", "expert": "mlp", "experts": 3, "top_k": 1, "hidden": 32, "bias_update": 0.125}
WIDE = small.design(
    layers=[
        {"mixer": {"kind": "attention", "heads": 2}, "feedforward": {"kind": "gated", "hidden": 32, "dropout": 0.1}},
        {"mixer": {"kind": "attention", "heads": 2}, "feedforward": EXPERTS},
    ]
)


@pytest.fixture
def float8_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's stand-in, and a device that multiplies float8."""
    float8_stand_in.install(monkeypatch)
    monkeypatch.setattr(built_models, "device_reason", lambda device: None)


def job(texts: Corpus, out: Path, mode: str, **settings: Any) -> TrainingJob:
    wide = small.job(texts, out, WIDE, **({"steps": 5} | MODES[mode] | settings))
    return replace(wide, evaluation=EvaluationBudget(final_tokens=64))


def test_every_step_draws_anew(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[int, int]] = []
    write_back = MasterWeights.write_back

    def record(masters: MasterWeights, key: tuple[int, int]) -> None:
        keys.append(key)
        write_back(masters, key)

    monkeypatch.setattr(MasterWeights, "write_back", record)
    train(job(texts, tmp_path, "stochastic", seed=4, steps=3))
    assert keys == [(4, 0), (4, 1), (4, 2)]


def saved_dtypes(out: Path, file: str) -> dict[str, torch.dtype]:
    tensors = read_folder(checkpoint_folder(out, 5)).tensors(file)
    return {name: tensor.dtype for name, tensor in tensors.items()}


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_run_ends_with_the_same_bits(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float8_device: None, mode: str
) -> None:
    small.same_after_a_signal(lambda name: job(texts, tmp_path / name, mode), monkeypatch)
    hashes = set()
    for name in ("whole", "cut"):
        folder = read_folder(checkpoint_folder(tmp_path / name, 5))
        hashes.add(tensors_sha256(folder, "training.safetensors"))
    assert len(hashes) == 1
    assert read_log(tmp_path / "whole")[-1]["loss"] < 6.0


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_has_the_dtype_of_the_weights(
    texts: Corpus, tmp_path: Path, float8_device: None, mode: str
) -> None:
    trained = train(job(texts, tmp_path, mode)).model
    stored = torch.bfloat16 if "params" in mode or "stochastic" in mode else torch.float32
    weights = saved_dtypes(tmp_path, "model.safetensors")
    expected = {name: stored if value.requires_grad else torch.float32 for name, value in trained.named_parameters()}
    assert weights == expected
    assert {name for name, dtype in expected.items() if "expert_bias" in name} != set()
    state = saved_dtypes(tmp_path, "training.safetensors")
    state.pop("rng.cpu")
    assert set(state.values()) == {torch.float32}  # moments, step counts and copies
    copies = {name.removeprefix("master.") for name in state if name.startswith("master.")}
    has_copies = stored == torch.bfloat16 and "stochastic" not in mode
    assert copies == (
        {name for name, value in trained.named_parameters() if value.requires_grad} if has_copies else set()
    )
    model, _ = load(tmp_path)
    assert model.embed.weight.dtype == stored
    memory = read_json_file(tmp_path / "run.json")["memory"]
    size = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    assert memory["weights"] == memory["gradients"] == size * (2 if stored == torch.bfloat16 else 4)


def test_an_export_has_the_dtype_of_the_weights(texts: Corpus, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = small.design(layers=[{"mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
                                  "feedforward": {"kind": "gated", "hidden": 24}}])  # fmt: skip
    train(small.job(texts, tmp_path / "run", plain, steps=2, precision="bf16-params"))
    export(load(tmp_path / "run")[0], tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}


def test_low_precision_trains_about_as_float32_does(texts: Corpus, tmp_path: Path, float8_device: None) -> None:
    losses = {}
    for mode in ("fp32", "bf16-params", "stochastic", "fp8"):
        train(job(texts, tmp_path / mode, mode, warmup=1, learning_rate=0.02))
        losses[mode] = read_log(tmp_path / mode)[-1]["loss"]
    assert losses["fp32"] < 5.6
    assert all(abs(loss - losses["fp32"]) < 0.05 for loss in losses.values())
    assert len(set(losses.values())) == len(losses)  # each rounds in its own way


def test_adapters_and_a_teacher_work_with_bfloat16_weights(texts: Corpus, tmp_path: Path) -> None:
    train(job(texts, tmp_path / "base", "fp32"))
    base = open_init_checkpoint(tmp_path / "base")
    settings = Settings(steps=2, batch_size=4, sequence_length=16, precision="bf16-params")
    for name, changes in {
        "lora": {"init_checkpoint": base, "lora": LoraSettings(2)},
        "distilled": {"distillation": Distillation(base, LossWeights(logits=0.5, layers=0.5))},
    }.items():
        work = TrainingJob(config=base.config, source=texts, settings=settings, out=tmp_path / name, **changes)  # type: ignore[arg-type]
        assert train(work).progress.skipped_steps == 0
        assert load(tmp_path / name)[0].embed.weight.dtype == torch.bfloat16


def test_float8_replaces_projections_of_a_copy_over_the_same_parameters(
    float8_device: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(small.config(WIDE | {"width": 16}))
    before = copy.deepcopy(model.state_dict())
    converted = float8_copy(model)
    replaced = {path for path, module in converted.named_modules() if isinstance(module, Float8Linear)}
    projections = {f"layers.{layer}.mixer.{name}" for layer in (0, 1) for name in ("q", "k", "v", "out")}
    assert replaced == projections | {f"layers.0.feedforward.{name}" for name in ("gate", "up", "down")}
    assert not any(isinstance(module, Float8Linear) for module in model.modules())
    assert [id(parameter) for parameter in converted.parameters()] == [
        id(parameter) for parameter in model.parameters()
    ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(matrix_parameters(model)) > len(matrix_parameters(converted))  # so an optimizer is built for the model
    stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 2)
    assert f"fp8: {stacked:,} weights in stacked matrices, such as experts" in capsys.readouterr().err


def test_float8_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(small.config(WIDE))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"^fp8:.*torchao.*\[gpu\].*fp8"):
        float8_copy(model)
    float8_stand_in.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"^fp8:.*NVIDIA GPU.*cpu.*fp8"):
        float8_copy(model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert built_models.device_reason(torch.device("cuda")) == (
        "needs compute capability 8.9 (Ada, Hopper) or newer, and this GPU has 8.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert built_models.device_reason(torch.device("cuda")) is None
    monkeypatch.setattr(built_models, "device_reason", lambda device: None)
    narrow = small.design(width=24, layers=[{"mixer": {"kind": "attention", "heads": 2}}])
    with pytest.raises(ConfigError, match=r"^fp8:.*16"):
        float8_copy(build(small.config(narrow)))
