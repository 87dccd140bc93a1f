"""Hy3 (Tencent 2026): Qwen3's attention, and DeepSeek-V3's experts, whose gates always sum to a constant.

Layers that predict further tokens are ignored; they do not change the next token's logits.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _layer_types, _moe, exaone_moe
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_THETA = 11_158_840.0
NAMES = exaone_moe.NAMES | {"routed_scaling_factor": "router_scaling_factor"}
ROUTING = {"routing": "sigmoid", "renormalize": True, "bias_update": 0.0}
# Of the first files: what the class of transformers always has.
ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value. `mlp_bias` is of dense layers and shared experts."""
    config.names = NAMES
    for name in ALWAYS:
        config.expect(name, None, True)
    for name in ("enable_moe_fp32_combine", "num_nextn_predict_layers"):  # the first one rounds a sum
        config.optional(name)
    bias = {"bias": config.get("attention_bias", False)}
    mixer = _common.read_attention(config, DEFAULT_THETA, head_dim=128, qk_norm="head", **bias)
    config.expect("first_k_dense_replace", None, 1)
    feedforwards = _deepseek.read_feedforwards(config, ROUTING, 1, config.get("mlp_bias", False))
    layers = [{"mixer": mixer, "feedforward": feedforward} for feedforward in feedforwards]
    return _common.rms_design(config, 1e-5, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, sparse = design_parts.first_moe(design), any(design_parts.has_experts(design))
    bias = moe.bias is not False if sparse else design_parts.first_gated(design).bias
    fields = _common.write_decoder(design) | _deepseek.write_feedforwards(design, NAMES) | {"mlp_bias": bias}
    return {name: value for name, value in fields.items() if name not in ("aux_loss_alpha", "seq_aux")}


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_mlp", "router.gate")
    weights.add_tensor(f"{hf}.expert_bias", f"{heddle}.router.expert_bias")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the experts'."""
    _common.map_weights(design, weights, map_feedforward=_map_feedforward)


FAMILY = Family(
    "hy_v3", "HYV3ForCausalLM", read_config, write_config, map_weights, ignored_tensors=("model.layers.{depth}.",)
)
