"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023): both branches read one norm, partial RoPE, biases everywhere."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_ROTARY_FACTOR = 0.5  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    width = config.require("hidden_size", int)
    mixer = _common.read_attention(config, partial_rotary_factor=DEFAULT_ROTARY_FACTOR, bias=True)
    rotary_dim = mixer["position"].get("rotary_dim", mixer["head_dim"])
    config.expect("rotary_dim", rotary_dim, default=rotary_dim)  # Phi-1 says it twice
    has_qk_norm = config.get("qk_layernorm", False)
    if has_qk_norm and mixer["head_dim"] != width // mixer["heads"]:
        raise config.invalid("head_dim", f"with 'qk_layernorm' it must be {width // mixer['heads']} here")
    mixer["qk_norm"] = "head" if has_qk_norm else None
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)},
        _common.same_layers(config, mixer, _common.read_mlp(config, "gelu_new", bias=True)),
        embedding={"dropout": config.get("embd_pdrop", 0.0)},
        residual={"kind": "parallel", "norms": 1, "dropout": config.get("resid_pdrop", 0.0)},
        head={"tied": config.get("tie_word_embeddings", False), "bias": True},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads. With norms of q and k, transformers requires head_dim = width / heads."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    config = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
    if mixer.qk_norm is not None and mixer.head_dim != design.width // mixer.heads:
        del config["head_dim"]
    return config | {
        "qk_layernorm": mixer.qk_norm is not None,
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        "intermediate_size": feedforward.hidden,
        "hidden_act": _gpt.hf_activation(feedforward.activation),
        "layer_norm_eps": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of q, k and v, and Phi's own names."""
    weights.add_module("model.embed_tokens", "embed")
    weights.add_module("model.final_layernorm", "final_norm.norm")
    weights.add_module("lm_head", "head")
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.shared")
        for role in ("q", "k", "v"):
            weights.add_module(f"{hf}.self_attn.{role}_proj", f"{heddle}.mixer.{role}")
        weights.add_module(f"{hf}.self_attn.dense", f"{heddle}.mixer.out")
        for role in ("q", "k"):
            weights.add_module(f"{hf}.self_attn.{role}_layernorm", f"{heddle}.mixer.{role}_norm")
        weights.add_module(f"{hf}.mlp.fc1", f"{heddle}.feedforward.up")
        weights.add_module(f"{hf}.mlp.fc2", f"{heddle}.feedforward.down")


FAMILY = Family("phi", "PhiForCausalLM", read_config, write_config, map_weights)
