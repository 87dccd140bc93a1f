"""Shared by tests of sensitivity: a model in which some layers hardly matter, and text that it writes itself."""

from collections.abc import Collection

import torch

from heddle.conversion.weights import CalibrationText
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from tests.conversion.exactness import calibration_text, logits, source_model


def muted_model(config: ModelConfig, layers: Collection[int]) -> Decoder:
    """A model the attention of some of whose layers adds almost nothing to the stream."""
    model = source_model(config)
    with torch.no_grad():
        for index in layers:
            model.get_parameter(f"layers.{index}.mixer.out.weight").mul_(1e-3)
    return model


def sampled_text(model: Decoder, rows: int = 24, length: int = 24) -> CalibrationText:
    """Text drawn from the model's own predictions: any change of them raises the loss on it, but for noise."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.ones(rows, 1, dtype=torch.int64)
    while tokens.shape[1] < length:
        predictions = logits(model, tokens)[:, -1].softmax(-1)
        tokens = torch.cat((tokens, predictions.multinomial(1, generator=generator)), dim=1)
    return calibration_text([tokens])
