"""GPT-BigCode (Ben Allal et al. 2023; SantaCoder, StarCoder): GPT-2 with one head of keys and values."""

import math
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import CONCATENATED, Family, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig
from heddle.parts.positions.learned import LearnedConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; `multi_query: false` is multi-head attention."""
    config.optional("attention_softmax_in_fp32")  # heddle always computes scores in float32
    config.optional("scale_attention_softmax_in_fp32")
    config.note("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache")
    config.note("validate_runner_input", "runner_max_sequence_length")  # of the first files
    mixer = _gpt.read_attention(config, 0.1) | {"bias": True}
    width, heads = config.require_count("n_embd", "hidden_size"), mixer["heads"]
    if width % heads:
        raise config.invalid("n_embd", f"gpt_bigcode needs a multiple of its {heads} heads")
    kv_heads = 1 if config.get("multi_query", True) else heads
    config.expect("num_key_value_heads", None, kv_heads)
    scale = {} if config.get("scale_attn_weights", True) else {"scale": 1.0}
    layer = {
        "repeat": _gpt.read_depth(config),
        "mixer": mixer | scale | {"kv_heads": kv_heads},
        "feedforward": _gpt.read_mlp(config, "gelu_pytorch_tanh"),
    }
    length = config.get("n_positions", 1024, "max_position_embeddings")
    return _gpt.design_fields(
        config,
        [layer],
        0.1,
        residual={"kind": "pre_norm"},
        embedding={"position": {"kind": "learned", "length": length}},
        head={"tied": config.get("tie_word_embeddings", True)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, position = design_parts.first_attention(design), design.embedding.position
    feedforward = design_parts.first_mlp(design)
    return _gpt.write_common(design) | {
        "n_positions": position.length if isinstance(position, LearnedConfig) else _common.DEFAULT_MAX_POSITIONS,
        "activation_function": design_parts.HF_ACTIVATIONS[feedforward.activation],
        "scale_attn_weights": mixer.scale is None or not math.isclose(mixer.scale, 1.0),
        "multi_query": mixer.kv_heads == 1,
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Queries, keys and values are one matrix, interleaved by head of keys."""
    _gpt.map_embedding_and_head(weights)
    weights.add_module("transformer.wpe", "embed.position")
    mixer = design_parts.first_attention(design)
    by_group = interleaved_by_group(mixer.kv_heads or mixer.heads)
    for index in range(design.depth):
        hf, heddle = f"transformer.h.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.ln_1", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{hf}.ln_2", f"{heddle}.residual.norms.feedforward")
        weights.add_module(f"{hf}.attn.c_attn", *(f"{heddle}.mixer.{role}" for role in "qkv"), transform=by_group)
        weights.add_module(f"{hf}.attn.c_proj", f"{heddle}.mixer.out")
        _gpt.map_mlp(weights, f"{hf}.mlp.c_fc", f"{hf}.mlp.c_proj", f"{heddle}.feedforward", CONCATENATED)


FAMILY = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=_gpt.MASK_BUFFERS,
)
