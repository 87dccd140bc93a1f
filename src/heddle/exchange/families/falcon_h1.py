"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side in every layer, and a number that multiplies each branch.

`key_multiplier` is part of attention's scale. `projectors_bias`, of Mamba-2's last projection, must be as
`mamba_proj_bias`, of its first.
"""

import math
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _mamba, bamba
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.mixers.pair import PairConfig

CHANNELS, DEFAULT_CHANNELS = "mamba_d_ssm", 1024
BRANCHES = ("attention", "ssm")  # first and second of each layer's pair, in names of multipliers
NORMS = {(False, True): "none", (False, False): "none", (True, True): "before", (True, False): "after"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. A multiplier of 1 is none."""
    eps = config.get("rms_norm_eps", 1e-5)
    config.expect("hidden_act", "silu", default="silu")
    config.expect("mamba_use_mlp", True, None)
    config.expect("attn_layer_indices", None)
    for name in ("mamba_chunk_size", "num_logits_to_keep"):
        config.optional(name)
    pair: dict[str, Any] = {"kind": "pair", "first": _read_attention(config), "second": _read_mamba(config, eps)}
    for way in ("in", "out"):
        numbers = [_read_multiplier(config, f"{branch}_{way}_multiplier") for branch in BRANCHES]
        pair |= {f"{way}put_multipliers": None if numbers == [1.0, 1.0] else numbers}
    gate, down = _read_multipliers(config, "mlp_multipliers", 2)
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    feedforward |= {"gate_multiplier": _or_none(gate), "multiplier": _or_none(down)}
    layer = {"repeat": _layer_types.read_depth(config), "mixer": pair, "feedforward": feedforward}
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": eps},
        [layer],
        embedding={"multiplier": _or_none(_read_multiplier(config, "embedding_multiplier"))},
        head={
            "tied": config.get("tie_word_embeddings", False),
            "scale": _read_multiplier(config, "lm_head_multiplier"),
        },
    )


def _read_multiplier(config: ConfigReader, name: str) -> float:
    number = config.get(name, 1.0)
    if not 0.0 < number < math.inf:
        raise config.invalid(name, "should be a number above 0")
    return number


def _read_multipliers(config: ConfigReader, name: str, count: int) -> list[float]:
    numbers = config.get(name, [1.0] * count)
    if len(numbers) != count or not all(isinstance(x, int | float) and 0.0 < x < math.inf for x in numbers):
        raise config.invalid(name, f"should be {count} numbers above 0")
    return [float(number) for number in numbers]


def _or_none(multiplier: float) -> float | None:
    return None if multiplier == 1.0 else multiplier


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    config.require_count("hidden_size")
    attention = _common.read_attention(config, bias=config.get("attention_bias", False))
    key = _or_none(_read_multiplier(config, "key_multiplier"))
    return attention | {"scale": None if key is None else key * attention["head_dim"] ** -0.5}


def _read_mamba(config: ConfigReader, eps: float) -> dict[str, Any]:
    """`mamba_d_ssm: null` stands for `mamba_expand` times the width, `mamba_d_head: auto` divides it by the heads."""
    expanded: int = config.get("mamba_expand", 2) * config.require_count("hidden_size")
    inner = config.get_nullable(CHANNELS, DEFAULT_CHANNELS)
    inner = expanded if inner is None else inner
    heads: int = config.get("mamba_n_heads", 128)
    if type(inner) is not int or heads < 1 or inner < 1:
        raise config.invalid(CHANNELS, "should be a number of channels, with at least one head")
    fields = _mamba.read_fields(config, _mamba.PREFIXED_NAMES._replace(head_dim=("mamba_d_head", inner // heads)), eps)
    if fields["heads"] * fields["head_dim"] != inner:
        raise config.invalid(CHANNELS, f"is not {fields['heads']} heads of {fields['head_dim']}; make them equal")
    if config.get("projectors_bias", False) != fields["bias"]:
        raise config.invalid("projectors_bias", "it should equal 'mamba_proj_bias'")
    has_norm, is_before = config.get("mamba_rms_norm", False), config.get("mamba_norm_before_gate", True)
    numbers = _read_multipliers(config, "ssm_multipliers", 5)
    fields |= {"gated_norm": NORMS[has_norm, is_before], "multipliers": None if numbers == [1.0] * 5 else numbers}
    return fields | {"norm": fields["norm"] if has_norm else None} | _mamba.read_time_step_limit(config)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    attention, dense = design_parts.first_attention(design), design_parts.first_gated(design)
    mamba = _mamba.first_mixer(design)
    return (
        _common.write_decoder(design)
        | _mamba.write_fields(design, _mamba.PREFIXED_NAMES)
        | _mamba.write_time_step_limit(mamba)
        | _write_branches(design)
        | {
            CHANNELS: mamba.heads * (mamba.head_dim or 1),
            "projectors_bias": mamba.bias,
            "mamba_rms_norm": mamba.gated_norm != "none",
            "mamba_norm_before_gate": mamba.gated_norm != "after",
            "ssm_multipliers": list(mamba.multipliers or [1.0] * 5),
            "key_multiplier": float(f"{(attention.scale or 1.0) * (attention.head_dim or 1) ** 0.5:.12g}"),
            "mlp_bias": dense.bias,
            "mlp_multipliers": [dense.gate_multiplier or 1.0, dense.multiplier or 1.0],
            "embedding_multiplier": design.embedding.multiplier or 1.0,
            "lm_head_multiplier": design.head.scale,
        }
    )


def _write_branches(design: ModelConfig) -> dict[str, Any]:
    """The multipliers of the first pair of mixers."""
    pairs = [layer.mixer for layer in design_parts.layers(design) if isinstance(layer.mixer, PairConfig)]
    inputs, outputs = (pairs[0].input_multipliers, pairs[0].output_multipliers) if pairs else (None, None)
    ways = {"in": inputs or (1.0, 1.0), "out": outputs or (1.0, 1.0)}
    return {
        f"{branch}_{way}_multiplier": number
        for way, numbers in ways.items()
        for branch, number in zip(BRANCHES, numbers, strict=True)
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of attention and of the feed-forward."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        for name, role in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
            weights.add_module(f"{hf}.self_attn.{name}_proj", f"{heddle}.mixer.first.{role}")
        _mamba.map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer.second")
        bamba.map_feedforward(weights, hf, heddle)


FAMILY = Family("falcon_h1", "FalconH1ForCausalLM", read_config, write_config, map_weights)
