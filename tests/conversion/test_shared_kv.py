"""Layers that read an earlier layer's keys and values: exact where those are equal, which layers share, and the fit."""

from typing import Any

import pytest
import torch

from heddle.conversion.fit import fit_chunks
from heddle.conversion.rewrites import shared_kv
from heddle.conversion.rewrites.shared_kv import SharedKV
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights, build_model, layer_activations
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.mixers.attention import AttentionConfig
from tests.conversion.exactness import (
    converted_model,
    design,
    difference,
    fit_results,
    greedy_text,
    random_text,
    source_model,
)
from tests.conversion.muted import muted_model, sampled_text

GQA: dict[str, Any] = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
LOCAL = GQA | {"window": 5}
MIXERS: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "norms-sink-gate": GQA | {"qk_norm": "head", "sink": True, "gate": "channel", "bias": True},
    "alibi": {"kind": "attention", "heads": 4, "position": {"kind": "alibi"}, "window": 6, "softcap": 4.0},
    "scaled-chunks": GQA | {"value_scale": 0.5, "qkv_clip": 1.0, "window": 6, "chunked": True, "exclusive": True},
    "bidirectional": GQA | {"causal": False, "value_dim": 6},
}
FEW: dict[str, Any] = {"fit_steps": 2}


def twin_keys(config: ModelConfig) -> Decoder:
    """A model whose second layer has the keys and values of the first one, which adds nothing to the stream."""
    model = source_model(config)
    layer, twin = (dict(model.layers[index].named_parameters()) for index in (0, 1))
    with torch.no_grad():
        for name in layer:
            if name.startswith(("mixer.k", "mixer.v", "residual.norms.mixer")):
                twin[name].copy_(layer[name])
            if name.startswith(("mixer.out", "feedforward.down")):
                layer[name].zero_()
    return model


def sharing(config: ModelConfig) -> list[int]:
    """The layers that read another one's keys and values."""
    return [index for index, source in enumerate(config.kv_sources) if source is not None]


def mixed(*mixers: dict[str, Any]) -> ModelConfig:
    layers = [{"mixer": mixer, "feedforward": {"kind": "gated", "hidden": 24}} for mixer in mixers]
    return load_config({"vocab_size": 40, "width": 16, "layers": layers})


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_equal_keys_and_values_lose_nothing(mixer: dict[str, Any]) -> None:
    source, text = twin_keys(design(mixer, depth=3)), random_text(rows=4, length=16)
    converted = converted_model(source, SharedKV(layers=(1,), **FEW), text=text)
    assert sharing(converted.config) == [1]
    assert difference(source, converted) < 1e-10
    assert difference(source, converted_model(source, SharedKV(layers=(2,), **FEW), text=text)) > 1e-4
    if source.causal:
        prompt = random_text().batches[0]
        assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))


@pytest.mark.parametrize(
    ("target", "mixers", "expected"),
    [
        ("layers.1,3.shared_kv", [GQA] * 4, [1, 3]),
        ("shared_kv,every=2", [GQA] * 5, [1, 3]),
        ("shared_kv,every=3", [GQA] * 5, [1, 2, 4]),
        ("shared_kv,last=2", [GQA] * 5, [3, 4]),
        ("shared_kv,every=2", [LOCAL, GQA, LOCAL, GQA, LOCAL], [2, 3]),
        ("shared_kv,last=3", [LOCAL, GQA, LOCAL, LOCAL, GQA], [2, 3, 4]),
        ("shared_kv,every=2", [GQA, {"kind": "gated_delta", "heads": 2}, GQA], [2]),
        ("layers.1,2,3.shared_kv,every=2", [GQA] * 4, [2]),
    ],
)
def test_which_layers_share(target: str, mixers: list[dict[str, Any]], expected: list[int]) -> None:
    source, rewrite = ModelWeights(source_model(mixed(*mixers))), parse_rewrite(target)
    assert sharing(rewrite.apply(source, random_text()).design) == expected
    assert rewrite.needs_text
    assert not rewrite.is_exact(source.design)


@pytest.mark.parametrize("options", ["keep=2", "state_budget=75%"])
def test_the_layers_that_matter_keep_their_own(options: str) -> None:
    source = muted_model(design(GQA, depth=4), {1})
    rewrite = parse_rewrite(f"shared_kv,{options},fit_steps=2")
    weights = rewrite.apply(ModelWeights(source), sampled_text(source))
    assert sharing(weights.design) == [1]
    for name, value in weights.layer(2).items():
        assert torch.equal(value, source.get_parameter(f"layers.2.{name}")), name


def test_measured_losses_are_those_of_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss that `keep` prints for a layer alone is that of the model in which it alone shares."""
    source = source_model(mixed(LOCAL, GQA, LOCAL, GQA))
    text = sampled_text(source)
    SharedKV(keep=1, **FEW).apply(ModelWeights(source), text)
    printed = capsys.readouterr().err
    for index in (2, 3):
        alone = converted_model(source, SharedKV(layers=(index,), **FEW), text=text)
        losses = [loss_on(model, text.batches[0]) for model in (source, alone)]
        assert f"layer {index} {losses[1] - losses[0]:.4g}" in printed


def loss_on(model: Decoder, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model.head(model(tokens)[0])[:, :-1].flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def test_what_was_fitted_to_be_measured_is_used_where_the_source_is_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = muted_model(design(GQA, depth=4), {1, 3})
    weights = SharedKV(keep=1, **FEW).apply(ModelWeights(source), sampled_text(source))
    assert sharing(weights.design) == [1, 3]
    assert fit_results(weights) == {}
    build_model(weights)
    assert capsys.readouterr().err.count("layer 1: shared_kv fitted") == 1


def test_the_fit_is_to_the_outputs_that_the_converted_model_has() -> None:
    """The error that the fit reports is that of the converted model's mixer, on the text held out."""
    source, text = source_model(mixed(LOCAL, GQA, LOCAL, GQA)), random_text(rows=16, length=16)
    errors = []
    for steps in (1, 100):
        weights = SharedKV(layers=(2,), fit_steps=steps).apply(ModelWeights(source), text)
        converted = build_model(weights)
        before, after = (
            next(each for each in layer_activations(ModelWeights(model), text) if each.index == 2)
            for model in (source, converted)
        )
        held_out = [chunk.outputs for chunk in fit_chunks(before)[1]]
        new = [chunk.outputs for chunk in fit_chunks(after)[1]]
        wrong = sum(float((a - b).square().sum()) for a, b in zip(held_out, new, strict=True))
        errors.append(wrong / sum(float(a.square().sum()) for a in held_out))
        assert errors[-1] == pytest.approx(fit_results(weights)[2].error_after, rel=1e-9)
    assert errors[1] < 0.9 * errors[0]


def test_keys_of_the_wrong_layer_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source, text = twin_keys(design(GQA, depth=3)), random_text(rows=4, length=16)
    keys_of = shared_kv._keys_and_values
    monkeypatch.setattr(shared_kv, "_keys_and_values", lambda each: [keys.flip(1) for keys in keys_of(each)])
    assert difference(source, converted_model(source, SharedKV(layers=(1,), **FEW), text=text)) > 1e-4


@pytest.mark.parametrize(
    ("target", "mixers", "reason"),
    [
        ("layers.0.shared_kv", [GQA] * 2, r"layers.0.mixer: has no earlier layer"),
        ("layers.1.shared_kv", [GQA, LOCAL], r"layers.1.mixer: has no earlier layer of this window"),
        ("shared_kv,last=2", [GQA, GQA, LOCAL], r"layers.2.mixer: has no earlier layer of this window"),
        ("shared_kv,last=2", [GQA] * 2, r"last: 2 of 2 layers"),
        ("shared_kv,every=2", [GQA, LOCAL], r"layers: no two layers"),
        ("shared_kv,every=2", [GQA, GQA | {"kv_heads": 4}], r"layers.1.mixer.kv_heads: differs from layer 0's"),
        ("shared_kv,every=2", [GQA, GQA | {"qk_norm": "head"}], r"layers.1.mixer.qk_norm: differs"),
        ("shared_kv,every=2", [GQA, GQA | {"position": None}], r"layers.1.mixer.position: differs"),
        ("shared_kv,every=2", [GQA, GQA | {"value_scale": 2.0}], r"layers.1.mixer.value_scale: differs"),
        ("layers.1.shared_kv", [GQA, {"kind": "gated_delta", "heads": 2}], r"layers.1.mixer: .* kind gated_delta"),
        ("shared_kv,keep=1", [GQA] * 2, r"keep: 1"),
        ("shared_kv,state_budget=10%", [GQA] * 2, r"state_budget: 0.1 .* less than the 0.5"),
    ],
)
def test_what_does_not_fit_is_refused(target: str, mixers: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_rewrite(target).apply(ModelWeights(source_model(mixed(*mixers))), random_text())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("shared_kv", "every: is missing"),
        ("shared_kv,every=1", "every: 1"),
        ("shared_kv,every=2,last=1", "last: conflicts with every"),
    ],
)
def test_options_that_do_not_go_together_are_refused(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_rewrite(target)


def test_a_layer_that_shares_has_no_keys_of_its_own() -> None:
    config = SharedKV(every=2).apply(ModelWeights(source_model(design(MIXERS["scaled-chunks"]))), random_text()).design
    mixer = config.layers[1].mixer
    assert isinstance(mixer, AttentionConfig)
    assert mixer.shared_kv
    assert mixer.value_scale is None
