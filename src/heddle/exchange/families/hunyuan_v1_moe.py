"""Hunyuan-A13B (Tencent 2025): the dense models' attention, softmax experts and a shared one in every layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, hunyuan_v1_dense
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; `num_experts` and others may be lists with one number for each layer."""
    depth = _layer_types.read_depth(config)
    config.expect("use_mixed_mlp_moe", True, None)
    config.expect("moe_layer_num_skipped", 0, None)
    config.get("output_router_logits", False)
    hidden = config.require("intermediate_size", int)
    experts = {
        "kind": "moe",
        "experts": _read_equal(config, "num_experts", depth, 1),
        "top_k": _read_equal(config, "moe_topk", depth, 1),
        "hidden": hidden,
        "activation": _common.read_activation(config),
        "shared": 1,
    }
    for name, value in (("moe_intermediate_size", hidden), ("num_shared_expert", 1)):
        if _read_equal(config, name, depth, value) != value:
            raise config.invalid(name, f"models of this family have {value}")
    layer = {"repeat": depth, "mixer": hunyuan_v1_dense.read_mixer(config), "feedforward": experts}
    return _common.rms_design(config, 1e-5, [layer])


def _read_equal(config: ConfigReader, name: str, depth: int, default: int) -> int:
    """A number, or the one that stands in a list for every layer."""
    value = config.optional(name)
    values = value if isinstance(value, list) else [default if value is None else value] * depth
    if len(values) != depth or len(set(values)) != 1 or type(values[0]) is not int:
        raise config.invalid(name, f"should be a whole number, or {depth} equal ones")
    number: int = values[0]
    return number


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe = design_parts.first_moe(design)
    return hunyuan_v1_dense.write_config(design) | {
        "num_experts": moe.experts,
        "moe_topk": moe.top_k,
        "intermediate_size": moe.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
    }


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    if f"{heddle}.router.weight" in weights.shapes:
        _moe.map_experts(weights, hf, heddle)
        weights.add_tensor(f"{hf}.gate.wg.weight", f"{heddle}.router.weight")
        del weights.rules[f"{hf}.gate.weight"]
        _common.map_gated(weights, f"{hf}.shared_mlp", f"{heddle}.shared")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The dense models' tensor names, except for the experts."""
    hunyuan_v1_dense.map_weights(design, weights, _map_experts)


FAMILY = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_config, write_config, map_weights)
