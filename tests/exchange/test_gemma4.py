"""Gemma 3n's and Gemma 4's text models against transformers in float64, published files, and what is refused."""

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heddle.exchange.family import families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.load import load
from heddle.numerics import norms
from heddle.numerics.rotary import pos_freqs
from heddle.parts.feedforwards import gated
from heddle.parts.scalings import ScaledFrequencies
from heddle.parts.scalings.proportional import ProportionalConfig
from tests.exchange.cases import CASES
from tests.exchange.hf_models import (
    auto_class,
    batch,
    config_of,
    imported,
    our_logits,
    plain,
    read_json,
    saved,
    tensors_of,
    their_logits,
)
from tests.exchange.test_multi_token import in_float64
from tests.laws.planting import Plant, replaced

VARIANTS = [
    ("gemma4" if family == "gemma4_text" else "gemma4_unified", family, variant)
    for family in ("gemma4_text", "gemma4_unified_text")
    for variant in CASES[family].variants
] + [("gemma3n", "gemma3n_text", variant) for variant in CASES["gemma3n_text"].variants]


@pytest.fixture(autouse=True)
def quantile_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantile that both take in float32, as `in_float64` has it."""
    monkeypatch.setattr(gated, "normal_quantile", NormalDist().inv_cdf)


def error(module: str, family: str, variant: str) -> float:
    """The largest difference of logits in float64."""
    folder = saved(family, variant)[1]
    tokens, mask, layout = batch()
    with in_float64(module):
        theirs = auto_class(family).from_pretrained(folder, dtype=torch.float64, **plain(family)).eval()
        want = their_logits(theirs, tokens, mask)
    got = our_logits(load(folder, dtype=torch.float64).model, tokens, layout)
    return float((got - want)[mask.bool()].abs().max())


@pytest.mark.parametrize("variant", CASES["gemma3n_text"].variants)
def test_gradients_of_gemma3n_in_float64(variant: str) -> None:
    """Theirs are not numbers at padding, and leave out the first row of the embeddings, their padding."""
    folder, tokens = saved("gemma3n_text", variant)[1], batch()[0].clamp(min=1)
    with in_float64("gemma3n"):
        theirs = auto_class("gemma3n_text").from_pretrained(folder, dtype=torch.float64, **plain("gemma3n_text")).eval()
        theirs(input_ids=tokens).logits.sin().sum().backward()
    ours = load(folder, dtype=torch.float64).model
    ours.head(ours(tokens)[0]).sin().sum().backward()
    pairs = {
        "embed.weight": "model.embed_tokens.weight",
        "embed.per_layer.weight": "model.embed_tokens_per_layer.weight",
        "expansion.projections.0.weight": "model.altup_projections.0.weight",
        "final_norm.projections.0.weight": "model.altup_unembed_projections.0.weight",
        "layers.0.residual.altup.prediction.weight": "model.layers.0.altup.prediction_coefs.weight",
        "layers.1.residual.altup.embedding_scale": "model.layers.1.altup.correct_output_scale",
        "layers.1.residual.laurel.down.weight": "model.layers.1.laurel.linear_left.weight",
        "layers.1.feedforward.gate.weight": "model.layers.1.mlp.gate_proj.weight",
        "layers.1.mixer.v.weight": "model.layers.1.self_attn.v_proj.weight",
    }
    for own, other in pairs.items():
        got, want = ours.get_parameter(own).grad, theirs.get_parameter(other).grad
        assert got is not None
        if own == "embed.per_layer.weight":
            got, want = got[1:], want[1:]
        assert float((got - want).abs().max()) < 1e-9 * max(1.0, float(want.abs().max())), own


@pytest.mark.parametrize(("module", "family", "variant"), VARIANTS)
def test_logits_in_float64(module: str, family: str, variant: str) -> None:
    assert error(module, family, variant) < 1e-10


def every_pair(self: ProportionalConfig, dim: int, base: float, length: int, dtype: torch.dtype) -> Any:
    """Frequencies of all pairs, as if none stood still."""
    return ScaledFrequencies(tuple((1.0 / pos_freqs(dim, base, dtype) / self.factor).tolist()))


def weighted(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm that leaves x as it is where it has no weight."""
    return x if weight is None else norms.reference(x, weight, eps, offset, cast)


WRONG: dict[str, Plant] = {
    "values that are not normalized": replaced(norms.rms_norm, weighted),
    "pairs that should stand still": replaced(ProportionalConfig.scale_frequencies, every_pair),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[name](monkeypatch)
    assert error("gemma4", "gemma4_text", "plain") > 1e-3


def test_published_files_hold_keys_that_no_layer_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved("gemma4_text", "plain")[1]
    tensors = tensors_of(folder)
    for name in ("k_proj", "v_proj", "k_norm"):
        unread = f"model.layers.4.self_attn.{name}.weight"
        assert unread not in tensors
        tensors[unread] = torch.ones(16, 42)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_json(folder)))
    ours = load(tmp_path).model
    assert "self_attn.k_proj" in capsys.readouterr().err
    want = imported("gemma4_text", "plain").model
    assert all(torch.equal(value, ours.get_parameter(name)) for name, value in want.named_parameters())


HEADS = {"head_dim": 10, "num_key_value_heads": 3}


@pytest.mark.parametrize("names", [("1", "4"), ("01", "04")])
def test_heads_of_full_layers_as_newer_files_write_them(names: tuple[str, ...]) -> None:
    data = json.loads(config_of("gemma4_text", "plain").to_json_string())
    data |= {"per_layer_config": dict.fromkeys(names, HEADS)}
    design = design_from_config(data, families()["gemma4_text"])
    mixers: list[Any] = [layer.mixer for _, layer in design.expand()]
    assert [mixer.head_dim for mixer in mixers] == [4, 10, 4, 4, 10]
    assert [mixer.kv_heads for mixer in mixers] == [2, 3, 2, 2, 3]
