"""Files as other versions write them, and what an export says beside the design."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import heddle
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import best_match, design_from_config, match_family
from heddle.exchange.load import load
from heddle.parts.feedforwards.gated import GatedConfig
from tests.exchange.cases import Fields
from tests.exchange.hf_models import (
    AutoConfig,
    AutoModelForCausalLM,
    batch,
    distance,
    imported,
    read_json,
    saved,
    tensors_of,
    their_logits,
)

Tensors = dict[str, torch.Tensor]


def rewritten(family: str, variant: str, target: Path, change: Callable[[Fields, Tensors], Tensors]) -> Path:
    """A saved model of transformers with its config changed in place and its tensors as `change` returns them."""
    _, folder = saved(family, variant)
    config, tensors = read_json(folder), tensors_of(folder)
    tensors = change(config, tensors)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def test_gpt2_without_a_prefix_and_with_its_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def older(config: Fields, tensors: Tensors) -> Tensors:
        config["n_ctx"] = config["n_positions"]
        masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8).tril().bool(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    folder = rewritten("gpt2", "plain", tmp_path / "older", older)
    assert distance(saved("gpt2", "plain")[0], load(folder).model) <= 1e-5
    assert "ignored: tensors *.attn.bias" in capsys.readouterr().err


def test_a_bias_that_a_family_does_not_have_is_no_mask(tmp_path: Path) -> None:
    def wrong(config: Fields, tensors: Tensors) -> Tensors:
        return tensors | {"transformer.h.0.attn.q_proj.bias": torch.zeros(48)}

    with pytest.raises(CheckpointError, match=r"q_proj\.bias'"):
        load(rewritten("gptj", "plain", tmp_path / "wrong", wrong))


NEOX = "half-turned-tied"


def test_neox_with_its_older_fields(tmp_path: Path) -> None:
    def older(config: Fields, tensors: Tensors) -> Tensors:
        table = config.pop("rope_parameters")
        config |= {"rotary_pct": table["partial_rotary_factor"], "rotary_emb_base": int(table["rope_theta"])}
        name = "gpt_neox.layers.1.attention."
        return tensors | {name + "bias": torch.ones(1, 1, 8, 8), name + "rotary_emb.inv_freq": torch.ones(4)}

    folder = rewritten("gpt_neox", NEOX, tmp_path / "older", older)
    assert distance(saved("gpt_neox", NEOX)[0], load(folder).model) <= 1e-5
    config = read_json(folder) | {"rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'rope_theta'.*10000\.0.*'rotary_emb_base'.*500\.0"):
        load(folder)


def test_phi3_with_longrope_as_it_was_called(tmp_path: Path) -> None:
    def older(config: Fields, tensors: Tensors) -> Tensors:
        table = config.pop("rope_parameters")
        lists = {name: table[name] for name in ("short_factor", "long_factor")}
        config |= {"rope_theta": table["rope_theta"], "rope_scaling": {"type": "su", **lists}}
        return tensors

    folder = rewritten("phi3", "all-shorter", tmp_path / "older", older)
    assert distance(saved("phi3", "all-shorter")[0], load(folder).model) <= 1e-5
    again = best_match(load(folder).model.config, "phi3").config
    assert (again["max_position_embeddings"], again["original_max_position_embeddings"]) == (512, 128)


def test_phi3_without_an_original_length_at_the_top(tmp_path: Path) -> None:
    """It is 4096 then, whatever the table says."""

    def untold(config: Fields, tensors: Tensors) -> Tensors:
        del config["original_max_position_embeddings"]
        return tensors

    folder = rewritten("phi3", "all-longer", tmp_path / "untold", untold)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.config.rope_parameters["original_max_position_embeddings"] == 4096
    assert distance(theirs, load(folder).model) <= 1e-5


@pytest.mark.parametrize("empty", [{}, False, []])
@pytest.mark.parametrize("family", ["llama", "phi", "glm4"])
def test_an_empty_scaling_leaves_the_other_table(family: str, empty: Any, tmp_path: Path) -> None:
    def both(config: Fields, tensors: Tensors) -> Tensors:
        config["rope_parameters"] = config["rope_parameters"] | {"rope_theta": 77.0}
        config["rope_scaling"] = empty
        return tensors

    folder = rewritten(family, "plain", tmp_path / "both", both)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.config.rope_parameters["rope_theta"] == 77.0
    assert distance(theirs, load(folder).model) <= 1e-5


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("llama", {"rope_scaling": "none"}, "'rope_scaling'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'max_position_embeddings'"),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
            "'original_max_position_embeddings'",
        ),
    ],
)
def test_a_scaling_that_newer_readers_take_otherwise_is_refused(family: str, fields: Fields, field: str) -> None:
    config = read_json(saved(family, "plain")[1])
    for name in ("max_position_embeddings", "rope_parameters"):
        del config[name]
    with pytest.raises(ConfigError, match=field):
        design_from_config(config | fields, families()[family])


def test_gptj_with_rotary_dim_null(tmp_path: Path) -> None:
    """It turns as many dims as the model is wide, which is what one head has."""

    def null(config: Fields, tensors: Tensors) -> Tensors:
        config["rotary_dim"] = None
        return tensors

    folder = rewritten("gptj", "plain", tmp_path / "null", null)
    with pytest.raises(ConfigError, match="'rotary_dim'"):
        load(folder)
    config = read_json(folder) | {"n_head": 1}
    (folder / "config.json").write_text(json.dumps(config))
    changed = config | {"rotary_dim": 48}
    ours = load(folder).model.config
    (folder / "config.json").write_text(json.dumps(changed))
    assert load(folder).model.config == ours


@pytest.mark.parametrize(("family", "field"), [("llama", "top"), ("cohere", "top"), ("cohere", "table")])
def test_a_part_of_the_dims_that_the_family_would_not_look_at(family: str, field: str, tmp_path: Path) -> None:
    def partial(config: Fields, tensors: Tensors) -> Tensors:
        (config if field == "top" else config["rope_parameters"])["partial_rotary_factor"] = 0.5
        return tensors

    with pytest.raises(ConfigError, match=r"'partial_rotary_factor'.*0\.5"):
        load(rewritten(family, "plain", tmp_path / "partial", partial))
    data = imported(family, "plain").model.config.resolved().dump()
    for layer in data["layers"]:
        layer["mixer"]["position"]["rotary_dim"] = 4
    paths = [mismatch.path for mismatch in match_family(heddle.load_config(data), families()[family]).mismatches]
    assert paths == ["layers.*.mixer.position.rotary_dim"]


def test_an_export_names_lengths_and_tokens_that_mean_no_other_design(tmp_path: Path) -> None:
    """A table that was made longer is told; tokens that nobody named are null, not the family's own."""
    source = imported("gpt2", "plain")
    longer = heddle.build(heddle.load_config(source.model.config.dump(), ["embedding.position.length=200"]))
    export(longer, tmp_path / "gpt2", imported=source)
    assert read_json(tmp_path / "gpt2")["n_positions"] == 200
    export(imported("gptj", "plain").model, tmp_path / "gptj", imported=imported("gptj", "plain"))
    assert read_json(tmp_path / "gptj")["n_positions"] == 128
    model = imported("phi3", "plain").model
    drop = [f"layers.0.{field}" for field in ("mixer.window=9", "mixer.position.rotary_dim=4")]
    other = heddle.build(heddle.load_config(model.config.dump(), drop)).eval()
    assert export(other, tmp_path / "phi3").family.model_type == "phi3"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "phi3").eval()  # padding 32000 would not be in 97
    assert theirs.config.pad_token_id is None
    tokens, mask, _ = batch()
    assert distance(theirs, other) <= 1e-5
    assert torch.isfinite(their_logits(theirs, tokens, mask)).all()


@pytest.mark.parametrize("size", [12288, 700, 64])
@pytest.mark.parametrize("multiple", [256, 7])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_adjusted_width_of_lfm2_is_that_of_transformers(size: int, multiple: int, factor: float) -> None:
    fields: Fields = {"hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 9}
    fields |= {"block_ff_dim": size, "block_multiple_of": multiple, "block_ffn_dim_multiplier": factor}
    fields |= {"full_attn_idxs": [1], "conv_bias": False, "num_key_value_heads": 1}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **fields))
    design = design_from_config(fields, families()["lfm2"])
    kinds = [layer.mixer.kind for _, layer in design.expand() if layer.mixer is not None]
    assert kinds == ["short_conv", "attention", "short_conv"]
    feedforward = design.layers[0].feedforward
    assert isinstance(feedforward, GatedConfig)
    assert feedforward.hidden == theirs.model.layers[0].feed_forward.w1.out_features


def test_older_names_of_nemotron_h_are_read() -> None:
    newer = AutoConfig.for_model("nemotron_h", hybrid_override_pattern="M-*E").to_dict()
    assert newer["layers_block_type"] == ["linear_attention", "mlp", "full_attention", "moe"]
    fields = {"vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    read = [
        design_from_config(fields | types, families()["nemotron_h"])
        for types in (
            {"layers_block_type": newer["layers_block_type"]},
            {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
            {"hybrid_override_pattern": "M-*E"},
        )
    ]
    assert read[0] == read[1] == read[2]
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        design_from_config(fields | {"hybrid_override_pattern": "MX"}, families()["nemotron_h"])
    with pytest.raises(ConfigError, match="moe_latent_size"):
        design_from_config(fields | {"hybrid_override_pattern": "ME", "moe_latent_size": 64}, families()["nemotron_h"])
