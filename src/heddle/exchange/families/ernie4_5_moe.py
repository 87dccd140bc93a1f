"""ERNIE 4.5's mixtures (Baidu 2025): the dense models' attention, and softmax experts chosen with a balancing bias.

Multi-token modules (`model.mtp`) are ignored: their layer is dense and no norm follows it, unlike heddle's.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _layer_types, _moe, ernie4_5
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.model.config import ModelConfig

# The balancing bias, stored for one group of experts.
ONE_GROUP = TensorTransform(lambda parameters: parameters[0].unsqueeze(0), lambda tensor, shapes: [tensor.squeeze(0)])


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`use_bias`: of the head and all projections except the routed experts'. The balancing bias stays as loaded."""
    config.require("num_key_value_heads", int)
    bias, sparse = config.get("use_bias", False), _read_sparse(config)
    config.expect("moe_gate_act", "softmax", None)
    config.note("moe_norm_min")  # the least sum of the chosen gates, which softmax never reaches
    mixer = ernie4_5.read_mixer(config, bias)
    top_k = config.require("moe_k", int, "num_experts_per_tok")
    experts = {
        "kind": "moe",
        "experts": config.require("moe_num_experts", int, "num_experts"),
        "top_k": top_k,
        "hidden": config.require("moe_intermediate_size", int),
        "activation": _common.read_activation(config),
        "shared": config.get("moe_num_shared_experts", 2) or None,
        "bias": "shared" if bias else False,
        "bias_update": 0.0,
        **_moe.read_aux_loss(config, top_k, sum(sparse)),
    }
    dense = _common.read_gated(config, bias=bias)
    layers = [{"mixer": mixer, "feedforward": experts if is_sparse else dense} for is_sparse in sparse]
    head = {"tied": config.get("tie_word_embeddings", True), "bias": bias}
    return _common.rms_design(config, 1e-5, _layer_types.merge_repeats(layers), head=head)


def _read_sparse(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts: every `interval`-th one from `start` to `end`; -1 is the last."""
    depth = _layer_types.read_depth(config)
    start, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    interval = config.get("moe_layer_interval", 1)
    if interval < 1:
        raise config.invalid("moe_layer_interval", "should be at least 1")
    last = depth - 1 if end == -1 else end
    return [start <= index <= last and (index + 1) % interval == 0 for index in range(depth)]


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, dense = design_parts.first_moe(design), design_parts.first_gated(design)
    sparse = [index for index, is_sparse in enumerate(design_parts.has_experts(design)) if is_sparse]
    fields = _common.write_decoder(design)
    del fields["attention_dropout"]  # it has none
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return (
        fields
        | {
            "use_bias": fields.pop("attention_bias") or dense.bias,
            "hidden_act": design_parts.HF_ACTIVATIONS[(moe.activation if sparse else dense.activation) or "silu"],
            "moe_num_experts": moe.experts,
            "moe_k": moe.top_k,
            "moe_intermediate_size": moe.hidden,
            "moe_num_shared_experts": _deepseek.shared_experts(moe) if moe.shared else 0,
            "moe_layer_start_index": sparse[0] if sparse else design.depth,
            "moe_layer_end_index": sparse[-1] if sparse else design.depth,
            "moe_layer_interval": interval,
        }
        | _moe.write_aux_loss(design, moe)
    )


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_experts")
    bias, published = f"{hf}.gate.moe_statics.e_score_correction_bias", f"{hf}.moe_statics.e_score_correction_bias"
    if f"{heddle}.router.expert_bias" in weights.shapes:
        weights.add_tensor(published, f"{heddle}.router.expert_bias", transform=ONE_GROUP)
        weights.add_renamed(bias, published)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the experts'."""
    _common.map_weights(design, weights, map_feedforward=_map_feedforward)
    weights.add_tensor("lm_head.bias", "head.bias")


FAMILY = Family(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", read_config, write_config, map_weights, ignored_tensors=("model.mtp",)
)
