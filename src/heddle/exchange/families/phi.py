"""Microsoft's Phi, from parallel branches to Llama's decoder with fused projections, and to experts."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _moe, glm, gpt, mistral
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import ORIGINAL_LENGTH, read_rope
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


MIXER = "sparse_mixer"
SHORT_SCALE, LONG_SCALE = "short_mscale", "long_mscale"


def read_phimoe(config: ConfigReader) -> dict[str, Any]:
    """Phi-3.5-MoE (Abdin et al. 2024): LayerNorm, biases, and SparseMixer's two experts of 16.

    `short_mscale` and `long_mscale`, the factors of LongRoPE's cosines, must be equal. Beyond the original length
    transformers keeps the short factors of frequencies, heddle uses the long ones. The router's training noise is not
    built.
    """
    config.note("input_jitter_noise")
    config.expect("hidden_dropout", 0.0, None)
    config.expect("num_experts_per_tok", 2, default=2)  # its class ignores others
    heads = _common.read_heads(config)
    mixer = _common.attention(config, heads, _read_mixed_rope(config, heads["head_dim"]))
    mixer |= {"bias": config.get("attention_bias", False), "window": config.optional("sliding_window")}
    noise = config.get("router_jitter_noise", 0.01)
    if noise <= 0:
        raise config.invalid("router_jitter_noise", "should be above 0, since gates are softmaxes over near logits")
    experts = _moe.read_experts(config, config.require("num_hidden_layers", int))
    experts |= {"routing": MIXER, "renormalize": False, "router_tolerance": 2 * noise}
    layers = _common.same_layers(config, mixer, experts)
    head = {"tied": config.get("tie_word_embeddings", False), "bias": config.get("lm_head_bias", False)}
    return _common.layer_norm_design(config, layers, eps="rms_norm_eps", head=head)


def _read_mixed_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    table = config.optional("rope_scaling") or config.optional("rope_parameters") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "longrope", "su"):
        raise config.invalid("rope_parameters", "this family has rope_type default or longrope only")
    plain = {name: value for name, value in table.items() if name not in (SHORT_SCALE, LONG_SCALE)}
    if kind != "default":
        scale = table.get(SHORT_SCALE)
        if not isinstance(scale, int | float) or table.get(LONG_SCALE) != scale:
            raise config.invalid("rope_parameters", f"heddle builds one factor: make {LONG_SCALE} equal {SHORT_SCALE}")
        plain["attention_factor"] = float(scale)
    inner = ConfigReader({**config.data, "rope_parameters": plain, "rope_scaling": None}, config.source)
    config.unread -= {"rope_theta", "rope_parameters", ORIGINAL_LENGTH}
    return read_rope(inner, head_dim, 1e6)


def write_phimoe(design: ModelConfig) -> dict[str, Any]:
    mixer, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    rope = design_parts.rope_of(mixer)
    scaling = rope.scaling if isinstance(rope.scaling, LongropeConfig) else None
    fields = _common.write_common(design) | _common.write_attention(design, rope.replace(scaling=scaling))
    if scaling is not None:
        scales = dict.fromkeys((SHORT_SCALE, LONG_SCALE), scaling.attention_factor or 1.0)
        for name in ("rope_parameters", "rope_scaling"):
            fields[name] = _common.without(fields[name], "factor", "attention_factor") | scales
    return (
        fields
        | _moe.write_experts(design)
        | _moe.write_aux_loss(design, moe)
        | {
            "num_experts_per_tok": 2,
            "router_jitter_noise": (moe.router_tolerance or 0.02) / 2,
            "sliding_window": mixer.window,
            "lm_head_bias": design.head.bias,
        }
        | _common.written(design, "attention_bias", "rms_norm_eps")
    )


def map_phimoe(design: ModelConfig, weights: WeightMap) -> None:
    """Mixtral's names, and a bias of the head."""
    mistral.map_mixtral(design, weights)
    weights.add_tensor("lm_head.bias", "head.bias")


PHIMOE = Family("phimoe", "PhimoeForCausalLM", read_phimoe, write_phimoe, map_phimoe)
