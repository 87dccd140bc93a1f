"""OLMo Hybrid (Team OLMo 2026): OLMo 3 without windows, and in most layers the gated delta rule, with norms before it.

The delta rule may have β up to 2 (`linear_allow_neg_eigval`). Attention has no RoPE where the theta or the type of
`rope_parameters` is null, as in published files.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _qwen_hybrid, olmo2
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

FULL, LINEAR = _qwen_hybrid.FULL, _qwen_hybrid.LINEAR
# Of the first weights.
INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
PROJECTIONS = {"q": "q", "k": "k", "v": "v", "a": "a", "b": "beta", "g": "gate", "o": "out"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types` says which mixer each layer has."""
    for name in INITIAL:
        config.optional(name)
    attention, depth = olmo2.read_mixer(config), _layer_types.read_depth(config)
    table = config.data.get("rope_parameters") or {}
    has_rope = all(table.get(name, True) is not None for name in ("rope_theta", "rope_type"))
    rope = read_rope(config, attention["head_dim"]) | olmo2.ROPE_CAST
    attention["position"] = rope if has_rope else None
    delta = _qwen_hybrid.read_delta(config, 1e-5)
    delta["negative_eigenvalues"] = config.get("linear_allow_neg_eigval", True)
    mixers = {FULL: attention, LINEAR: delta}
    usual = _qwen_hybrid.default_types(4, depth)
    usual = usual if FULL in usual else [*usual[:-1], FULL]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    design = olmo2.read_design(config, [mixers[kind] for kind in types], eps=1e-6)
    return design | {"residual": {"kind": "reordered", "norms_first": [delta["kind"]]}}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    fields, delta = (
        olmo2.write_config(design) | _qwen_hybrid.write_delta(design),
        design_parts.first_gated_delta(design),
    )
    if not any(design_parts.has_rope(mixer) for mixer in design_parts.mixers(design)):
        fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_scaling": None}
    del fields["head_dim"], fields["rope_theta"]
    return fields | {"linear_allow_neg_eigval": delta.negative_eigenvalues}


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """OLMo 2's tensor names in layers of attention; published files have a convolution for each of q, k and v."""
    _common.map_embedding_and_head(design, weights)
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        _common.map_gated(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        if isinstance(layer.mixer, GatedDeltaConfig):
            weights.add_module(f"{hf}.attention_layer_norm", f"{heddle}.residual.norms.mixer")
            weights.add_module(f"{hf}.feedforward_layer_norm", f"{heddle}.residual.norms.feedforward")
            _map_delta(layer.mixer, weights, f"{hf}.linear_attn", f"{heddle}.mixer")
        elif layer.mixer is not None:
            _common.map_attention(weights, hf, heddle)
            olmo2.map_norms(weights, hf, heddle)
            # As transformers saves it again.
            weights.add_renamed(f"{hf}.feedforward_layer_norm.weight", f"{hf}.post_attention_layernorm.weight")


def _map_delta(mixer: GatedDeltaConfig, weights: WeightMap, hf: str, heddle: str) -> None:
    for name, role in PROJECTIONS.items():
        weights.add_module(f"{hf}.{name}_proj", f"{heddle}.{role}")
    weights.add_module(f"{hf}.o_norm", f"{heddle}.norm")
    weights.add_tensor(f"{hf}.A_log", f"{heddle}.decay.rate")
    weights.add_tensor(f"{hf}.dt_bias", f"{heddle}.decay.bias")
    keys = (mixer.key_heads or mixer.heads) * (mixer.head_dim or 1)
    ends = (keys, 2 * keys, 2 * keys + mixer.heads * (mixer.value_dim or mixer.head_dim or 1))
    for name, start, end in zip("qkv", (0, *ends[:2]), ends, strict=True):
        channels = (f"{heddle}.convolution.weight", slice(start, end))
        weights.add_tensor(f"{hf}.{name}_conv1d.weight", channels, transform=DEPTHWISE_CONV)


FAMILY = Family("olmo_hybrid", "OlmoHybridForCausalLM", read_config, write_config, map_weights)
