"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's latent attention and experts, with a list of which layers are dense.

Multi-token modules (`num_nextn_predict_layers`) are read where the weights hold them, as further layers.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _layer_types
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    layout = "interleaved" if config.get("rope_interleave", True) else "half"
    mixer = _deepseek.read_attention(config, layout, query_rank=768)
    config.expect("first_k_dense_replace", 1, default=1)
    return _common.rms_design(config, 1e-5, read_layers(config, mixer, dense=1))


def read_layers(config: ConfigReader, mixer: dict[str, Any], dense: int) -> list[dict[str, Any]]:
    """Layers that `mlp_layer_types` says are dense or mixtures; where it is absent, the first `dense` are dense."""
    config.expect("moe_layer_freq", 1, default=1)
    feedforwards = _deepseek.read_feedforwards(config, _deepseek.read_sigmoid_routing(config), dense, bias=False)
    return _layer_types.merge_repeats([{"mixer": mixer, "feedforward": each} for each in feedforwards])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    rope = design_parts.rope_of(design_parts.first_latent_attention(design))
    fields = _deepseek.write_common(design) | _deepseek.write_sigmoid_routing(design)
    for name in ("first_k_dense_replace", "moe_layer_freq", "head_dim"):
        del fields[name]
    return fields | _deepseek.write_feedforwards(design, {}) | {"rope_interleave": rope.layout == "interleaved"}


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    read_config,
    write_config,
    _deepseek.map_weights,
    ignored_tensors=("model.layers.{depth}.",),
    multi_token=_deepseek.MODULES,
)
