"""DeepSeek V4 (DeepSeek-AI 2026): compressed attention, hyper-connections, and experts in every layer.

A layer's attention sees a window, or a window and entries of blocks: all, or the best. The first layers read their
experts from a table of token ids. Older files have `compress_ratios` for `layer_types`, `num_hash_layers` for
`mlp_layer_types`, and RoPE's fields at the top level; in compressed layers YaRN's attention factor is then 1.
"""

from typing import Any

import torch

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family, TensorTransform, WeightMap, reshaped
from heddle.exchange.rope import SLIDING, read_rope_table, write_rope_table
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.compressed_attention import CompressedAttentionConfig
from heddle.parts.residuals.hyper_connections import HyperConnectionsConfig

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: SLIDING, 4: CSA, 128: HCA}  # of `compress_ratios`, whatever `compress_rates` says
BY_TABLE, BY_SCORES = "hash_moe", "moe"
ROUTINGS = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"}
ROTARY_FACTOR, THETAS = 64 / 512, {"main": 10000.0, "compress": 160000.0}
ATTENTION = _common.Fields(
    heads=("num_attention_heads", 64),
    head_dim=("head_dim", 512),
    query_rank=("q_lora_rank", 1024),
    window=("sliding_window", 128),
    groups=("o_groups", 8),
    out_rank=("o_lora_rank", 1024),
)
INDEX = _common.Fields(
    index_heads=("index_n_heads", 64), index_head_dim=("index_head_dim", 128), top_k=("index_topk", 512)
)
EXPERTS = _common.Fields(
    experts=("n_routed_experts", 256),
    top_k=("num_experts_per_tok", 6),
    hidden=("moe_intermediate_size", 2048),
    scale=("routed_scaling_factor", 1.5),
    limit=("swiglu_limit", 10.0),
)
STREAMS = _common.Fields(streams=("hc_mult", 4), iterations=("hc_sinkhorn_iters", 20), eps=("hc_eps", 1e-6))


def read_config(config: ConfigReader) -> dict[str, Any]:
    config.expect_all(num_key_value_heads=1, hidden_act="silu", attention_dropout=0.0, topk_method="noaux_tc")
    config.expect_all(n_shared_experts=1, norm_topk_prob=True, output_router_logits=False)
    config.ignore("router_aux_loss_coef", "router_jitter_noise", "num_nextn_predict_layers", "expert_dtype")
    config.note("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
    mixers, feedforwards = _read_mixers(config), _read_feedforwards(config)
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "cast": "after"}
    own = {"norm_weight": False, "whole_bias": True, "collapse": "weighted"}
    residual = {"kind": "hyper_connections", **STREAMS.read(config), **own}
    return _common.design_fields(config, norm, _layer_types.layers_of(mixers, feedforwards), residual=residual)


def _read_mixers(config: ConfigReader) -> list[dict[str, Any]]:
    none: list[int] = []
    depth, ratios = _layer_types.read_depth(config), config.get("compress_ratios", none)
    if any(ratio not in RATIOS for ratio in ratios) or 0 < len(ratios) < depth:
        raise config.invalid("compress_ratios", f"should say 0, 4 or 128 of each of {depth} layers")
    usual = [CSA if index > 1 and index % 2 else HCA for index in range(depth)]
    usual = [RATIOS[ratio] for ratio in ratios[:depth]] or usual
    types = _layer_types.read_kinds(config, "layer_types", usual, tuple(RATIOS.values()))
    rates: dict[str, Any] = {CSA: 4, HCA: 128} | config.get("compress_rates", {})
    rates |= {kind: config.get(f"compress_rate_{name}", rates[kind]) for kind, name in ((CSA, "csa"), (HCA, "hca"))}
    mixer = {"kind": "compressed_attention", **ATTENTION.read(config)}
    main, compressed = _read_ropes(config, mixer["head_dim"])
    kinds = {
        SLIDING: mixer | main,
        HCA: mixer | compressed | {"compress_ratio": rates[HCA]},
        CSA: mixer | compressed | {"compress_ratio": rates[CSA], "overlap": True, **INDEX.read(config)},
    }
    return [kinds[kind] for kind in types]


def _read_ropes(config: ConfigReader, head_dim: int) -> list[dict[str, Any]]:
    """The rotated dims and the rotation of layers with only a window, and of the others."""
    dim = config.optional("qk_rope_head_dim")
    factor = config.get("partial_rotary_factor", ROTARY_FACTOR if dim is None else dim / head_dim)
    thetas = {"main": config.get("rope_theta", THETAS["main"])}
    thetas["compress"] = config.get("compress_rope_theta", THETAS["compress"])
    empty: dict[str, Any] = {}
    given = config.get("rope_parameters", empty) or config.get("rope_scaling", empty)
    config.unread -= {"rope_parameters", "rope_scaling"}
    nested = all(isinstance(given.get(name), dict) for name in thetas)
    scaling = {"attention_factor": 1.0} if given.get("rope_type", given.get("type")) == "yarn" else {}
    tables = given if nested else {"main": {}, "compress": scaling | given}
    ropes = []
    for name, theta in thetas.items():
        plain = {"rope_theta": thetas["main"] if nested else theta, "partial_rotary_factor": factor}
        table = plain | tables[name] if nested else tables[name] | plain
        if table.get("rope_type", table.get("type")) == "yarn" and table.get("attention_factor") != 1.0:
            raise config.invalid("rope_parameters", "yarn needs attention_factor 1.0; give it, or scale nothing")
        if table.get("truncate") is False:
            raise config.invalid("rope_parameters", "transformers ignores 'truncate' in a table; leave it out")
        rope_dim = int(head_dim * table.get("partial_rotary_factor", 1.0))
        plain = {key: value for key, value in table.items() if key != "partial_rotary_factor"}
        rope = read_rope_table(config, plain, rope_dim, theta) | {"layout": "interleaved"}
        ropes.append({"rope_dim": rope_dim, "position": rope})
    return ropes


def _read_feedforwards(config: ConfigReader) -> list[dict[str, Any]]:
    depth, vocab = _layer_types.read_depth(config), config.require("vocab_size", int)
    first = min(config.get("num_hash_layers", 3), depth)
    usual = [BY_TABLE] * first + [BY_SCORES] * (depth - first)
    types = _layer_types.read_kinds(config, "mlp_layer_types", usual, (BY_TABLE, BY_SCORES))
    routing = ROUTINGS[config.expect("scoring_func", *ROUTINGS, default="sqrtsoftplus")]
    experts = {"kind": "moe", **EXPERTS.read(config), "activation": "swiglu_limited", "shared": 1, "routing": routing}
    kinds: dict[str, dict[str, Any]] = {
        BY_TABLE: {"selection": "table", "id_range": vocab}, BY_SCORES: {"bias_update": 0.0},
    }  # fmt: skip
    return [experts | kinds[kind] for kind in types]


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    default = CompressedAttentionConfig(heads=1, head_dim=design.width)
    layers = design_parts.layers(design)
    by_type = {_type(layer): layer.mixer for layer in reversed(layers)}
    mixers = {kind: mixer for kind, mixer in by_type.items() if isinstance(mixer, CompressedAttentionConfig)}
    first = next(iter(mixers.values()), default)
    main = mixers.get(SLIDING, first)
    compressed = mixers.get(HCA) or mixers.get(CSA) or first
    residual = design.residual if isinstance(design.residual, HyperConnectionsConfig) else HyperConnectionsConfig()
    moe = design_parts.first_moe(design)
    tables = {"main": _write_rope(main), "compress": _write_rope(compressed)}
    rates = {kind: mixers[kind].compress_ratio for kind in (CSA, HCA) if kind in mixers}
    return {
        **_common.write_common(design),
        **ATTENTION.write(first),
        **INDEX.write(mixers.get(CSA, default)),
        **EXPERTS.write(moe),
        **STREAMS.write(residual),
        **_common.written(design, "rms_norm_eps"),
        "num_key_value_heads": 1,
        "layer_types": [_type(layer) for layer in layers],
        "compress_rates": {CSA: 4, HCA: 128} | rates,
        "mlp_layer_types": [_feedforward_type(layer) for layer in layers],
        "scoring_func": next((name for name, own in ROUTINGS.items() if own == moe.routing), "sqrtsoftplus"),
        "rope_parameters": tables,
        "rope_theta": tables["main"]["rope_theta"],
        "compress_rope_theta": tables["compress"]["rope_theta"],
        "partial_rotary_factor": tables["main"]["partial_rotary_factor"],
        "qk_rope_head_dim": main.rope_dim or main.head_dim,
    }


def _type(layer: LayerConfig) -> str:
    """The nearest type of a layer's attention."""
    mixer = layer.mixer
    if not isinstance(mixer, CompressedAttentionConfig) or mixer.compress_ratio is None:
        return SLIDING
    return CSA if mixer.overlap else HCA


def _feedforward_type(layer: LayerConfig) -> str:
    feedforward = layer.feedforward
    return BY_TABLE if isinstance(feedforward, MoEConfig) and feedforward.selection == "table" else BY_SCORES


def _write_rope(mixer: CompressedAttentionConfig) -> dict[str, Any]:
    dim, rope = mixer.head_dim or 1, design_parts.rope_of(mixer).replace(rotary_dim=mixer.rope_dim)
    return write_rope_table(rope, dim, partial_rotary_factor=1.0)


ATTENTION_NAMES = {
    "wq_a": "q_down", "q_norm": "q_norm", "wq_b": "q_up", "wkv": "kv", "norm": "kv_norm", "wo_a": "out_down",
    "wo_b": "out", "attn_sink": "sink", "compressor.wkv": "pool.values", "compressor.wgate": "pool.gates",
    "compressor.norm": "pool.norm", "indexer.wq_b": "index.q", "indexer.weights_proj": "index.weights",
    "indexer.compressor.wkv": "index.pool.values", "indexer.compressor.wgate": "index.pool.gates",
    "indexer.compressor.norm": "index.pool.norm",
}  # fmt: skip
PLACES = {"compressor.ape": "pool.bias", "indexer.compressor.ape": "index.pool.bias"}
EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
# transformers writes other names of these, and all others below `model.`.
RENAMED = {"embed.weight": "model.embed_tokens.weight", "head.weight": "head.weight"}
RENAMED |= {f"hc_head_{name}": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")}
# Ids are whole numbers there.
TABLE = TensorTransform(
    lambda parameters: parameters[0].round().long(), lambda tensor, shapes: [tensor.float()], whole_numbers=True
)


def transposed_mix(streams: int) -> TensorTransform:
    """Rows of R, W and M, with M's rows in the order of its transpose."""

    def turned(rows: torch.Tensor) -> torch.Tensor:
        others, mix = rows.split((2 * streams, streams**2))
        return torch.cat((others, mix.unflatten(0, (streams, streams)).transpose(0, 1).flatten(0, 1)))

    return TensorTransform(lambda parameters: turned(parameters[0]), lambda tensor, shapes: [turned(tensor)])


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The published names, and those that transformers writes."""
    _common.map_embedding_and_head(design, weights, "embed", "norm", "head")
    map_streams(weights, "hc_head", "final_norm.maps")
    for hf, heddle, _ in _common.named_layers(design, prefix="layers"):
        weights.add_modules(f"{hf}.attn", f"{heddle}.mixer", ATTENTION_NAMES)
        for name, own in PLACES.items():
            shape = weights.shapes.get(f"{heddle}.mixer.{own}", (1, 1))
            weights.add_tensor(f"{hf}.attn.{name}", f"{heddle}.mixer.{own}", transform=reshaped(shape[0], -1))
        _map_feedforward(weights, f"{hf}.ffn", f"{heddle}.feedforward")
        for branch, own in (("attn", "mixer"), ("ffn", "feedforward")):
            weights.add_module(f"{hf}.{branch}_norm", f"{heddle}.residual.norms.{own}")
            map_streams(weights, f"{hf}.hc_{branch}", f"{heddle}.residual.maps.{own}", design.residual)
    for name in list(weights.rules):
        weights.add_renamed(RENAMED.get(name, f"model.{name}"), name)


def map_streams(weights: WeightMap, hf: str, heddle: str, residual: Any = None) -> None:
    """The maps of one branch, or of the end."""
    streams = residual.streams if isinstance(residual, HyperConnectionsConfig) and residual.mixing else None
    options = {} if streams is None else {"transform": transposed_mix(streams)}
    weights.add_tensor(f"{hf}_fn", f"{heddle}.projection.weight", **options)
    weights.add_tensor(f"{hf}_base", f"{heddle}.bias", **options)
    weights.add_tensor(f"{hf}_scale", f"{heddle}.gain")


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    if f"{heddle}.router.weight" not in weights.shapes:
        return
    _moe.map_experts(weights, hf, heddle, EXPERT_NAMES)
    weights.add_tensor(f"{hf}.gate.bias", f"{heddle}.router.expert_bias")
    weights.add_tensor(f"{hf}.gate.tid2eid", f"{heddle}.table.experts", transform=TABLE)
    weights.add_modules(f"{hf}.shared_experts", f"{heddle}.shared", {name: own for own, name in EXPERT_NAMES.items()})


FAMILY = Family(
    "deepseek_v4", "DeepseekV4ForCausalLM", read_config, write_config, map_weights, ignored_tensors=("mtp.",)
)
