"""Conversions whose text is on an accelerator and whose weights are read on the CPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, ModelWeights, TensorSpec, Weights, build_model
from tests.accelerator.pretend import DEVICE, on_device, pretending
from tests.conversion.exactness import calibration_text, design, difference, source_model

MIXER: dict[str, Any] = {"kind": "attention", "heads": 4, "head_dim": 6, "position": {"kind": "rope"}, "bias": True}
TARGETS = [
    "kv_heads=2",
    "kv_heads=2,groups=contiguous,merge=aligned",
    "kv_heads=1,groups=similar-queries,merge=mean,similarity=weights",
    "kv_heads,state_budget=50%",
    "kv_heads,state_budget=50%,groups=contiguous,merge=mean",
    "latent_attention,state_budget=50%",
    "window=6,keep=1",
    "window=6,keep=1,by=attention",
    "gated_delta,drop=true,keep=1,fit_steps=2",
    "linear_attention,drop=true,fit_steps=2",
    "shared_kv,state_budget=50%,fit_steps=2",
]


def text() -> CalibrationText:
    generator = torch.Generator().manual_seed(0)
    return calibration_text([torch.randint(1, 40, (8, 16), generator=generator)])


def on_accelerator(text: CalibrationText) -> CalibrationText:
    layouts = [layout.map_tensors(on_device) for layout in text.layouts]
    return replace(text, batches=[on_device(batch) for batch in text.batches], layouts=layouts)


class Made(Weights):
    """Weights that were made before."""

    def __init__(self, weights: Weights, tensors: dict[str, Tensor]) -> None:
        self.design, self.tensors, self._specs = weights.design, tensors, weights.specs

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.mark.parametrize("target", TARGETS)
def test_a_text_on_the_accelerator_gives_the_model_of_the_cpu(target: str) -> None:
    source, rewrite = ModelWeights(source_model(design(MIXER))), parse_rewrite(target)
    expected = build_model(rewrite.apply(source, text()))
    with pretending():
        moved = on_accelerator(text())
        assert moved.device == DEVICE
        converted = rewrite.apply(source, moved)
        weights = {name: converted.tensor(name) for name in converted.names}
    assert {value.device.type for value in weights.values()} == {"cpu"}
    model = build_model(Made(converted, weights))
    # the logits: a rounding turns the sign of an eigenvector, which stands in two weights
    assert difference(model, expected, text()) < 1e-8
