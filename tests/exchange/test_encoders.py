"""Masked language models in float64, files of older programs, what is left out, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.modernbert import modeling_modernbert
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding

import heddle
from heddle.errors import ConfigError
from heddle.exchange.families.bert import read_roformer
from heddle.exchange.families.modernbert import _read_layers, map_weights
from heddle.exchange.family import families
from heddle.exchange.load import LazyCheckpoint, load, original_design
from heddle.exchange.transformers import HeddleConfig, HeddleForCausalLM
from heddle.model.embedding import Embedding, HeadTransform, TokenTypes
from heddle.parts.positions.learned import Learned
from heddle.parts.residuals.pre_norm import PreNorm
from tests.exchange.cases import CASES, Fields
from tests.exchange.hf_models import (
    MASKED,
    auto_class,
    batch,
    distance,
    imported,
    our_logits,
    plain,
    read_json,
    saved,
    their_logits,
)
from tests.exchange.test_older_files import Tensors, rewritten
from tests.laws.planting import calls, condition, replaced, result

VARIANTS = [(family, variant) for family in sorted(MASKED) for variant in CASES[family].variants]


def turned(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """The rotation of transformers in the dtype of its angles; its own is in float32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = cos.shape[-1] // 2
    turned_q, turned_k = (x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin for x in (q, k))
    return turned_q, turned_k


def angles(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> tuple[Any, Any]:
    """Cosines and sines in float64; transformers' own are in float32."""
    table, config = module.config.rope_parameters[layer_type], module.config
    width = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = position_ids[..., None] * table["rope_theta"] ** -exponents / table.get("factor", 1.0)
    return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()


def sines(module: Any, shape: torch.Size, past: int = 0, position_ids: Any = None) -> torch.Tensor:
    """RoFormer's table in float64; transformers' own is in float32."""
    width = module.weight.shape[1]
    angle = torch.arange(past, past + shape[1])[:, None] * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    return torch.cat((angle.sin(), angle.cos()), -1)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """ModernBERT and RoFormer rotate by angles in float32 whatever their dtype; here in the dtype of their tokens."""
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", turned)
    monkeypatch.setattr(modeling_modernbert.ModernBertRotaryEmbedding, "forward", angles)
    monkeypatch.setattr(RoFormerSinusoidalPositionalEmbedding, "forward", sines)


def wide_logits(family: str, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of transformers and of heddle for the tokens of a padded batch, in float64."""
    _, folder = saved(family, variant)
    theirs = auto_class(family).from_pretrained(folder, dtype=torch.float64, **plain(family)).eval()
    tokens, mask, layout = batch()
    ours = our_logits(load(folder, dtype=torch.float64).model, tokens, layout)
    return their_logits(theirs, tokens, mask)[mask.bool()], ours[mask.bool()]


@pytest.mark.parametrize(("family", "variant"), VARIANTS)
def test_logits_in_float64(family: str, variant: str) -> None:
    theirs, ours = wide_logits(family, variant)
    assert float((theirs - ours).abs().max()) <= 1e-10


def in_halves(layer: dict[str, Any]) -> dict[str, Any]:
    return layer | {"mixer": layer["mixer"] | {"position": {"kind": "rope", "layout": "half"}}}


def halves_exchanged(weights: Any, name: str, *parts: str) -> None:
    weights.add_module(name, *(parts[::-1] if name.endswith("mlp.Wi") else parts))


BUGS = {
    "one type for all tokens": ("bert", calls(TokenTypes.forward, "embedding", lambda _, types, weight: weight[0])),
    "a norm before the activation": (
        "bert",
        replaced(HeadTransform.forward, lambda head, hidden: head.activation(head.norm(head.dense(hidden)))),
    ),
    "no norm of the embedding": ("bert", condition(Embedding.forward, "norm", False)),
    "positions without their offset": (
        "roberta",
        calls(Learned.forward, "clamp", lambda positions, *, self, **limit: positions.clamp(**limit) - self.offset),
    ),
    "halves rotated in place of neighbors": (
        "roformer",
        result(read_roformer, lambda design: design | {"layers": [in_halves(layer) for layer in design["layers"]]}),
    ),
    "no norm before a branch": ("modernbert", calls(PreNorm.forward, "norms", lambda norm, stream: stream)),
    "a wider window": (
        "modernbert",
        result(_read_layers, lambda layers: [layer | {"window": (layer["window"] or 0) + 1} for layer in layers]),
    ),
    "gate and up exchanged": ("modernbert", calls(map_weights, "add_module", halves_exchanged, every=True)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, plant = BUGS[bug]
    plant(monkeypatch)
    theirs, ours = wide_logits(family, next(iter(CASES[family].variants)))
    assert float((theirs - ours).abs().max()) > 1e-3


def test_gains_and_biases_of_the_first_files_have_other_names(tmp_path: Path) -> None:
    def older(config: Fields, tensors: Tensors) -> Tensors:
        tensors = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
        return {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in tensors.items()}

    folder = rewritten("bert", "plain", tmp_path / "older", older)
    model = load(folder).model
    assert distance(saved("bert", "plain")[0], model) <= 1e-5
    lazy = LazyCheckpoint(folder)
    assert all(torch.equal(lazy.tensor(name), parameter) for name, parameter in model.named_parameters())


def test_the_pooler_is_left_out_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pooled(config: Fields, tensors: Tensors) -> Tensors:
        return tensors | {"bert.pooler.dense.weight": torch.ones(48, 48), "cls.seq_relationship.bias": torch.ones(2)}

    model = load(rewritten("bert", "plain", tmp_path / "pooled", pooled)).model
    assert distance(saved("bert", "plain")[0], model) <= 1e-5
    said = capsys.readouterr().err
    assert "ignored:" in said
    assert "ignored:" in said


def test_a_discriminator_is_an_encoder_whose_head_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def discriminator(config: Fields, tensors: Tensors) -> Tensors:
        config["architectures"] = ["ElectraForPreTraining"]
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith("electra.")}
        return kept | {"discriminator_predictions.dense.bias": torch.ones(48)}

    model = load(rewritten("electra", "plain", tmp_path / "discriminator", discriminator)).model
    assert "ignored:" in capsys.readouterr().err
    whole, tokens = imported("electra", "plain").model, batch()[0]
    with torch.no_grad():
        assert torch.equal(model(tokens)[0], whole(tokens)[0])


def test_a_head_stored_twice_must_be_the_embedding(tmp_path: Path) -> None:
    def twice(config: Fields, tensors: Tensors) -> Tensors:
        return tensors | {"cls.predictions.decoder.weight": torch.ones(97, 48)}

    with pytest.raises(ConfigError, match="'tie_word_embeddings'"):
        load(rewritten("bert", "plain", tmp_path / "twice", twice))


def test_modernbert_of_older_files() -> None:
    """A period and two thetas in place of types and tables; an odd window is rounded down."""
    config = read_json(saved("modernbert", "untied-every-second-linear")[1])
    del config["layer_types"], config["rope_parameters"]
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 500.0, "local_rope_theta": 100.0}
    tables = {"rope_type": "default"}
    newer = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": tables | {"rope_theta": 500.0},
            "sliding_attention": tables | {"rope_theta": 100.0},
        },
    }
    first, second = (
        original_design(config | fields, families()["modernbert"], "config.json")
        for fields in (older | {"local_attention": 15}, newer)
    )
    assert first == second
    assert first.layers[1].dump()["mixer"]["window"] == 7


WRONG_TYPES = [
    (torch.tensor([[0, 1, 2], [0, 0, 0]]), r"2 .*2 types"),
    (torch.tensor([[0, 1, 1], [0, -1, 0]]), r"-1 .*2 types"),
    (torch.zeros(2, 3), r"torch.float32.*\[2, 3\].*\[2, 3\]"),
    (torch.zeros(3, dtype=torch.int64), r"\[3\].*\[2, 3\]"),
]


@pytest.mark.parametrize(("types", "message"), WRONG_TYPES)
def test_token_types_that_the_design_lacks_are_refused(types: torch.Tensor, message: str) -> None:
    layout = heddle.Layout.causal(2, 3).with_token_types(types)
    with pytest.raises(ConfigError, match=message):
        imported("bert", "plain").model(torch.ones(2, 3, dtype=torch.int64), layout)


def test_token_types_of_a_design_without_any_are_refused() -> None:
    layout = heddle.Layout.causal(1, 3).with_token_types(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="token_types:"):
        imported("llama", "plain").model(torch.ones(1, 3, dtype=torch.int64), layout)


def test_token_types_of_padding_are_ignored() -> None:
    model, (tokens, _, layout) = imported("bert", "plain").model, batch()
    types = torch.where(layout.positions < 0, 77, tokens % 2)
    hidden = model(tokens, layout.with_token_types(types))[0]
    assert torch.equal(hidden, model(tokens, layout.with_token_types(tokens % 2))[0])
    checked = heddle.Layout(layout.positions, token_types=types)
    assert torch.equal(model(tokens, checked)[0], hidden)


def test_the_classes_of_transformers_read_token_types() -> None:
    decoder, tokens = imported("bert", "plain").model, batch()[0][:1]
    model = HeddleForCausalLM.from_decoder(decoder)
    with torch.no_grad():
        got = model(input_ids=tokens, token_type_ids=tokens % 2).logits
        assert torch.equal(got, our_logits(decoder, tokens))
        assert float((got - model(input_ids=tokens).logits).abs().max()) > 0.01


def test_token_types_beside_a_cache_are_refused() -> None:
    design = heddle.load_config("preset:gqa-tiny", ["vocab_size=97", "embedding.token_types=2"])
    causal = HeddleForCausalLM(HeddleConfig(design=design.dump())).eval()
    tokens = batch()[0][:1]
    with torch.no_grad(), pytest.raises(ConfigError, match=r"token_type_ids:.*use_cache="):
        causal(input_ids=tokens, token_type_ids=tokens % 2, use_cache=True)
    with torch.no_grad():
        causal(input_ids=tokens, token_type_ids=tokens % 2, use_cache=False)
