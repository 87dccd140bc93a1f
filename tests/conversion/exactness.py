"""Shared by tests of rewrites: random source models in float64, and the comparison of logits and greedy text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heddle.conversion.fit import FitResult
from heddle.conversion.mixer_replacement import ChosenLayers, NewMixers
from heddle.conversion.rewrite import Rewrite, merged_repeats
from heddle.conversion.weights import CalibrationText, ModelWeights, Weights, build_model
from heddle.laws.harness import layout_for, model_under_test, new_state
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout

VOCABULARY = 40


def design(mixer: Mapping[str, Any], depth: int = 2, width: int = 16, **fields: Any) -> ModelConfig:
    """A small design whose layers have this mixer and a gated feed-forward."""
    layer = {"repeat": depth, "mixer": dict(mixer), "feedforward": {"kind": "gated", "hidden": 24}}
    return load_config({"vocab_size": VOCABULARY, "width": width, "layers": [layer], **fields})


def source_model(config: ModelConfig) -> Decoder:
    """A float64 model with random numbers in every parameter, gains and biases included."""
    return model_under_test(config)


def calibration_text(tokens: Sequence[Tensor]) -> CalibrationText:
    """A text of token batches, int64 [B, T] each; each row is one document."""
    return CalibrationText(list(tokens), [Layout.causal(*batch.shape) for batch in tokens])


def random_text(rows: int = 3, length: int = 17, batches: int = 1, seed: int = 0) -> CalibrationText:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return calibration_text([torch.randint(1, VOCABULARY, (rows, length), generator=generator) for _ in range(batches)])


def converted_model(model: Decoder, *rewrites: Rewrite, text: CalibrationText | None = None) -> Decoder:
    """The model after these rewrites, rebuilt from its dumped design as a written folder would be."""
    weights: Weights = ModelWeights(model)
    for rewrite in rewrites:
        weights = rewrite.apply(weights, text if rewrite.needs_text else None)
    rebuilt = build_model(weights)
    reread = load_config(merged_repeats(weights.design).dump())
    assert reread.resolved() == weights.design.resolved()
    return rebuilt


def fit_results(weights: Weights) -> Mapping[int, FitResult]:
    """The results of the fits of a converted model, by layer; those of layers that were not read yet are missing."""
    if isinstance(weights, ChosenLayers):
        weights = weights.replaced
    assert isinstance(weights, NewMixers)
    return weights.results


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    """Logits [B, T, vocab] of texts without a state."""
    with torch.no_grad():
        result: Tensor = model.head(model(tokens, layout_for(model, *tokens.shape))[0])
    return result


def difference(model: Decoder, converted: Decoder, text: CalibrationText | None = None) -> float:
    """The largest difference of logits on a random text."""
    batches: Sequence[Tensor] = (text or random_text()).batches
    return max(float((logits(model, tokens) - logits(converted, tokens)).abs().max()) for tokens in batches)


def greedy_text(model: Decoder, prompt: Tensor, new_tokens: int = 12) -> Tensor:
    """Greedy continuation with the state, int64 [B, new_tokens]."""
    state, tokens, out = new_state(model, len(prompt), cache_length=prompt.shape[1] + new_tokens), prompt, []
    with torch.no_grad():
        for _ in range(new_tokens):
            hidden, state_after = model(tokens, None, state)
            assert state_after is not None
            state, tokens = state_after, model.head(hidden[:, -1:]).argmax(-1)
            out.append(tokens)
    return torch.cat(out, dim=1)
