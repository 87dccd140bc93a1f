"""The fit of a new mixer to the old one: lower error on other text, never above the start, the same every time."""

from typing import Any

import pytest
import torch

from heddle import laws
from heddle.conversion.fit import Chunk, fit_chunks, fit_mixer, relative_error
from heddle.conversion.mixer_replacement import MixerReplacement
from heddle.conversion.rewrite import rewrites
from heddle.conversion.rewrites.gated_delta import GatedDeltaReplacement
from heddle.conversion.weights import CalibrationText, LayerActivations, ModelWeights, build_model, layer_activations
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.training.settings import Settings
from tests.conversion.exactness import (
    calibration_text,
    converted_model,
    design,
    fit_results,
    greedy_text,
    logits,
    random_text,
    source_model,
)

GQA = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
REWRITES = {name: cls for name, cls in rewrites().items() if issubclass(cls, MixerReplacement)}
every_rewrite = pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
FEW_STEPS = 10
LAWS = ["chunked_decoding", "causality", "size_matches_model"]


def small_source(depth: int = 2, mixer: dict[str, Any] | None = None) -> Decoder:
    return source_model(design(mixer or GQA, depth=depth))


def kinds(config: ModelConfig) -> list[str]:
    return [layer.mixer.kind for layer in config.layers if layer.mixer is not None]


def activations_on(model: Decoder, text: CalibrationText, index: int) -> LayerActivations:
    return next(layer for layer in layer_activations(ModelWeights(model), text) if layer.index == index)


@every_rewrite
def test_the_error_falls_on_other_text(rewrite: type[MixerReplacement]) -> None:
    source = small_source()
    other = activations_on(source, random_text(rows=8, length=16, seed=7), 0)
    chunks = [Chunk(other.mixer_inputs[0], other.mixer_outputs[0], other.layouts[0])]
    errors = []
    for steps in (1, 100):
        weights = rewrite(fit_steps=steps, layers=(0,)).apply(ModelWeights(source), random_text(rows=64, length=16))
        mixer = build_model(weights).mixers()[0]
        assert mixer is not None
        errors.append(relative_error(mixer, chunks))
    assert errors[1] < 0.75 * errors[0]


@every_rewrite
def test_two_conversions_are_equal_to_the_bit(rewrite: type[MixerReplacement]) -> None:
    source, text = small_source(), random_text(rows=4, length=16)
    first, second = (converted_model(source, rewrite(fit_steps=5), text=text) for _ in range(2))
    other_seed = converted_model(source, rewrite(fit_steps=5, seed=1), text=text)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    fresh = dict(first.named_parameters()).keys() - dict(source.named_parameters()).keys()
    assert any(not torch.equal(first.get_parameter(name), other_seed.get_parameter(name)) for name in fresh)


@every_rewrite
def test_the_converted_model_keeps_the_laws_and_decodes_as_it_reads(rewrite: type[MixerReplacement]) -> None:
    source = small_source(depth=3)
    converted = converted_model(source, rewrite(fit_steps=FEW_STEPS, layers=(0, 2)), text=random_text(4, 16))
    assert kinds(converted.config) == [
        rewrite.__module__.rpartition(".")[2],
        "attention",
        rewrite.__module__.rpartition(".")[2],
    ]
    failures = [result for result in laws.run(converted.config, LAWS) if not result.passed]
    assert failures == []
    prompt = random_text().batches[0]
    text = torch.cat((prompt, greedy_text(converted, prompt)), dim=1)
    predicted = logits(converted, text).argmax(-1)[:, prompt.shape[1] - 1 : -1]
    assert torch.equal(predicted, text[:, prompt.shape[1] :])


def test_a_fit_that_diverges_leaves_the_start() -> None:
    source, text = small_source(), random_text(rows=4, length=16)
    weights = GatedDeltaReplacement(fit_steps=20, fit_learning_rate=1e6).apply(ModelWeights(source), text)
    started = GatedDeltaReplacement(fit_steps=1, fit_learning_rate=1e-300).apply(ModelWeights(source), text)
    torch.testing.assert_close(weights.layer(0), started.layer(0), rtol=0.0, atol=0.0)
    result = fit_results(weights)[0]
    assert result.error_after == result.error_before


def test_padding_does_not_count_and_pieces_keep_their_documents() -> None:
    source = small_source()
    tokens = random_text(rows=3, length=16).batches[0]
    packed = CalibrationText([tokens], [Layout.packed([[4, 12], [9, 7], [5]], 16)])
    activations = activations_on(source, packed, 1)
    fitted, held_out = fit_chunks(activations)
    assert (len(fitted), len(held_out)) == (2, 1)
    mixer = activations.layer.mixer
    assert mixer is not None
    assert relative_error(mixer, [*fitted, *held_out]) < 1e-20  # the mixer itself, read chunk by chunk
    for chunk in held_out:
        chunk.outputs[:, 5:] = 1e6  # at padding
    assert relative_error(mixer, held_out) < 1e-20


def test_an_attention_that_writes_nothing_can_be_fitted() -> None:
    source = small_source()
    with torch.no_grad():
        source.get_parameter("layers.0.mixer.out.weight").zero_()
    weights = GatedDeltaReplacement(fit_steps=5).apply(ModelWeights(source), random_text(4, 16))
    assert fit_results(weights) == {}  # nothing is fitted before it is read
    assert all(torch.isfinite(tensor).all() for tensor in weights.layer(0).values())
    assert fit_results(weights)[0].error_after == 0.0


def test_a_fit_stops_when_the_error_no_longer_falls() -> None:
    source = small_source()
    activations = activations_on(source, random_text(8, 16), 0)
    mixer = activations.layer.mixer
    assert mixer is not None
    result = fit_mixer(mixer, activations, Settings(steps=100, learning_rate=1e-2, schedule="linear"))
    assert result.steps == 50  # every tenth step is measured, and the fifth measurement in vain ends it
    assert result.error_after == result.error_before < 1e-20


@every_rewrite
@pytest.mark.parametrize(
    ("mixer", "fields", "reason"),
    [
        (GQA | {"causal": False}, {}, "layers:"),
        (GQA | {"window": 8}, {}, "each has a window"),
        ({"kind": "gated_delta", "heads": 2}, {}, "gated_delta"),
        (GQA | {"window": 8}, {"layers": (1,)}, r"layers.1.mixer:"),
        (GQA | {"qk_norm": "head", "sink": True}, {}, r"qk_norm.*drop=true"),
        (GQA, {"keep": 0.3}, r"keep: 0.3"),
    ],
    ids=["bidirectional", "window", "recurrent", "named-layer", "features", "share"],
)
def test_what_cannot_be_converted_is_refused(
    rewrite: type[MixerReplacement], mixer: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        rewrite(**fields).apply(ModelWeights(small_source(mixer=mixer)), random_text())


@pytest.mark.parametrize(
    ("tokens", "has"),
    [((2, 15), r"30 tokens.*15"), ((1, 64), r"64 tokens.*64")],
    ids=["tokens", "rows"],
)
def test_a_text_too_short_to_fit_on_is_refused(tokens: tuple[int, int], has: str) -> None:
    text = calibration_text([torch.ones(tokens, dtype=torch.int64)])
    with pytest.raises(ConfigError, match=f"text:.*{has}.*16.*32"):
        GatedDeltaReplacement().apply(ModelWeights(small_source()), text)
