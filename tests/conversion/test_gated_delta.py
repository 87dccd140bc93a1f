"""Full attention to the gated delta rule: what is taken over, which layers are kept, and what is written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.conversion.convert import Conversion, convert, open_source
from heddle.conversion.rewrites.gated_delta import GatedDeltaReplacement
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.storage.model import load, save
from tests.conversion.exactness import (
    calibration_text,
    design,
    fit_results,
    greedy_text,
    logits,
    random_text,
    source_model,
)
from tests.conversion.muted import muted_model, sampled_text

GQA = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 6, "value_dim": 5, "position": {"kind": "rope"}}
START: dict[str, Any] = {"fit_steps": 1, "fit_learning_rate": 1e-300}  # the weights before the fit


def test_projections_start_from_attention_with_repeated_key_and_value_heads() -> None:
    source = source_model(design(GQA | {"gate": "channel"}))
    new = GatedDeltaReplacement(**START).apply(ModelWeights(source), random_text()).layer(1)
    old = ModelWeights(source).layer(1)
    for name in ("mixer.q.weight", "mixer.out.weight", "mixer.gate.weight", "feedforward.up.weight"):
        assert torch.equal(new[name], old[name]), name
    for name, dim in (("mixer.k.weight", 6), ("mixer.v.weight", 5)):
        for head in range(4):
            group = head // 2  # query heads 0 and 1 read key head 0
            assert torch.equal(new[name][dim * head :][:dim], old[name][dim * group :][:dim]), (name, head)


def test_it_has_as_many_heads_as_queries_and_no_position() -> None:
    source = ModelWeights(source_model(design(GQA | {"qk_norm": "head", "bias": True, "softcap": 5.0})))
    weights = GatedDeltaReplacement(drop=True).apply(source, random_text())
    assert weights.design.layers[0].mixer == GatedDeltaConfig(
        heads=4, key_heads=4, head_dim=6, value_dim=5, conv_kernel=4, norm=source.design.norm
    )


@pytest.mark.parametrize("index", [0, 2])
def test_the_layer_that_matters_most_is_kept(index: int) -> None:
    source = muted_model(design(GQA, depth=3), {0, 1, 2} - {index})
    rewrite = parse_rewrite("gated_delta,keep=1/3,fit_steps=1")
    assert isinstance(rewrite, GatedDeltaReplacement)
    weights = rewrite.apply(ModelWeights(source), sampled_text(source))
    full = [number for number, layer in enumerate(weights.design.layers) if isinstance(layer.mixer, AttentionConfig)]
    assert full == [index]
    assert set(fit_results(weights)) == {0, 1, 2}  # each was fitted, to be measured
    for name, value in weights.layer(index).items():
        assert torch.equal(value, source.get_parameter(f"layers.{index}.{name}")), name


def test_a_second_rewrite_reads_the_fitted_layers_without_another_fit(capsys: pytest.CaptureFixture[str]) -> None:
    source, text = ModelWeights(source_model(design(GQA))), random_text(rows=4, length=16)
    first = GatedDeltaReplacement(fit_steps=1, layers=(0,)).apply(source, text)
    second = GatedDeltaReplacement(fit_steps=1).apply(first, text)
    fitted = first.layer(0)
    for name, value in second.layer(0).items():
        assert torch.equal(value, fitted[name]), name
    assert "mixer.beta.weight" in second.layer(1)
    assert capsys.readouterr().err.count("layer 0: gated_delta fitted") == 1


def test_a_written_hybrid_decodes_as_it_was_planned(tmp_path: Path) -> None:
    model = source_model(design(GQA, depth=3)).float()
    save(model, tmp_path / "model")
    text = calibration_text(random_text(rows=4, length=16).batches)
    conversion = Conversion(open_source(tmp_path / "model"), (GatedDeltaReplacement(fit_steps=10, keep=1),), text)
    weights = convert(conversion, tmp_path / "hybrid")
    converted = load(tmp_path / "hybrid")[0]
    expected: dict[str, Any] = {name: weights.tensor(name) for name in weights.names}
    for name, parameter in converted.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    prompt = random_text().batches[0]
    rest = greedy_text(converted, prompt)
    predicted = logits(converted, torch.cat((prompt, rest), dim=1)).argmax(-1)
    assert torch.equal(predicted[:, prompt.shape[1] - 1 : -1], rest)
