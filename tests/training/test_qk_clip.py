"""QK-clip: the largest logits against a plain loop, and what scaling q and k makes of them."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder, build
from heddle.parts.mixers.attention import Attention
from heddle.parts.mixers.latent_attention import LatentAttention
from heddle.storage.run_log import read_log
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import Settings
from heddle.training.step import accumulate_gradients, apply_gradients
from tests import small

MLA = {"kind": "mla", "heads": 3, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 5}
ROPE = {"kind": "rope"}


def attention(**fields: Any) -> dict[str, Any]:
    return {"kind": "attention", "heads": 4, "head_dim": 6, **fields}


def model(mixer: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64, depth: int = 2) -> Decoder:
    """Layers with weights so large that logits differ much between heads."""
    layers = [{"repeat": depth, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24}}]
    decoder = build(small.config(small.design(layers=layers)), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return decoder.to(dtype).train()


def batch(seed: int = 0) -> Batch:
    """Four rows of packed documents."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, small.VOCABULARY, (4, 13))
    lengths = ((5, 7), (12,), (1, 4, 7), (6, 6))
    return Batch(tokens, lengths, np.arange(4))


def largest(decoder: Decoder, parts: int = 1) -> dict[str, Tensor]:
    recorded = accumulate_gradients(decoder, batch(), (0, 0), parts, record_logits=True).largest_logits
    decoder.zero_grad()
    return dict(recorded)


def clipped(decoder: Decoder, limit: float, rate: float = 0.0, stochastic: bool = False) -> dict[str, Tensor]:
    """The largest logits after a step at this learning rate and QK-clip."""
    optimizer = build_optimizer(decoder, 0.1, "muon", stochastic_rounding=stochastic)
    optimizer.check_logits(decoder, limit)
    gradients = accumulate_gradients(decoder, batch(), (0, 0), record_logits=True)
    apply_gradients(decoder, optimizer, gradients, rate, 1.0, limit)
    return largest(decoder)


def loop_logits(decoder: Decoder, path: str) -> list[float]:
    """The largest logit of each head, pair by pair, from the inputs of the mixer. Without a rotation."""
    inputs: list[np.ndarray] = []
    mixer = decoder.get_submodule(path)
    hook = mixer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach().numpy()))
    largest(decoder)
    hook.remove()
    weights = {name: value.detach().numpy() for name, value in mixer.named_parameters()}
    highest = [-math.inf] * mixer.heads  # type: ignore[operator]
    for row, lengths in zip(inputs[0], batch().doc_lengths, strict=True):
        starts = np.cumsum([0, *lengths])
        for start, end in pairwise(starts):
            for i in range(start, end):
                for j in range(start, i + 1):
                    for head, logit in enumerate(pair_logits(mixer, weights, row[i], row[j])):
                        if i - j < (getattr(mixer, "window", None) or 99):
                            highest[head] = max(highest[head], logit)
    return highest


def pair_logits(mixer: Any, weights: dict[str, np.ndarray], query: np.ndarray, key: np.ndarray) -> list[float]:
    logits = []
    for head in range(mixer.heads):
        if isinstance(mixer, Attention):
            dim, group = mixer.head_dim, head // (mixer.heads // mixer.kv_heads)
            q = weights["q.weight"][head * dim : (head + 1) * dim] @ query
            k = weights["k.weight"][group * dim : (group + 1) * dim] @ key
        else:
            nope, rope = mixer.nope_dim, mixer.rope_dim
            dim = nope + rope
            q = weights["q.weight"][head * dim : (head + 1) * dim] @ query
            latent = weights["kv_down.weight"] @ key
            latent = latent / np.sqrt((latent**2).mean() + 1e-6) * weights["kv_norm.weight"]
            k = np.concatenate(
                (weights["k_up.weight"][head * nope : (head + 1) * nope] @ latent, weights["k_rope.weight"] @ key)
            )
        logits.append(float(q @ k) / math.sqrt(dim))
    return logits


@pytest.mark.parametrize("mixer", [attention(), attention(kv_heads=2, window=3, softcap=5.0), MLA])
def test_the_largest_logits_are_those_of_a_plain_loop(mixer: dict[str, Any]) -> None:
    decoder = model(mixer)
    recorded = largest(decoder)
    assert list(recorded) == ["layers.0.mixer", "layers.1.mixer"]
    for path, logits in recorded.items():
        assert logits.tolist() == pytest.approx(loop_logits(decoder, path), abs=1e-10)
    for path, logits in largest(decoder, parts=2).items():
        assert logits.tolist() == pytest.approx(recorded[path].tolist(), abs=1e-12)


def random_mixer(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        more: dict[str, Any] = draw.choice(
            [{}, {"query_rank": 7}, {"position": ROPE}, {"query_rank": 5, "position": ROPE}]
        )
        return {**MLA, "heads": draw.choice([1, 3]), "bias": draw.random() < 0.3, **more}
    chosen: dict[str, Any] = {"kv_heads": draw.choice([1, 2, 4]), "bias": draw.random() < 0.5}
    options: list[dict[str, Any]] = [
        {"position": ROPE}, {"window": 3}, {"softcap": 4.0}, {"sink": True}, {"k_eq_v": True, "value_norm": True},
        {"forget": True}, {"position": {"kind": "alibi"}}, {"temperature_beta": 0.5, "temperature_length": 2},
        {"short_convolution": {"of": ["q", "k"]}}, {"exclusive": True}, {"indexer": {"top_k": 2}},
    ]  # fmt: skip
    for fields in draw.sample(options, 2):
        chosen |= fields
    return attention(**chosen)


def error(seed: int) -> float:
    """How far the largest logits are from min(logit, limit) after a clip."""
    draw = random.Random(seed)
    decoder = model(random_mixer(draw), seed, depth=1)
    before = largest(decoder)["layers.0.mixer"]
    limit = float(before.median()) * 0.7
    if limit <= 0:
        return 0.0
    after = clipped(decoder, limit)["layers.0.mixer"]
    return float((after - before.clamp(max=limit)).abs().max())


def test_a_clip_brings_every_larger_logit_to_the_limit_and_no_other() -> None:
    """In 40 random designs."""
    assert max(map(error, range(40))) < 1e-9


@pytest.mark.parametrize("cls", [Attention, LatentAttention])
def test_the_published_factors(cls: type) -> None:
    """√γ for q and k of a head, γ for q alone where heads share the key, and nothing else moves."""
    decoder = model(attention(bias=True) if cls is Attention else {**MLA, "query_rank": 7})
    before, logits = {n: p.detach().clone() for n, p in decoder.named_parameters()}, largest(decoder)["layers.0.mixer"]
    limit = float(logits.sort().values[1:3].mean())
    clipped(decoder, limit)
    gamma = (limit / logits.clamp(min=limit)).tolist()
    changed = {name for name, value in decoder.named_parameters() if not torch.equal(value, before[name])}
    prefix = "layers.0.mixer."
    names = ("q.weight", "q.bias", "k.weight", "k.bias") if cls is Attention else ("q_up.weight", "k_up.weight")
    assert {name.removeprefix(prefix) for name in changed if name.startswith(prefix)} == set(names)
    for name in names:
        value, old = decoder.get_parameter(prefix + name), before[prefix + name]
        for head, (rows, old_rows) in enumerate(zip(value.chunk(len(gamma)), old.chunk(len(gamma)), strict=True)):
            assert torch.allclose(rows[:4], old_rows[:4] * math.sqrt(gamma[head]), rtol=1e-12, atol=0)
            if name == "q_up.weight":
                assert torch.allclose(rows[4:], old_rows[4:] * gamma[head], rtol=1e-12, atol=0)


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full factor for q and k alike, and the shared keys scaled as well."""
    rows: Callable[[Any], Any] = Attention.logit_rows.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        both = property(lambda self: [each._replace(parts=[(self.head_dim, 1.0)]) for each in rows(self)])
        patch.setattr(Attention, "logit_rows", both)
        assert any(error(seed) > 1e-3 for seed in range(12))
    half = property(lambda self: [each._replace(parts=[(self.head_dim, 0.5)]) for each in rows(self)])
    monkeypatch.setattr(Attention, "logit_rows", half)
    assert any(error(seed) > 1e-3 for seed in range(12))


@pytest.mark.parametrize(
    ("mixer", "says"),
    [
        (attention(qk_norm="head"), "qk_clip 9: layers.0.mixer has norms of q and k (qk_norm head)"),
        (attention(qkv_clip=2.0), "qk_clip 9: layers.0.mixer bounds q and k"),
        (attention(short_convolution={"of": ["k"], "activation": "silu"}), "qk_clip 9: layers.0.mixer has an activ"),
        ({"kind": "differential_attention", "heads": 2}, "qk_clip 9: layers.0.mixer is differential attention"),
        ({"kind": "retention", "heads": 2}, "qk_clip 9: the design has no attention"),
    ],
)
def test_what_cannot_be_clipped_is_refused(mixer: dict[str, Any], says: str) -> None:
    decoder = model(mixer)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(decoder, 0.1).check_logits(decoder, 9.0)
    assert str(caught.value).startswith(says)


def test_frozen_weights_and_limits_are_refused() -> None:
    decoder = model(attention())
    with pytest.raises(ConfigError, match=r"^qk_clip 9: layers.0.mixer has weights of q or k that are not trained"):
        build_optimizer(decoder, 0.1, "muon", [("layers.*.mixer.k", 0.0)]).check_logits(decoder, 9.0)
    with pytest.raises(ConfigError, match=r"^qk_clip 0.0:"):
        Settings(steps=1, qk_clip=0.0)
    assert "qk_clip" not in Settings(steps=1).identity()


@pytest.mark.parametrize("stochastic", [False, True])
def test_bfloat16_weights_and_their_copies_are_scaled(stochastic: bool) -> None:
    """Within the rounding of bfloat16; a step that does not clip leaves copies and weights alone."""
    decoder = model(attention(), dtype=torch.bfloat16)
    before = largest(decoder)["layers.0.mixer"]
    limit = float(before.median())
    after = clipped(decoder, limit, stochastic=stochastic)["layers.0.mixer"]
    assert after.tolist() == pytest.approx(before.clamp(max=limit).tolist(), rel=0.03)
    assert float(before.max()) > 1.2 * limit
    optimizer = build_optimizer(decoder, 0.1, stochastic_rounding=stochastic)
    optimizer.clip_logits(decoder, {"layers.0.mixer": before}, limit)
    for name, copy in optimizer.masters.state.items():
        assert torch.equal(copy.bfloat16(), optimizer.trainable[name])


def test_a_skipped_step_clips_nothing() -> None:
    decoder = model(attention())
    before, logits = [parameter.detach().clone() for parameter in decoder.parameters()], largest(decoder)
    optimizer = build_optimizer(decoder, 0.1)
    optimizer.clip_logits(decoder, logits, 0.1, torch.tensor(False))
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.parameters(), strict=True))
    optimizer.clip_logits(decoder, logits, 0.1, torch.tensor(True))
    assert not all(torch.equal(a, b) for a, b in zip(before, decoder.parameters(), strict=True))
    gradients = accumulate_gradients(decoder, batch(), (0, 0), record_logits=True)
    failed = replace(gradients, loss=gradients.loss * float("nan"))
    result = apply_gradients(decoder, optimizer, failed, 0.1, 1.0, 0.1)
    assert result.skipped
    assert result.read().logits is not None
    assert result.read().logits.clipped_heads == 0  # type: ignore[union-attr]


def test_a_run_logs_the_largest_logit_and_resumes_with_equal_bits(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> TrainingJob:
        values: dict[str, Any] = {
            "qk_clip": 0.05,
            "optimizer": "muon",
            "learning_rate": 0.1,
            "gradient_accumulation_steps": 2,
        }
        return small.job(texts, tmp_path / name, **values)

    small.same_after_a_signal(make, monkeypatch)
    lines = read_log(tmp_path / "whole")
    assert [line["largest_logit"] for line in lines] == [line["largest_logit"] for line in read_log(tmp_path / "cut")]
    assert all(0 <= line["clipped_heads"] <= 2 for line in lines)
    assert any(line["clipped_heads"] for line in lines)
    free = small.job(texts, tmp_path / "free", learning_rate=0.1, optimizer="muon")
    train(free)
    assert "largest_logit" not in read_log(tmp_path / "free")[0]
