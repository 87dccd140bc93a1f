"""MiMo-V2-Flash (Xiaomi 2025): windows with sinks and twice the key heads, values times a constant.

Experts are DeepSeek-V3's without shared ones.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, deepseek
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, ORIGINAL_LENGTH, SLIDING, read_rope_table, write_rope_table
from heddle.model.config import ModelConfig

DEFAULT_WINDOW, DEFAULT_ROTARY_FACTOR, DEFAULT_VALUE_SCALE = 129, 0.334, 0.707
THETAS = {FULL: 5e6, SLIDING: 1e4}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value: `bias_update` is 0."""
    heads = _common.read_heads(config, head_dim=192)
    depth, empty = _layer_types.read_depth(config), dict[str, Any]()
    usual = [SLIDING if index and (index + 1) % 6 else FULL for index in range(depth)]
    types = _layer_types.read_types(config, usual)
    sparse = _layer_types.read_kinds(config, "mlp_layer_types", [DENSE] + [SPARSE] * (depth - 1), (DENSE, SPARSE))
    tables = ConfigReader(config.get("rope_parameters", empty), config.source)
    mixer = {
        "kind": "attention",
        **heads,
        "value_dim": config.get("v_head_dim", 128),
        "value_scale": config.get_nullable("attention_value_scale", DEFAULT_VALUE_SCALE),
        "bias": "qkv" if config.get("attention_bias", False) else False,
        "dropout": config.get("attention_dropout", 0.0),
    }
    positions = {
        kind: read_rope_table(config, tables.get(kind, empty), heads["head_dim"], theta, DEFAULT_ROTARY_FACTOR)
        for kind, theta in THETAS.items()
    }
    windowed = {"window": config.get("sliding_window", DEFAULT_WINDOW), "sink": True, "kv_heads": 2 * heads["kv_heads"]}
    mixers = {kind: mixer | {"position": positions[kind]} for kind in (FULL, SLIDING)}
    mixers[SLIDING] |= windowed
    feedforwards = {
        DENSE: _common.read_gated(config),
        SPARSE: deepseek.read_experts(config, deepseek.read_sigmoid_routing(config), shared=False),
    }
    layers = _layer_types.layers_of([mixers[kind] for kind in types], [feedforwards[kind] for kind in sparse])
    return _common.rms_design(config, 1e-5, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, (full, sliding) = design_parts.first_attention(design), _layer_types.ropes_by_layer_type(design)
    types, head_dim = design_parts.layer_types(design), mixer.head_dim or 2
    fields = _common.write_common(design) | _common.write_attention(design) | deepseek.write_feedforwards(design, {})
    fields = _common.without(fields, "rope_theta", "rope_scaling", ORIGINAL_LENGTH, "n_shared_experts")
    tables = {FULL: full, SLIDING: sliding}
    return fields | deepseek.write_sigmoid_routing(design) | {
        "num_key_value_heads": (mixer.kv_heads or 1) // (1 if types[0] == FULL else 2),
        "v_head_dim": mixer.value_dim,
        "attention_value_scale": mixer.value_scale,
        "attention_bias": mixer.bias == "qkv",
        "rope_parameters": {
            kind: write_rope_table(rope, head_dim, DEFAULT_ROTARY_FACTOR) for kind, rope in tables.items()
        },
        "layer_types": types,
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
    }  # fmt: skip


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names of DeepSeek-V3's experts and of the sinks."""
    deepseek.map_dots1(design, weights)
    for index in range(design.depth):
        weights.add_tensor(f"model.layers.{index}.self_attn.attention_sink_bias", f"layers.{index}.mixer.sink")


FAMILY = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("model.mtp.",),
)
