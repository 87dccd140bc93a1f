"""Ling 3.0 (Ant Group 2026): Kimi Delta Attention with full-rank gates or latent attention with a gate for each head.

Experts are DeepSeek-V3's. Files written by transformers have the sizes of the delta rule in separate fields
(`linear_head_dim`), which take precedence; published files have them in `head_dim`.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe, deepseek, kimi_linear
from heddle.exchange.family import WeightMap
from heddle.exchange.rope import FULL, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.kda import KDAConfig

LINEAR = _layer_types.LINEAR
SIZES = {  # of the delta rule: the field of its own, the model's, and the default
    "heads": ("linear_num_heads", "num_attention_heads", 32), "head_dim": ("linear_head_dim", "head_dim", 128),
    "conv_kernel": ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
}  # fmt: skip
DELTA = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "b_proj": "beta", "f_proj": "decay_up", "g_proj": "gate_up",
    "dt_bias": "decay.bias", "A_log": "decay.rate", "o_norm": "norm", "dense": "out",
}  # fmt: skip
LATENTS = {"q_proj": "q", "kv_a_layernorm": "kv_norm", "g_proj": "gate", "dense": "out"}
ROUTING = _common.Fields(
    scale=("routed_scaling_factor", 2.5), renormalize=("moe_renormalize", True, "norm_topk_prob"),
    groups=("num_expert_group", 8, "n_group"), top_groups=("topk_group", 4),
)  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    depth, eps = _layer_types.read_depth(config), config.get("rms_norm_eps", 1e-6)
    config.expect("q_lora_rank", None)
    config.expect("tie_word_embeddings", False, default=False)  # transformers would not tie them
    config.expect("hidden_act", "silu", default="silu")  # the delta rule's convolution uses it too
    config.note("num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor")
    config.get("output_router_logits", False)
    config.get("pretraining_tp", 1)
    period = config.get("layer_group_size", 6)
    usual = [LINEAR if (index + 1) % max(period, 1) else FULL for index in range(depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    sizes = {own: config.get(name, config.get(whole, size)) for own, (name, whole, size) in SIZES.items()}
    bound = -config.get("kda_lower_bound", -5.0)
    if bound <= 0:
        raise config.invalid("kda_lower_bound", "should be below 0")
    bounded = {"decay_bound": bound} if config.get("kda_safe_gate", True) else {}
    delta = {"kind": "kda", **sizes, **bounded, "full_gates": True, "norm": {"kind": "rms", "eps": eps}}
    rope = deepseek.read_latent_rope(config, config.require("qk_rope_head_dim", int), 6e6)
    latent = deepseek.read_latents(config, query_rank=None) | {"gate": "head"}
    mixers = {LINEAR: delta, FULL: latent | {"position": rope | {"layout": "interleaved"}}}
    layers = _layer_types.layers_of([mixers[kind] for kind in types], _read_feedforwards(config, depth))
    return _common.rms_design(config, eps, layers)


def _read_feedforwards(config: ConfigReader, depth: int) -> list[dict[str, Any]]:
    """The feed-forward of each layer: the first `first_k_dense_replace` are dense, or `mlp_layer_types` says which."""
    dense_layers = config.get("first_k_dense_replace", 2)
    usual = [DENSE if index < dense_layers else SPARSE for index in range(depth)]
    types = _layer_types.read_kinds(config, "mlp_layer_types", usual, (DENSE, SPARSE))
    feedforwards = {DENSE: _common.read_gated(config), SPARSE: kimi_linear.read_experts(config, ROUTING)}
    return [feedforwards[kind] for kind in types]


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    delta, moe = design_parts.first_mixer(design, KDAConfig(heads=1)), design_parts.first_moe(design)
    latent, common = design_parts.first_latent_attention(design), _common.write_common(design)
    length, bound = common.pop("max_position_embeddings"), delta.decay_bound
    rope = write_rope(design_parts.rope_of(latent), latent.rope_dim or 2, _common.DEFAULT_MAX_POSITIONS)
    return (
        common
        | _common.without(deepseek.write_latents(latent), "q_lora_rank")
        | _common.without(rope, "max_position_embeddings")
        | {
            "model_max_length": length,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": design_parts.norm_eps(design),
            "layer_types": _layer_types.types_of(design, KDAConfig),
            **{name: getattr(delta, own) or design.width for own, (name, *_) in SIZES.items()},
            "head_dim": delta.head_dim or design.width,
            "short_conv_kernel_size": delta.conv_kernel,
            "kda_safe_gate": bound is not None,
            **({} if bound is None else {"kda_lower_bound": -bound}),
            "intermediate_size": design_parts.first_gated(design).hidden,
            "mlp_layer_types": design_parts.mlp_layer_types(design),
            **kimi_linear.EXPERTS.write(moe),
            "num_shared_experts": deepseek.shared_experts(moe),
            **ROUTING.write(moe),
            "num_nextn_predict_layers": 0,
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Published names: one convolution for each of q, k and v, and DeepSeek-V3's names of experts."""
    _common.map_embedding_and_head(design, weights, embedding="model.word_embeddings")
    for hf, heddle, layer in _common.named_layers(design, deepseek.MODULES):
        attention, mixer = f"{hf}.attention", f"{heddle}.mixer"
        if isinstance(layer.mixer, KDAConfig):
            weights.add_modules(attention, mixer, DELTA)
            kimi_linear.map_convolutions(weights, attention, mixer)
        else:
            deepseek.map_attention(weights, attention, mixer, getattr(layer.mixer, "heads", 1), LATENTS)
        _moe.map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward", "shared_experts")
        weights.add_tensor(f"{hf}.mlp.gate.expert_bias", f"{heddle}.feedforward.router.expert_bias")
        _common.map_pre_norms(weights, hf, heddle)


FAMILY = deepseek.with_modules("bailing_hybrid", "BailingHybridForCausalLM", read_config, write_config, map_weights)
