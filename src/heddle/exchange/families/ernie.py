"""Baidu's ERNIE 4.5, dense and with experts: interleaved RoPE, and biases everywhere or nowhere."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek
from heddle.exchange.family import Family, WeightMap, reshaped
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_ernie(config: ConfigReader) -> dict[str, Any]:
    """ERNIE 4.5's dense models (Baidu 2025): Llama with tied embeddings, interleaved RoPE, and biases or none."""
    # `use_bias` applies to every projection.
    bias = config.get("use_bias", False)
    config.expect("compression_ratio", 1.0, default=1.0)  # of positions, in the first files
    mixer, feedforward = read_mixer(config, bias, head_dim=128), _common.read_gated(config, bias=bias)
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward), tied=True)


def read_mixer(config: ConfigReader, bias: bool, head_dim: int | None = None) -> dict[str, Any]:
    """The attention of every layer; `head_dim` is the family's default."""
    heads = _common.read_heads(config, head_dim)
    position = read_rope(config, heads["head_dim"], 500000.0) | {"layout": "interleaved"}
    return {"kind": "attention", **heads, "bias": bias, "position": position}


def write_ernie(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(_common.write_decoder(design), "attention_dropout")  # it has none
    return fields | {"use_bias": fields.pop("attention_bias") or design_parts.first_gated(design).bias}


ERNIE = Family("ernie4_5", "Ernie4_5ForCausalLM", read_ernie, write_ernie, _common.map_weights)


# The balancing bias, stored for one group of experts.
ONE_GROUP = reshaped(1, -1)


def read_ernie_moe(config: ConfigReader) -> dict[str, Any]:
    """ERNIE 4.5's mixtures (Baidu 2025): the dense models' attention, and softmax experts chosen with a balancing bias.

    Multi-token modules (`model.mtp`) are ignored: their layer is dense and no norm follows it, unlike heddle's.
    """
    # `use_bias`: of the head and all projections except the routed experts'. The balancing bias stays as loaded.
    config.require("num_key_value_heads", int)
    bias, sparse = config.get("use_bias", False), _read_sparse(config)
    config.expect("moe_gate_act", "softmax", None)
    config.note("moe_norm_min")  # the least sum of the chosen gates, which softmax never reaches
    mixer = read_mixer(config, bias)
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
    layers = _layer_types.layers_of([mixer] * len(sparse), [experts if is_sparse else dense for is_sparse in sparse])
    head = {"tied": config.get("tie_word_embeddings", True), "bias": bias}
    return _common.rms_design(config, 1e-5, layers, head=head)


def _read_sparse(config: ConfigReader) -> list[bool]:
    """Whether each layer has experts: every `interval`-th one from `start` to `end`; -1 is the last."""
    depth = _layer_types.read_depth(config)
    start, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    interval = config.get("moe_layer_interval", 1)
    if interval < 1:
        raise config.invalid("moe_layer_interval", "should be at least 1")
    last = depth - 1 if end == -1 else end
    return [start <= index <= last and (index + 1) % interval == 0 for index in range(depth)]


def write_ernie_moe(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    sparse = [index for index, is_sparse in enumerate(design_parts.has_experts(design)) if is_sparse]
    return write_ernie(design) | {
        "hidden_act": _moe.write_activation(design),
        "moe_num_experts": moe.experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.hidden,
        "moe_num_shared_experts": deepseek.shared_experts(moe) if moe.shared else 0,
        "moe_layer_start_index": sparse[0] if sparse else design.depth,
        "moe_layer_end_index": sparse[-1] if sparse else design.depth,
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        **_moe.write_aux_loss(design, moe),
    }


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_experts")
    bias, published = f"{hf}.gate.moe_statics.e_score_correction_bias", f"{hf}.moe_statics.e_score_correction_bias"
    if f"{heddle}.router.expert_bias" in weights.shapes:
        weights.add_tensor(published, f"{heddle}.router.expert_bias", transform=ONE_GROUP)
        weights.add_renamed(bias, published)


def map_ernie_moe(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the experts'."""
    _common.map_weights(design, weights, map_feedforward=_map_feedforward)
    weights.add_tensor("lm_head.bias", "head.bias")


ERNIE_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    read_ernie_moe,
    write_ernie_moe,
    map_ernie_moe,
    ignored_tensors=("model.mtp",),
)
