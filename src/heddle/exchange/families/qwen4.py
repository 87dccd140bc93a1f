"""The text model of Qwen4-Exp (Qwen 2026): Qwen3.5's mixers and experts, pooled indexers, streams and n-gram memories.

A layer of `ple_layer_ids` has a memory before its mixer, which reads and writes every stream. heddle has it as a layer
of its own. Its hashes follow from `seed`; the first `eos_token_id` ends its n-grams. Files cut its table into
`split_ngram_parts` tensors, of which an export writes one. `mrope_section` is for images.
"""

from itertools import accumulate
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek, qwen
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap, interleaved_by_group, reshaped
from heddle.exchange.rope import FULL
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards.ngram_memory import NGramMemoryConfig, multipliers
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.residuals.hyper_connections import HyperConnectionsConfig

LINEAR, INDEXED = qwen.LINEAR, deepseek.INDEXED
STREAMS = _common.Fields(streams=("hc_count", 4), gate_rank=("hc_lowrank", 320))
MEMORY = _common.Fields(
    order=("ngram_size", 3), heads=("heads_per_ngram", 8), slots=("ngram_vocab_size_base", 20_000_000),
    conv_kernel=("ple_conv_kernel_size", 4), hash_seed=("seed", 1234),
    multiple=("make_ngram_vocab_size_divisible_by", 128),
)  # fmt: skip
STREAM_NAMES = {"input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "write"}
BRANCHES = {"attn_hyper_connection": "mixer", "mlp_hyper_connection": "feedforward"}
MEMORY_NORMS = {"norm_key": "key_norm", "norm_query": "query_norm", "norm_conv": "conv_norm"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    config.ignore("number_of_conv_states", "split_ngram_parts", "intermediate_size", "mtp", "mtp_num_hidden_layers")
    config.ignore("mtp_use_dedicated_embeddings")
    config.expect("mamba_ssm_dtype", "float32", None)
    config.expect("indexer_kv_heads", 1, default=1)
    depth, eps = _layer_types.read_depth(config), config.get("rms_norm_eps", 1e-6)
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    delta = qwen.read_delta(config, eps) | {"gate": config.optional("output_gate_type") or "silu"}
    mixers = {LINEAR: delta, INDEXED: _read_attention(config, norm)}
    mixers[FULL] = mixers[INDEXED]  # as published files say
    usual = [INDEXED if kind == FULL else kind for kind in qwen.default_types(_interval(config), depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, INDEXED, FULL))
    experts = _moe.read_experts(config, depth, "moe_intermediate_size") | qwen.read_shared(config)
    experts["renormalize"] = config.get("norm_topk_prob", True)
    memories, layers = _read_memories(config), list[dict[str, Any]]()
    for index, kind in enumerate(types):
        if index in memories and kind != LINEAR:
            raise config.invalid("ple_layer_ids", f"should be of layers of type {LINEAR}, as in its class")
        layers += [{"mixer": None, "feedforward": memories[index]}] if index in memories else []
        layers.append({"mixer": mixers[kind], "feedforward": experts})
    residual = {"kind": "hyper_connections", **STREAMS.read(config), "mixing": False, "collapse": "weighted"}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers), residual=residual)


def _interval(config: ConfigReader) -> int:
    return config.get("full_attention_interval", 4)


def _read_attention(config: ConfigReader, norm: dict[str, Any]) -> dict[str, Any]:
    """Gated attention, with an indexer that pools the keys of blocks."""
    config.require("head_dim", int)
    config.require("num_key_value_heads", int)
    block, budget = config.require_count("indexer_compress_ratio"), config.require_count("indexer_budget")
    if block < 2 or budget % block:
        raise config.invalid("indexer_compress_ratio", f"should be at least 2 and divide indexer_budget = {budget}")
    indexer = {"top_k": budget // block, "block": block, "pool": "mean", "head_weights": False, "query_norm": True}
    indexer |= {"heads": config.require("indexer_n_heads", int), "head_dim": config.require("indexer_head_dim", int)}
    bias = config.get("attention_bias", False)
    mixer = _common.read_attention(config, partial_rotary_factor=1.0, qk_norm="head", gate="channel", bias=bias)
    return mixer | {"indexer": indexer | {"norm": norm}}


def _read_memories(config: ConfigReader) -> dict[int, dict[str, Any]]:
    """The memory before each layer that has one."""
    numbers, none = sorted(set(config.optional("ple_layer_ids") or [])), config.data.get("eos_token_id")
    width, sizes = config.optional("ple_embed_dim") or config.require("hidden_size", int), MEMORY.read(config)
    first = none[0] if isinstance(none, list) and none else none
    hashes = (sizes["order"] - 1) * sizes["heads"]
    if numbers and type(first) is not int:
        raise config.invalid("eos_token_id", "is missing, and ends the n-grams of ple_layer_ids; give a token")
    if numbers and (hashes < 1 or width % hashes):
        raise config.invalid("ple_embed_dim", f"{width} should be a multiple of {hashes}, the number of hashes")
    memory = {"kind": "ngram_memory", "streams": True, "cut": True, **sizes, "fill": first}
    memory |= {"id_range": config.require("vocab_size", int), "dim": width // max(hashes, 1)}
    return {number - 1: memory | {"index": index} for index, number in enumerate(numbers)}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    layers, residual = design_parts.layers(design), design.residual
    types, numbers = list[str](), list[int]()
    memory = NGramMemoryConfig(dim=max(1, design.width // 16), slots=20_000_000, heads=8, hash_seed=1234, multiple=128)
    for layer in layers:
        if isinstance(layer.feedforward, NGramMemoryConfig) and layer.mixer is None:
            memory = layer.feedforward if not numbers else memory
            numbers.append(len(types) + 1)
        else:
            types.append(LINEAR if isinstance(layer.mixer, GatedDeltaConfig) else INDEXED)
    mixer, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    indexer = mixer.indexer or IndexerConfig(top_k=1, heads=1, head_dim=2, block=2)
    streams = residual if isinstance(residual, HyperConnectionsConfig) else HyperConnectionsConfig()
    return (
        qwen.write_hybrid(design)
        | _moe.write_aux_loss(design, moe)
        | qwen.write_shared(design)
        | STREAMS.write(streams)
        | MEMORY.write(memory)
        | ({"eos_token_id": memory.fill} if numbers else {})
        | {
            "num_hidden_layers": len(types),
            "layer_types": types,
            "partial_rotary_factor": 1.0,
            "output_gate_type": "sigmoid" if design_parts.first_gated_delta(design).gate == "sigmoid" else None,
            "norm_topk_prob": moe.renormalize,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden,
            "indexer_budget": indexer.top_k * indexer.block,
            "indexer_compress_ratio": indexer.block,
            "indexer_n_heads": indexer.heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": indexer.head_dim,
            "ple_layer_ids": numbers,
            "ple_embed_dim": memory.dim * memory.hashes,
            "split_ngram_parts": 1,
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Qwen3.5's names, and those of streams, indexers and memories."""
    _common.map_embedding_and_head(design, weights)
    _map_streams(weights, "model.hyper_connection_mixer", "final_norm.maps")
    number = 0
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{number}", f"layers.{index}"
        if isinstance(layer.feedforward, NGramMemoryConfig):
            _map_memory(weights, f"{hf}.ple", f"{heddle}.feedforward", layer.feedforward)
            continue
        number += 1
        qwen.map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        for name, own in BRANCHES.items():
            _map_streams(weights, f"{hf}.{name}", f"{heddle}.residual.maps.{own}")
        _map_mixer(weights, hf, heddle, layer)


def _map_mixer(weights: WeightMap, hf: str, heddle: str, layer: LayerConfig) -> None:
    own, indexer = f"{heddle}.mixer", f"{hf}.self_attn.indexer"
    if isinstance(layer.mixer, GatedDeltaConfig):
        qwen.map_inputs_of_qwen3_5(weights, f"{hf}.linear_attn", own, 0)
        weights.add_module(f"{hf}.linear_attn.conv1d", f"{own}.convolution", transform=DEPTHWISE_CONV)
        weights.add_modules(f"{hf}.linear_attn", own, qwen.DELTA_NAMES)
    elif isinstance(layer.mixer, AttentionConfig):
        _common.map_attention(weights, hf, heddle)
        by_head = interleaved_by_group(layer.mixer.heads)
        weights.add_module(f"{hf}.self_attn.q_proj", f"{own}.q", f"{own}.gate", transform=by_head)
        weights.add_module(f"{indexer}.index_qk_proj", f"{own}.indexer.q", f"{own}.indexer.k")
        weights.add_modules(indexer, f"{own}.indexer", {"q_layernorm": "q_norm", "k_layernorm": "k_norm"})


def _map_streams(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, STREAM_NAMES)
    weights.add_module(f"{hf}.hc_norm", f"{heddle}.norm", transform=reshaped(-1))


def _map_memory(weights: WeightMap, hf: str, heddle: str, memory: NGramMemoryConfig) -> None:
    weights.add_modules(hf, heddle, {"key_proj": "key", "value_proj": "value"})
    weights.add_module(f"{hf}.conv1d", f"{heddle}.convolution", transform=DEPTHWISE_CONV)
    for name, own in MEMORY_NORMS.items():
        weights.add_module(f"{hf}.{name}", f"{heddle}.{own}", transform=reshaped(-1))
    sizes = memory.sizes
    hashes = {"layer_multipliers": multipliers(memory), "ngram_heads_vocab_sizes": sizes}
    hashes["ngram_heads_offsets"] = [0, *accumulate(sizes)][: len(sizes)]
    weights.constants |= {f"{hf}.ple_embedding.{name}": values for name, values in hashes.items()}
    weights.add_parts(f"{hf}.ple_embedding.ngram_embedding.shard_{{part}}.weight", f"{heddle}.tables.weight")


FAMILY = Family(
    "qwen4_exp_text", "Qwen4ExpForCausalLM", read_config, write_config, map_weights,
    ignored_tensors=("mtp.",),
)  # fmt: skip
