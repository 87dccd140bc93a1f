"""Microsoft's Phi, from parallel branches to Llama's decoder with fused projections."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, glm, gpt
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.scalings.longrope import LongropeConfig

PHI_ROTARY_FACTOR = 0.5  # if the config has none
LAYER = {
    "input_layernorm": "residual.norms.shared", "self_attn.q_proj": "mixer.q", "self_attn.k_proj": "mixer.k",
    "self_attn.v_proj": "mixer.v", "self_attn.dense": "mixer.out", "self_attn.q_layernorm": "mixer.q_norm",
    "self_attn.k_layernorm": "mixer.k_norm", "mlp.fc1": "feedforward.up", "mlp.fc2": "feedforward.down",
}  # fmt: skip


def read_phi(config: ConfigReader) -> dict[str, Any]:
    """Phi 1, 1.5 and 2 (Gunasekar et al. 2023): both branches read one norm, partial RoPE, biases everywhere."""
    width = config.require("hidden_size", int)
    mixer = _common.read_attention(config, partial_rotary_factor=PHI_ROTARY_FACTOR, bias=True)
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


def write_phi(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_phi` reads. With norms of q and k, transformers requires head_dim = width / heads."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    config = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=PHI_ROTARY_FACTOR)
    if mixer.qk_norm is not None and mixer.head_dim != design.width // mixer.heads:
        del config["head_dim"]
    return config | {
        "qk_layernorm": mixer.qk_norm is not None,
        **_common.written(design, "embd_pdrop", "resid_pdrop"),
        "intermediate_size": feedforward.hidden,
        "hidden_act": gpt.hf_activation(feedforward.activation),
        "layer_norm_eps": design_parts.norm_eps(design),
    }


def map_phi(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of q, k and v, and Phi's own names."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    weights.add_module("lm_head", "head")
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_modules(hf, heddle, LAYER)


PHI = Family("phi", "PhiForCausalLM", read_phi, write_phi, map_phi)


PHI3_ORIGINAL_LENGTH = 4096  # if the config has no original_max_position_embeddings


def read_phi3(config: ConfigReader) -> dict[str, Any]:
    """Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, a window, partial RoPE, LongRoPE's scaling."""
    heads = _common.read_heads(config)
    config.expect("attention_bias", False, default=False)
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini: 1 is off
        config.expect(name, 1, default=1)
    position = read_rope(config, heads["head_dim"], partial_rotary_factor=1.0, original_length=PHI3_ORIGINAL_LENGTH)
    if position.get("scaling", {}).get("kind", "longrope") != "longrope":
        raise config.invalid("rope_parameters", "a Phi-3 model has rope_type default or longrope only")
    mixer = _common.attention(config, heads, position, window=config.optional("sliding_window"))
    return _common.rms_design(
        config,
        1e-5,
        _common.same_layers(config, mixer, _common.read_gated(config)),
        embedding={"dropout": config.get("embd_pdrop", 0.0)},
        residual={"kind": "pre_norm", "dropout": config.get("resid_pdrop", 0.0)},
    )


def write_phi3(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_phi3` reads.

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
        **_common.written(design, "sliding_window", "embd_pdrop", "resid_pdrop"),
        **_common.write_gated(design),
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def map_phi3(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with q, k and v in one matrix, and gate and up in another."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_module(f"{hf}.self_attn.qkv_proj", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_module(f"{hf}.self_attn.o_proj", f"{heddle}.mixer.out")
        glm.map_gated(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


PHI3 = Family("phi3", "Phi3ForCausalLM", read_phi3, write_phi3, map_phi3)
