"""Families with Megatron's layers (queries, keys and values as one matrix, interleaved by head), and StableLM."""

from dataclasses import replace
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader, short_repr
from heddle.exchange.families import _common, _layer_types, gpt
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.residuals.parallel import ParallelConfig

ROTARY_FACTOR = 0.25  # if the config has none


def read_gpt_neox(config: ConfigReader) -> dict[str, Any]:
    """GPT-NeoX and Pythia (Black et al. 2022): a norm for each of two parallel branches, partial RoPE, biases.

    `use_parallel_residual: false` is pre-norm. Queries, keys and values are one matrix, interleaved by head.
    """
    heads, width = config.require_count("num_attention_heads"), config.require_count("hidden_size")
    config.optional("is_decoder")  # causal in either case
    config.optional("classifier_dropout")
    config.note("attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size")  # of the first files
    base = _read_alias(config, 10000.0, "rotary_emb_base", "rope_theta")
    part = _read_alias(config, ROTARY_FACTOR, "rotary_pct", "partial_rotary_factor")
    rope, bias = read_rope(config, width // heads, base, part), config.get("attention_bias", True)
    mixer = _common.attention(config, {"heads": heads}, rope, bias=bias)
    layers = _common.same_layers(config, mixer, _common.read_mlp(config, "gelu", bias=True))
    dropout = {"dropout": config.get("hidden_dropout", 0.0)}
    parallel = config.get("use_parallel_residual", True)
    residual: dict[str, Any] = {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre_norm"}
    return _common.layer_norm_design(config, layers, embedding=dropout, residual=residual | dropout)


def _read_alias(config: ConfigReader, default: float, old: str, new: str) -> float:
    """A field by its older name, the only one that transformers reads. Raises ConfigError if the newer name differs."""
    value = config.get(old, default)
    if config.get(new, value) != value:
        raise config.invalid(new, f"but '{old}' is {short_repr(value)}; make them equal")
    return value


def _write_equal_heads(design: ModelConfig, partial_rotary_factor: float | None = None) -> dict[str, Any]:
    """The fields of families with as many key heads as heads, which fill the width; the factor as in `write_rope`."""
    fields = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=partial_rotary_factor)
    return _common.without(fields, "num_key_value_heads", "head_dim")


def write_gpt_neox(design: ModelConfig) -> dict[str, Any]:
    fields = _write_equal_heads(design, ROTARY_FACTOR)
    return (
        fields
        | {"rotary_emb_base": fields["rope_theta"], "rotary_pct": fields["partial_rotary_factor"]}
        | {"use_parallel_residual": isinstance(design.residual, ParallelConfig)}
        | _common.write_mlp(design)
        | _common.written(design, "attention_bias", "hidden_dropout", "layer_norm_eps")
    )


def map_gpt_neox(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names for parallel and for pre-norm residuals."""
    _common.map_embedding_and_head(design, weights, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    heads = design_parts.first_attention(design).heads
    for hf, heddle, _ in _common.named_layers(design, prefix="gpt_neox.layers"):
        _common.map_pre_norms(weights, hf, heddle)
        gpt.map_megatron_layer(weights, hf, heddle, "attention", heads)


GPT_NEOX = Family(
    "gpt_neox", "GPTNeoXForCausalLM", read_gpt_neox, write_gpt_neox, map_gpt_neox,
    ignored_tensors=("*.attention.bias", "*.attention.masked_bias"),  # buffers that older files hold
)  # fmt: skip


def read_japanese(config: ConfigReader) -> dict[str, Any]:
    """GPT-NeoX Japanese (ABEJA 2022): pre-norm, whole heads rotated, one bias: of the last attention's output."""
    _common.check_width(config)
    heads, width = config.require_count("num_attention_heads"), config.require_count("hidden_size")
    config.optional("is_decoder")  # causal in either case
    base = _read_alias(config, 10000.0, "rotary_emb_base", "rope_theta")
    part = _read_alias(config, 1.0, "rotary_pct", "partial_rotary_factor")
    mixer = _common.attention(config, {"heads": heads}, read_rope(config, width // heads, base, part))
    mixer["dropout"] = config.get("attention_dropout", 0.1)
    feedforward = {
        "kind": "mlp",
        "hidden": width * config.get("intermediate_multiple_size", 4),
        "activation": _common.read_activation(config, default="gelu"),
    }
    mixers = [mixer] * (_layer_types.read_depth(config) - 1) + [mixer | {"bias": "out"}]
    residual = {"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)}
    return _common.layer_norm_design(config, _layer_types.layers_of(mixers, feedforward), tied=True, residual=residual)


def write_japanese(design: ModelConfig) -> dict[str, Any]:
    mlp, absent = design_parts.first_mlp(design), ("use_parallel_residual", "attention_bias", "intermediate_size")
    fields = _common.without(write_gpt_neox(design), *absent)
    rope = design_parts.first_rope(design)
    table = write_rope(rope, design_parts.first_attention(design).head_dim or 1, _common.DEFAULT_MAX_POSITIONS, 1.0)
    fields |= table | {"rotary_emb_base": table["rope_theta"], "rotary_pct": table["partial_rotary_factor"]}
    return fields | {"intermediate_multiple_size": max(1, mlp.hidden // design.width)}


def map_japanese(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    model, heads = "gpt_neox_japanese", design_parts.first_attention(design).heads
    _common.map_embedding_and_head(design, weights, f"{model}.embed_in", f"{model}.final_layer_norm", "embed_out")
    for hf, heddle, _ in _common.named_layers(design, prefix=f"{model}.layers"):
        _common.map_pre_norms(weights, hf, heddle)
        gpt.map_megatron_layer(weights, hf, heddle, "attention", heads)
        if weights.rules.pop(f"{hf}.attention.dense.bias", None):
            weights.add_tensor(f"{hf}.attention.dense_bias", f"{heddle}.mixer.out.bias")


JAPANESE = replace(
    GPT_NEOX,
    model_type="gpt_neox_japanese",
    architecture="GPTNeoXJapaneseForCausalLM",
    read_config=read_japanese,
    write_config=write_japanese,
    map_weights=map_japanese,
)


def read_bloom(config: ConfigReader) -> dict[str, Any]:
    """BLOOM (BigScience 2022): ALiBi, a norm after the embedding, biases everywhere.

    Queries, keys and values are one matrix, interleaved by head. With a number of heads that is not a power of two
    (BLOOM 176B), its slopes differ from heddle's, so it is refused.
    """
    width = config.require_count("hidden_size", "n_embed")
    heads = config.require_count("n_head", "num_attention_heads")
    if heads & (heads - 1):
        raise config.invalid("n_head", "should be a power of two; other numbers have slopes that heddle does not build")
    if width % heads:
        raise config.invalid("hidden_size", f"bloom needs a multiple of its {heads} heads")
    config.expect("apply_residual_connection_post_layernorm", False, default=False)
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    config.optional("slow_but_exact")
    # Of the first files: options of the program that trained them.
    config.note("masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "skip_bias_add")
    config.note("skip_bias_add_qkv", "offset_alibi", "seq_length", "unk_token_id", "n_inner", "use_return_dict")
    mixer = _common.attention(config, {"heads": heads}, {"kind": "alibi"}, bias=True)
    feedforward = {"kind": "mlp", "hidden": 4 * width, "activation": "gelu_tanh", "bias": True}
    depth = config.require_count("n_layer", "num_hidden_layers")
    layers = [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}]
    residual = {"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)}
    own = {"embedding": {"norm": True}, "residual": residual}
    return _common.layer_norm_design(config, layers, "layer_norm_epsilon", tied=True, **own)


def write_bloom(design: ModelConfig) -> dict[str, Any]:
    mixer, fields = design_parts.first_attention(design), _common.write_common(design)
    del fields["max_position_embeddings"]
    fields |= {"n_layer": fields.pop("num_hidden_layers"), "n_head": mixer.heads, "attention_dropout": mixer.dropout}
    return fields | _common.written(design, "layer_norm_epsilon", "hidden_dropout")


def map_bloom(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    _common.map_embedding_and_head(design, weights, "transformer.word_embeddings", "transformer.ln_f")
    weights.add_module("transformer.word_embeddings_layernorm", "embed.norm")
    heads = design_parts.first_attention(design).heads
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        _common.map_pre_norms(weights, hf, heddle)
        gpt.map_megatron_layer(weights, hf, heddle, "self_attention", heads)


BLOOM = Family("bloom", "BloomForCausalLM", read_bloom, write_bloom, map_bloom)


def read_falcon(config: ConfigReader) -> dict[str, Any]:
    """Falcon (Almazrouei et al. 2023): parallel branches, one or few heads of keys and values, RoPE.

    `new_decoder_architecture` (40B, 180B) sets the number of these heads, and has one or two norms per layer. ALiBi
    (Falcon-RW) is refused: it is scaled with the scores.
    """
    width = config.require_count("hidden_size", "n_embed")
    heads = config.require_count("num_attention_heads", "n_head")
    if width % heads:
        raise config.invalid("hidden_size", f"falcon needs a multiple of its {heads} heads")
    config.expect("alibi", False, None)
    config.expect("apply_residual_connection_post_layernorm", False, None)  # of the first files
    parallel, bias = config.get("parallel_attn", True), config.get("bias", False)
    kv_heads, norms = _read_architecture(config, heads, parallel)
    rope = read_rope(config, width // heads)
    mixer = _common.attention(config, {"heads": heads, "kv_heads": kv_heads}, rope, bias=bias)
    feedforward = {
        "kind": "mlp",
        "hidden": config.get("ffn_hidden_size", 4 * width),
        "activation": _common.read_activation(config, "activation", "gelu"),
        "bias": bias,
    }
    depth = config.require("num_hidden_layers", int, "n_layer")
    layers = [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}]
    residual: dict[str, Any] = {"kind": "parallel", "norms": norms} if parallel else {"kind": "pre_norm"}
    residual |= {"dropout": config.get("hidden_dropout", 0.0)}
    return _common.layer_norm_design(config, layers, "layer_norm_epsilon", tied=True, residual=residual)


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


def write_falcon(design: ModelConfig) -> dict[str, Any]:
    mixer, mlp, residual = design_parts.first_attention(design), design_parts.first_mlp(design), design.residual
    norms = residual.norms if isinstance(residual, ParallelConfig) else 1
    is_new = isinstance(residual, ParallelConfig) and (norms == 2 or mixer.kv_heads not in (1, mixer.heads))
    return _write_equal_heads(design) | {
        "new_decoder_architecture": is_new,
        "num_kv_heads": mixer.kv_heads if is_new else mixer.heads,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "multi_query": is_new or mixer.kv_heads == 1,  # the new architecture ignores it
        "parallel_attn": isinstance(residual, ParallelConfig),
        "alibi": False,
        "bias": mixer.bias is True,
        "ffn_hidden_size": mlp.hidden,
        "activation": design_parts.HF_ACTIVATIONS[mlp.activation],
        **_common.written(design, "hidden_dropout", "layer_norm_epsilon"),
    }


def map_falcon(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names; queries, keys and values are one matrix, interleaved by head of keys."""
    _common.map_embedding_and_head(design, weights, "transformer.word_embeddings", "transformer.ln_f")
    mixer = design_parts.first_attention(design)
    for hf, heddle, _ in _common.named_layers(design, prefix="transformer.h"):
        gpt.map_megatron_layer(weights, hf, heddle, "self_attention", mixer.kv_heads or mixer.heads)
        if isinstance(design.residual, ParallelConfig) and design.residual.norms == 2:
            weights.add_module(f"{hf}.ln_attn", f"{heddle}.residual.norms.mixer")
            weights.add_module(f"{hf}.ln_mlp", f"{heddle}.residual.norms.feedforward")
        else:
            weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.shared")
            _common.map_pre_norms(weights, hf, heddle)


FALCON = Family("falcon", "FalconForCausalLM", read_falcon, write_falcon, map_falcon)


def read_persimmon(config: ConfigReader) -> dict[str, Any]:
    """Persimmon (Adept 2023): norms of queries and keys, partial RoPE, an MLP of squared ReLU, biases everywhere."""
    _common.check_width(config)
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    rope = read_rope(config, width // heads, partial_rotary_factor=0.5)
    norm = "head" if config.get("qk_layernorm", True) else None
    mixer = _common.attention(config, {"heads": heads}, rope, bias=True, qk_norm=norm)
    layers = _common.same_layers(config, mixer, _common.read_mlp(config, "relu2", bias=True))
    residual = {"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)}
    return _common.layer_norm_design(config, layers, residual=residual)


def write_persimmon(design: ModelConfig) -> dict[str, Any]:
    return (
        _write_equal_heads(design, 0.5)
        | _common.write_mlp(design)
        | _common.written(design, "hidden_dropout", "layer_norm_eps")
        | {"qk_layernorm": design_parts.first_attention(design).qk_norm is not None}
    )


def map_persimmon(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names; queries, keys and values are one matrix, interleaved by head."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    heads = design_parts.first_attention(design).heads
    for hf, heddle, _ in _common.named_layers(design):
        _common.map_pre_norms(weights, hf, heddle)
        gpt.map_megatron_layer(weights, hf, heddle, "self_attn", heads)
        for role in "qk":
            weights.add_module(f"{hf}.self_attn.{role}_layernorm", f"{heddle}.mixer.{role}_norm")


PERSIMMON = Family("persimmon", "PersimmonForCausalLM", read_persimmon, write_persimmon, map_persimmon)


def read_stablelm(config: ConfigReader) -> dict[str, Any]:
    """StableLM 2 and 3B (Stability AI 2023): LayerNorm, partial RoPE, a gated feed-forward, sequential or parallel.

    `qk_layernorm` (StableLM 2 12B) is refused: its norms of each head have no biases, the others do.
    """
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    _common.check_width(config)
    config.expect("head_dim", width // heads, None)
    config.expect("qk_layernorm", False, default=False)
    config.expect("hidden_dropout", 0.0, default=0.0)  # of the feed-forward alone
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": config.require("num_key_value_heads", int),
        "head_dim": width // heads,
        "bias": "qkv" if config.get("use_qkv_bias", False) else False,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads, partial_rotary_factor=ROTARY_FACTOR),
    }
    layer = {
        "repeat": config.require("num_hidden_layers", int),
        "mixer": mixer,
        "feedforward": _common.read_gated(config),
    }
    norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}
    parallel = {"kind": "parallel", "norms": 1} if config.get("use_parallel_residual", False) else {"kind": "pre_norm"}
    return _common.design_fields(config, norm, [layer], residual=parallel)


def write_stablelm(design: ModelConfig) -> dict[str, Any]:
    config = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
    return (
        config
        | _common.write_gated(design)
        | {
            "use_qkv_bias": design_parts.first_attention(design).bias == "qkv",
            "use_parallel_residual": isinstance(design.residual, ParallelConfig),
            "qk_layernorm": False,
            "hidden_dropout": 0.0,
            "layer_norm_eps": design_parts.norm_eps(design),
        }
    )


def map_stablelm(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names; parallel branches share one norm."""
    shared = {"input_layernorm": "residual.norms.shared"} if isinstance(design.residual, ParallelConfig) else {}
    _common.map_weights(design, weights, _common.PRE_NORMS | shared)


STABLELM = Family("stablelm", "StableLmForCausalLM", read_stablelm, write_stablelm, map_stablelm)
