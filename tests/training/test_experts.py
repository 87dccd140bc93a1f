"""Mixtures of experts in training: penalties that no split changes, loads told once a step, and what the log says."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heddle.data.corpus import Corpus
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.parts.feedforwards import Feedforward
from heddle.parts.feedforwards.moe import MoE
from heddle.parts.layout import Layout
from heddle.parts.modules import router_statistics
from heddle.parts.modules.router_statistics import RouterRecorder, RouterStatistics, record_router_statistics
from heddle.storage.checkpoints import checkpoint_folder
from heddle.storage.folder import tensors_sha256
from heddle.storage.model import load
from heddle.storage.run_log import read_log
from heddle.training import loop
from heddle.training import step as experts
from heddle.training.checkpoint import resume_run
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.step import (
    BatchResult,
    RouterMetrics,
    accumulate_gradients,
    apply_gradients,
    recent_router_summary,
)
from tests import small
from tests.storage.shared import untimed_log
from tests.training.gradients import CONTEXT, ROWS, batch, furthest, gradients_of

WIDTH = 16
LAYERS = ["layers.0.feedforward", "layers.1.feedforward"]


def mixing(**fields: Any) -> dict[str, Any]:
    """Two layers with experts, noise everywhere it can be."""
    data = small.dropping()
    data["layers"][0]["feedforward"] = small.MOE | fields
    return data


def double(data: dict[str, Any] | None = None) -> Decoder:
    model = build(small.config(data or mixing()), dtype=torch.float64, seed=3).train()
    with torch.no_grad():
        for path in LAYERS:
            model.get_parameter(f"{path}.router.weight").mul_(40)  # so that experts are chosen unevenly
    return model


def test_loss_and_penalty_are_those_of_plain_autograd() -> None:
    model = double(mixing() | {"embedding": {}, "residual": {"kind": "pre_norm"}})
    for mixer in model.mixers():
        mixer.eval()  # type: ignore[union-attr]
    gradients, result = gradients_of(model)
    rows = batch()
    with record_router_statistics() as recorder:
        hidden, _ = model(torch.from_numpy(rows.tokens[:, :-1]), Layout.packed(rows.doc_lengths))
    logits = (hidden @ model.head.weight.T).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(rows.targets).flatten())
    penalties = [entry.aux_loss for entry in recorder.entries if entry.aux_loss is not None]
    penalty = torch.stack(penalties).sum() / (ROWS * CONTEXT)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    plain = dict(zip(trainable, torch.autograd.grad(loss + penalty, list(trainable.values())), strict=True))
    assert furthest(gradients, plain) <= 1e-12
    assert float(result.loss) == pytest.approx(float(loss.detach()), abs=1e-12)
    assert float(result.aux_loss) == pytest.approx(float(penalty.detach()), abs=1e-12)
    assert float(penalty.detach()) > 0.9  # two mixtures, at least about 1 each, times 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("pieces", [2, 4])
def test_any_split_of_a_batch_is_the_same(pieces: int, checkpointing: bool) -> None:
    model = double()
    whole, unsplit = gradients_of(model)
    model.checkpointing = checkpointing
    gradients, split = gradients_of(model, None, pieces)
    assert furthest(whole, gradients) <= 1e-12
    assert float(split.aux_loss) == pytest.approx(float(unsplit.aux_loss), abs=1e-12)
    assert list(split.router_metrics) == list(unsplit.router_metrics) == LAYERS
    for path in LAYERS:
        want, got = unsplit.router_metrics[path], split.router_metrics[path]
        assert torch.equal(got.expert_counts, want.expert_counts)
        assert int(got.expert_counts.sum()) == int(got.tokens) == ROWS * CONTEXT
        assert float(got.entropy) == pytest.approx(float(want.entropy), abs=1e-12)


def test_a_penalty_averaged_by_the_piece_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = double()
    whole, _ = gradients_of(model)
    right = experts.RouterMetricsCollector.add
    monkeypatch.setattr(experts.RouterMetricsCollector, "add", lambda self, *recorded: 2 * right(self, *recorded))  # type: ignore[operator]
    assert furthest(whole, gradients_of(model, None, 2)[0]) > 1e-6


def test_a_ledger_that_stays_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers that run again enter would be counted twice."""

    class Open(RouterRecorder):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, False if name == "closed" else value)

    model = double()
    model.checkpointing = True
    monkeypatch.setattr(router_statistics, "RouterRecorder", Open)
    recorded: list[list[RouterStatistics]] = []
    monkeypatch.setattr(experts.RouterMetricsCollector, "add", lambda self, entries, _: recorded.append(entries))
    gradients_of(model)
    assert [len(entries) for entries in recorded] == [4]


def test_an_encoder_is_balanced_over_its_source() -> None:
    data = mixing(aux_loss=0.0)
    data["layers"].insert(0, {"mixer": {"kind": "cross_attention", "heads": 2, "encoder_width": WIDTH}})
    inner = {"kind": "attention", "heads": 2, "causal": False, "position": {"kind": "rope"}}
    layer = {"mixer": inner, "feedforward": small.MOE}
    data["encoder"] = {"width": WIDTH, "layers": [layer]}
    model = build(small.config(data), dtype=torch.float64).train()
    source = np.array([[1, 2, 3], [4, -1, -1], [5, 6, -1], [-1, 7, 8]])
    rows = dataclasses.replace(batch(), encoder_tokens=source)
    whole, unsplit = gradients_of(model, rows)
    assert int(unsplit.router_metrics["encoder.layers.0.feedforward"].tokens) == 8
    assert 0.45 < float(unsplit.aux_loss) < 1.5
    gradients, split = gradients_of(model, rows, 4)
    assert furthest(whole, gradients) <= 1e-12
    assert float(split.aux_loss) == pytest.approx(float(unsplit.aux_loss), abs=1e-12)


@pytest.fixture
def balanced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Feedforward, list[int]]]:
    """Who was told which loads."""
    calls: list[tuple[Feedforward, list[int]]] = []
    right = MoE.update_expert_bias

    def balance(self: MoE, loads: Tensor) -> None:
        calls.append((self, loads.tolist()))
        right(self, loads)

    monkeypatch.setattr(MoE, "update_expert_bias", balance)
    return calls


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_mixture_is_told_its_loads_once_a_step(balanced: Any, pieces: int) -> None:
    model = double()
    optimizer = build_optimizer(model, 0.1)
    _, result = gradients_of(model, None, pieces)
    assert balanced == []
    assert not apply_gradients(model, optimizer, result, 1e-3, 1.0).skipped
    expected = [(model.get_submodule(path), result.router_metrics[path].expert_counts.tolist()) for path in LAYERS]
    assert balanced == expected
    assert all(bool((model.get_parameter(f"{path}.router.expert_bias") != 0).any()) for path in LAYERS)


@pytest.mark.parametrize("bad_value", ["loss", "aux_loss", "gradient"])
def test_a_step_that_is_not_taken_balances_nothing(balanced: Any, bad_value: str) -> None:
    model = double()
    optimizer = build_optimizer(model, 0.1)
    _, result = gradients_of(model)
    if bad_value == "gradient":
        model.embed.weight.grad = torch.full_like(model.embed.weight, math.nan)
    else:
        result = BatchResult(**(vars(result) | {bad_value: torch.tensor(math.inf)}))
    assert apply_gradients(model, optimizer, result, 1e-3, 1.0).skipped
    assert balanced == []


def test_frozen_experts_are_not_balanced(balanced: Any) -> None:
    model = double()
    optimizer = build_optimizer(model, 0.1, lr_scale=[("layers.0.feedforward", 0.0)])
    assert not apply_gradients(model, optimizer, gradients_of(model)[1], 1e-3, 1.0).skipped
    assert [mixture for mixture, _ in balanced] == [model.get_submodule(LAYERS[1])]


# The compiler itself looks at the .grad of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_twin_balances_the_same_weights() -> None:
    model = double()
    want, plain = gradients_of(model)
    twin = compiled(model, backend="eager")
    got, result = gradients_of(twin)
    assert furthest(want, got) <= 1e-12
    assert list(result.router_metrics) == LAYERS
    assert all(
        torch.equal(result.router_metrics[path].expert_counts, plain.router_metrics[path].expert_counts)
        for path in LAYERS
    )
    assert not apply_gradients(model, build_optimizer(model, 0.1), result, 1e-3, 1.0).skipped
    assert bool((twin.get_parameter(f"{LAYERS[0]}.router.expert_bias") != 0).any())


def test_what_a_tally_tells() -> None:
    tally = RouterMetrics(torch.tensor([6, 3, 0]), torch.tensor(3), torch.tensor(2.5), torch.tensor(5))
    assert tally.summary() == {"load": [0.6667, 0.3333, 0.0], "entropy": 0.5, "dropped": 0.333333}
    nothing = RouterMetrics(torch.zeros(2, dtype=torch.int64), torch.tensor(0), torch.tensor(math.nan), torch.tensor(0))
    assert nothing.summary() == {"load": [0.0, 0.0], "entropy": None, "dropped": 0.0}


def test_the_end_of_a_log_is_meant() -> None:
    def line(load: list[float], entropy: float, applied: bool = True) -> dict[str, Any]:
        return {
            "skipped": not applied,
            "experts": {"layers.0.feedforward": {"load": load, "entropy": entropy, "dropped": 0.5}},
        }

    log = [line([1.0, 0.0], 0.1)] * 28 + [line([0.5, 0.5], 0.5), line([0.0, 1.0], 9.0, False), line([0.25, 0.75], 0.6)]
    assert recent_router_summary(log) == {
        "layers.0.feedforward": {"load": [0.375, 0.625], "entropy": 0.55, "dropped": 0.5}
    }
    assert recent_router_summary(log[:1]) == {
        "layers.0.feedforward": {"load": [1.0, 0.0], "entropy": 0.1, "dropped": 0.5}
    }
    assert recent_router_summary([{"skipped": False}]) is None
    assert recent_router_summary([]) is None


def ending(out: Path, steps: int) -> tuple[str, list[dict[str, Any]]]:
    return tensors_sha256(checkpoint_folder(out, steps)), untimed_log(out)


def test_the_log_tells_the_penalty_apart(texts: Corpus, tmp_path: Path) -> None:
    for name, strength in (("without", 0.0), ("with", 0.5)):
        train(small.job(texts, tmp_path / name, mixing(aux_loss=strength), steps=2))
    without, penalized = (read_log(tmp_path / name) for name in ("without", "with"))
    assert (without[0]["loss"], without[0]["bits_per_byte"]) == (penalized[0]["loss"], penalized[0]["bits_per_byte"])
    assert without[0]["gradient_norm"] != penalized[0]["gradient_norm"]
    assert without[0]["aux_loss"] == 0.0
    assert penalized[0]["aux_loss"] > 0.5
    summaries = penalized[1]["experts"]
    assert list(summaries) == LAYERS
    for layer in summaries.values():
        assert sum(layer["load"]) == pytest.approx(1.0, abs=1e-3)
        assert 0 < layer["entropy"] <= math.log(3)
        assert layer["dropped"] == 0.0
    train(small.job(texts, tmp_path / "dense", steps=1))
    assert "experts" not in read_log(tmp_path / "dense")[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_ends_with_the_same_bits(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    asked: dict[str, Any] = {"steps": 5, "save_every": 1, "optimizer": optimizer}
    train(small.job(texts, tmp_path / "whole", mixing(), **asked))
    right, calls = loop._stop_if_diverged, 0

    def watch(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 5):
            raise KeyboardInterrupt
        right(*arguments)

    monkeypatch.setattr(loop, "_stop_if_diverged", watch)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(small.job(texts, tmp_path / "cut", mixing(), **asked))
    train(small.job(texts, tmp_path / "cut", mixing(), **asked))
    assert ending(tmp_path / "cut", 5) == ending(tmp_path / "whole", 5)
    model, _ = load(tmp_path / "cut")
    bias = model.get_parameter(f"{LAYERS[0]}.router.expert_bias")
    assert bool((bias != 0).any())
    assert not bias.requires_grad


def test_a_resume_that_forgets_the_balance_is_caught(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"save_every": 1}
    train(small.job(texts, tmp_path / "whole", mixing(), steps=4, **asked))
    right = loop._stop_if_diverged

    def watch(job: Any, run: Any, step: Any) -> None:
        right(job, run, step)
        if run.progress.step == 2:
            raise KeyboardInterrupt

    def forgetting(*arguments: Any) -> Any:
        progress = right_resume(*arguments)
        arguments[1].get_parameter(f"{LAYERS[0]}.router.expert_bias").zero_()
        return progress

    right_resume = resume_run
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_stop_if_diverged", watch)
        with pytest.raises(KeyboardInterrupt):
            train(small.job(texts, tmp_path / "cut", mixing(), steps=4, **asked))
    monkeypatch.setattr(loop, "resume_run", forgetting)
    train(small.job(texts, tmp_path / "cut", mixing(), steps=4, **asked))
    assert ending(tmp_path / "cut", 4) != ending(tmp_path / "whole", 4)


def test_the_penalty_balances(texts: Corpus) -> None:
    """With it, the shares of three experts end nearer to a third than without."""
    spread = []
    for strength in (0.0, 1.0):
        model = double(mixing(aux_loss=strength, bias_update=0.0))
        optimizer = build_optimizer(model, 0.0)
        for number in range(30):
            result = accumulate_gradients(model, batch(), (0, number))
            apply_gradients(model, optimizer, result, 3e-3, 1.0)
        loads = result.router_metrics[LAYERS[1]].expert_counts
        spread.append(float((loads / loads.sum() - 1 / 3).abs().max()))
    assert spread[1] < spread[0]
