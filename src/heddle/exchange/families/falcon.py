"""Falcon (Almazrouei et al. 2023): parallel branches, one or few heads of keys and values, RoPE.

`new_decoder_architecture` (40B, 180B) has a number of its own for these heads, and one or two norms a layer. ALiBi
(Falcon-RW) is refused: it is scaled with the scores.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.residuals.parallel import ParallelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    width = config.require_count("hidden_size", "n_embed")
    heads = config.require_count("num_attention_heads", "n_head")
    if width % heads:
        raise config.invalid("hidden_size", f"falcon needs a multiple of its {heads} heads")
    config.expect("alibi", False, None)
    config.expect("apply_residual_connection_post_layernorm", False, None)  # of the first files
    parallel, bias = config.get("parallel_attn", True), config.get("bias", False)
    kv_heads, norms = _read_architecture(config, heads, parallel)
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": kv_heads,
        "bias": bias,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads),
    }
    feedforward = {
        "kind": "mlp",
        "hidden": config.get("ffn_hidden_size", 4 * width),
        "activation": _common.read_activation(config, "activation", "gelu"),
        "bias": bias,
    }
    layer = {
        "repeat": config.require("num_hidden_layers", int, "n_layer"),
        "mixer": mixer,
        "feedforward": feedforward,
    }
    residual: dict[str, Any] = {"kind": "parallel", "norms": norms} if parallel else {"kind": "pre_norm"}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        [layer],
        residual=residual | {"dropout": config.get("hidden_dropout", 0.0)},
        tied=True,
    )


def _read_architecture(config: ConfigReader, heads: int, parallel: bool) -> tuple[int, int]:
    """The heads of keys and values, and the norms of parallel branches."""
    norms, few = config.optional("num_ln_in_parallel_attn"), config.get("multi_query", True)
    own = config.get("num_kv_heads", heads, "n_head_kv")
    if not config.get("new_decoder_architecture", False):
        if norms not in (None, 1):
            raise config.invalid("num_ln_in_parallel_attn", "it belongs to the new decoder architecture; leave it out")
        return (1 if few else heads), 1
    if not parallel:
        raise config.invalid("parallel_attn", "the new decoder architecture needs true")
    if norms not in (None, 1, 2):
        raise config.invalid("num_ln_in_parallel_attn", "should be 1 or 2")
    return own, norms or 2


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    residual = design.residual
    norms = residual.norms if isinstance(residual, ParallelConfig) else 1
    is_new = isinstance(residual, ParallelConfig) and (norms == 2 or mixer.kv_heads not in (1, mixer.heads))
    config = _common.write_common(design) | _common.write_attention(design)
    del config["num_key_value_heads"], config["head_dim"]
    return config | {
        "new_decoder_architecture": is_new,
        "num_kv_heads": mixer.kv_heads if is_new else mixer.heads,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "multi_query": mixer.kv_heads == 1,
        "parallel_attn": isinstance(residual, ParallelConfig),
        "alibi": False,
        "bias": mixer.bias is True,
        "hidden_dropout": residual.dropout,
        "ffn_hidden_size": feedforward.hidden,
        "activation": design_parts.HF_ACTIVATIONS[feedforward.activation],
        "layer_norm_epsilon": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names; queries, keys and values are one matrix, interleaved by head of keys."""
    _common.map_embedding_and_head(design, weights, "transformer.word_embeddings", "transformer.ln_f")
    mixer = design_parts.first_attention(design)
    for index in range(design.depth):
        hf, heddle = f"transformer.h.{index}", f"layers.{index}"
        _gpt.map_megatron_layer(weights, hf, heddle, "self_attention", mixer.kv_heads or mixer.heads)
        if isinstance(design.residual, ParallelConfig) and design.residual.norms == 2:
            weights.add_module(f"{hf}.ln_attn", f"{heddle}.residual.norms.mixer")
            weights.add_module(f"{hf}.ln_mlp", f"{heddle}.residual.norms.feedforward")
        else:
            weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.shared")
            _common.map_pre_norms(weights, hf, heddle)


FAMILY = Family("falcon", "FalconForCausalLM", read_config, write_config, map_weights)
