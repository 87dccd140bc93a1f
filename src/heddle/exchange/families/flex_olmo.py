"""FlexOlmo (Shi et al. 2025): OLMo 2 with experts in every layer, each trained apart on data of its own."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, olmo2, olmoe
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

DEFAULT_THETA = 5e5


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    mixer, depth = olmo2.read_mixer(config), _layer_types.read_depth(config)
    mixer["position"] = read_rope(config, mixer["head_dim"], DEFAULT_THETA) | olmo2.ROPE_CAST
    experts = _moe.read_experts(config, depth, default_loss=olmoe.DEFAULT_AUX_LOSS)
    experts["renormalize"] = config.get("norm_topk_prob", False)
    return olmo2.read_design(config, [mixer] * depth, experts, eps=1e-6)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe = design_parts.first_moe(design)
    own = {"norm_topk_prob": moe.renormalize} | _moe.write_aux_loss(design, moe)
    return _common.write_decoder(design) | _moe.write_experts(design) | own


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """OLMo 2's tensor names, and the experts'."""
    _common.map_weights(design, weights, olmo2.map_norms, _moe.map_feedforward)


FAMILY = Family("flex_olmo", "FlexOlmoForCausalLM", read_config, write_config, map_weights)
