"""Hunyuan dense models and Hunyuan-MT (Tencent 2025): Llama's decoder with norms of q and k after the rotation.

A `rope_type: dynamic` with `alpha` is `ntk` with the factor alpha, whatever the length of the text; `factor` and the
other fields beside `alpha` are ignored, as in transformers.
"""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope, read_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.scalings.ntk import NtkConfig

ALPHA = "alpha"
UNUSED_FIELDS = frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    layer = {"repeat": _layer_types.read_depth(config), "mixer": read_mixer(config)}
    return _common.rms_design(config, 1e-5, [layer | {"feedforward": _common.read_gated(config)}])


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The attention of every layer. `attention_bias` gives biases to all four projections."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    config.expect("use_qk_norm", True, None)
    config.get("pretraining_tp", 1)  # as in Llama
    config.expect("use_cla", False, None)
    config.note("cla_share_factor", "org_vocab_size")
    return {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "norm_after_rotation": True,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "position": _read_rope(config, heads["head_dim"]),
    }


def _read_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    table = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    is_table = isinstance(table, dict) and "dynamic" in (table.get("rope_type"), table.get("type"))
    if not (is_table and table.get(ALPHA)):
        return read_rope(config, head_dim)
    alpha = ConfigReader(table, f"{config.source}, rope_parameters").require(ALPHA, float)
    config.unread -= {"rope_scaling", "rope_parameters"}
    plain = {name: value for name, value in table.items() if name not in UNUSED_FIELDS | {ALPHA, "type"}}
    theta = config.get("rope_theta", 10000.0)
    rope = read_rope_table(config, plain | {"rope_type": "default"}, head_dim, theta)
    return rope | {"scaling": {"kind": "ntk", "factor": alpha}}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    data = _common.write_decoder(design)
    scaling = design_parts.rope_of(design_parts.first_attention(design)).scaling
    if isinstance(scaling, NtkConfig) and scaling.original_length is None:
        data["rope_parameters"] |= {"factor": 1.0, ALPHA: scaling.factor}
        data["rope_scaling"] |= {"factor": 1.0, ALPHA: scaling.factor}
    return data


def map_weights(
    design: ModelConfig, weights: WeightMap, map_feedforward: _common.MapModule = _common.map_gated
) -> None:
    """Llama's tensor names, and longer ones of the norms of q and k."""
    map_mixer = partial(_common.map_attention, norms=("query_layernorm", "key_layernorm"))
    _common.map_weights(design, weights, map_feedforward=map_feedforward, map_mixer=map_mixer)


FAMILY = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read_config, write_config, map_weights)
