"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, a window, partial RoPE and LongRoPE's scaling."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.scalings.longrope import LongropeConfig

DEFAULT_ORIGINAL_LENGTH = 4096  # if the config has no original_max_position_embeddings


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, with or without a window."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    config.expect("attention_bias", False, default=False)
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini: 1 is off
        config.expect(name, 1, default=1)
    position = read_rope(config, heads["head_dim"], partial_rotary_factor=1.0, original_length=DEFAULT_ORIGINAL_LENGTH)
    if position.get("scaling", {}).get("kind", "longrope") != "longrope":
        raise config.invalid("rope_parameters", "a Phi-3 model has rope_type default or longrope only")
    mixer = {
        "kind": "attention",
        **heads,
        "window": config.optional("sliding_window"),
        "dropout": config.get("attention_dropout", 0.0),
        "position": position,
    }
    feedforward = _common.read_gated(config)
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-5)},
        [{"repeat": config.require("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}],
        embedding={"dropout": config.get("embd_pdrop", 0.0)},
        residual={"kind": "pre_norm", "dropout": config.get("resid_pdrop", 0.0)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads.

    max_position_embeddings is factor · original length, because older readers compute the factor from the two.
    """
    mixer = design_parts.first_attention(design)
    rope = design_parts.rope_of(mixer)
    scaling = rope.scaling if isinstance(rope.scaling, LongropeConfig) else None
    config = _common.write_common(design) | _common.write_attention(
        design, rope.replace(scaling=scaling), partial_rotary_factor=1.0
    )
    if scaling is not None:
        if mixer.head_dim != design.width // mixer.heads:
            del config["head_dim"]  # the check of the factors in transformers ignores it
        config["max_position_embeddings"] = round(scaling.original_length * (scaling.factor or 1.0))
    return config | {
        "sliding_window": design_parts.first_window(design),
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        **_common.write_gated(design),
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with q, k and v in one matrix, and gate and up in another."""
    _common.map_embedding_and_head(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.self_attn.qkv_proj", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_module(f"{hf}.self_attn.o_proj", f"{heddle}.mixer.out")
        weights.add_module(f"{hf}.mlp.gate_up_proj", f"{heddle}.feedforward.gate", f"{heddle}.feedforward.up")
        weights.add_module(f"{hf}.mlp.down_proj", f"{heddle}.feedforward.down")
        _common.map_pre_norms(weights, hf, heddle)


FAMILY = Family("phi3", "Phi3ForCausalLM", read_config, write_config, map_weights)
