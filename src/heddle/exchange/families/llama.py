"""Llama, and decoders that differ little from it."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import STACKED_TRANSPOSED, Family, TensorTransform, WeightMap, reshaped
from heddle.exchange.rope import FULL, SLIDING, read_rope, read_rope_or, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig


def read_llama(config: ConfigReader) -> dict[str, Any]:
    """Llama 2 and 3 (Meta 2023, 2024): pre-norm, grouped queries, SwiGLU, RoPE with Llama 3.1's scaling."""
    _common.check_width(config)
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    mixer = _common.read_attention(config, bias=config.get("attention_bias", False))
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, feedforward))


def write_llama(design: ModelConfig) -> dict[str, Any]:
    return _common.write_decoder(design, "mlp_bias")


LLAMA = Family("llama", "LlamaForCausalLM", read_llama, write_llama, _common.map_weights, priority=0)


def read_internlm3(config: ConfigReader) -> dict[str, Any]:
    """InternLM3 (Shanghai AI Laboratory 2025): Llama's decoder with all biases or none."""
    # `qkv_bias` and `bias` are the names of the two biases in the first files.
    bias = config.get("attention_bias", False, "qkv_bias")
    if config.get("mlp_bias", False, "bias") != bias:
        raise config.invalid("mlp_bias", "should equal attention_bias")
    design = read_llama(config)
    for part in ("mixer", "feedforward"):
        design["layers"][0][part]["bias"] = bias
    return design


INTERNLM3 = Family("internlm3", "LlamaForCausalLM", read_internlm3, write_llama, _common.map_weights)


def read_iquestcoder(config: ConfigReader) -> dict[str, Any]:
    """IQuest-Coder-V1 (IQuest Lab 2025): Llama's decoder under a name of its own."""
    # Fields of the original code that no published model sets are refused where they are on.
    config.expect("clip_qkv", None)
    config.expect("use_sliding_window", False, None)
    return read_llama(config)


IQUESTCODER = Family("iquestcoder", "LlamaForCausalLM", read_iquestcoder, write_llama, _common.map_weights)


def read_arcee(config: ConfigReader) -> dict[str, Any]:
    """Arcee AFM (Arcee AI 2025): Llama's decoder with an MLP of squared ReLU instead of the gated feed-forward."""
    return _common.rms_design(config, 1e-5, _read_squared_layers(config, bias=False))


def _read_squared_layers(config: ConfigReader, bias: bool) -> list[dict[str, Any]]:
    """Layers with an MLP of squared ReLU. bias: the family's default for both kinds of biases."""
    _common.check_width(config)
    mixer = _common.read_attention(config, bias=config.get("attention_bias", bias))
    return _common.same_layers(config, mixer, _common.read_mlp(config, "relu2", config.get("mlp_bias", bias)))


def write_arcee(design: ModelConfig) -> dict[str, Any]:
    mlp = _common.write_mlp(design) | {"mlp_bias": design_parts.first_mlp(design).bias}
    return _common.write_decoder(design) | mlp


ARCEE = Family("arcee", "ArceeForCausalLM", read_arcee, write_arcee, _common.map_weights)


def read_jais2(config: ConfigReader) -> dict[str, Any]:
    """Jais 2 (Inception, MBZUAI & Cerebras 2025): Llama with LayerNorm, an MLP of squared ReLU, biases everywhere."""
    layers = _read_squared_layers(config, bias=True)
    return _common.layer_norm_design(config, layers)


def write_jais2(design: ModelConfig) -> dict[str, Any]:
    return _common.without(write_arcee(design), "rms_norm_eps") | _common.written(design, "layer_norm_eps")


JAIS2 = Family("jais2", "Jais2ForCausalLM", read_jais2, write_jais2, _common.map_weights)


def read_seed_oss(config: ConfigReader) -> dict[str, Any]:
    """Seed-OSS (ByteDance Seed 2025): Llama's decoder with biases of q, k and v, and dropout of branch outputs."""
    # A bias of the output projection alone is refused.
    config.get("pretraining_tp", 1)  # as in Llama
    has_bias, has_out_bias = config.get("attention_bias", True), config.get("attention_out_bias", False)
    if has_out_bias and not has_bias:
        raise config.invalid("attention_out_bias", "heddle supports it only with attention_bias")
    bias = "qkv" if has_bias and not has_out_bias else has_bias
    dropout = config.get("attention_dropout", 0.1)
    mixer = _common.read_attention(config, head_dim=128, bias=bias, dropout=dropout)
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    residual = {"kind": "pre_norm", "dropout": config.get("residual_dropout", 0.1)}
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, feedforward), residual=residual)


def write_seed_oss(design: ModelConfig) -> dict[str, Any]:
    bias = design_parts.first_attention(design).bias
    return _common.write_decoder(design) | {
        "attention_bias": bool(bias),
        "attention_out_bias": bias is True,
        **_common.written(design, "mlp_bias", "residual_dropout"),
    }


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", read_seed_oss, write_seed_oss, _common.map_weights)


def read_helium(config: ConfigReader) -> dict[str, Any]:
    """Helium (Kyutai 2025): Llama with interleaved RoPE, heads that fill the width, and norms that round last."""
    # `attention_bias` applies to q, k and v.
    width = config.require("hidden_size", int)
    bias = "qkv" if config.get("attention_bias", False) else False
    mixer = _common.read_attention(config, 100000.0, head_dim=128, bias=bias)
    if mixer["heads"] * mixer["head_dim"] != width:
        raise config.invalid("head_dim", f"all heads together should be as wide as the model, {width}")
    mixer["position"]["layout"] = "interleaved"
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-8, _common.same_layers(config, mixer, feedforward), cast="after")


def write_helium(design: ModelConfig) -> dict[str, Any]:
    fields = _common.write_decoder(design, "mlp_bias")
    return fields | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}


HELIUM = Family("helium", "HeliumForCausalLM", read_helium, write_helium, _common.map_weights)


CWM_THETA = 1e6
CWM_ROPE = {  # if the config has no RoPE at all
    "rope_type": "llama3", "rope_theta": CWM_THETA, "factor": 16.0, "high_freq_factor": 4.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
CWM_WINDOW = 8192


def read_cwm(config: ConfigReader) -> dict[str, Any]:
    """Code World Model (Meta FAIR 2025): Llama's decoder without biases of attention, and windows in most layers."""
    # Without `layer_types`, layers 0, 4, 8, … have no window.
    heads = _common.read_heads(config, head_dim=128)
    config.get("pretraining_tp", 1)  # as in Llama
    rope = read_rope_or(config, heads["head_dim"], CWM_THETA, CWM_ROPE)
    window = config.get_nullable("sliding_window", CWM_WINDOW) or None
    usual = [SLIDING if index % 4 else FULL for index in range(_layer_types.read_depth(config))]
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layer = {"mixer": _common.attention(config, heads, rope), "feedforward": feedforward}
    return _common.rms_design(config, 1e-5, _layer_types.windowed_layers(config, usual, window, layer))


def write_cwm(design: ModelConfig) -> dict[str, Any]:
    # Its class loads no config without a window, which layers of the type without one ignore, or a first token.
    fields = _common.write_unbiased_decoder(design, "mlp_bias", "layer_types")
    return fields | {"sliding_window": design_parts.first_window(design) or CWM_WINDOW, "bos_token_id": 0}


CWM = Family("cwm", "CwmForCausalLM", read_cwm, write_cwm, _common.map_weights)


SMOLLM3_INTERVAL = 4  # of layers without RoPE


def read_smollm3(config: ConfigReader) -> dict[str, Any]:
    """SmolLM3 (Bakouch et al. 2025): Llama's decoder with tied embeddings, and no positions in every fourth layer.

    Layers without RoPE may have a sliding window; in the published model no layer has one.
    """
    # `no_rope_layers` has a 1 for each layer with RoPE; without it, every `no_rope_layer_interval`th layer has none.
    # transformers ignores `max_window_layers`.
    config.ignore("max_window_layers", "pretraining_tp")
    mixer = _common.read_attention(config, 2e6, bias=config.get("attention_bias", False))
    rotated = read_rotated(config)
    window = config.get_nullable("sliding_window", None) if config.get("use_sliding_window", False) else None
    config.unread.discard("sliding_window")
    usual = [FULL if window is None or has_rope else SLIDING for has_rope in rotated]
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    mixers = [
        mixer | {"window": width, "position": mixer["position"] if has_rope else None}
        for width, has_rope in zip(windows, rotated, strict=True)
    ]
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, feedforward), tied=True)


def read_rotated(config: ConfigReader) -> list[bool]:
    """Whether each layer has RoPE."""
    depth, interval = _layer_types.read_depth(config), config.get("no_rope_layer_interval", SMOLLM3_INTERVAL)
    if interval < 1:
        raise config.invalid("no_rope_layer_interval", "should be at least 1, which leaves no layer its RoPE")
    rotated = config.get("no_rope_layers", list[int]()) or _every(interval, depth)
    if len(rotated) < depth or any(has_rope not in (0, 1) for has_rope in rotated):
        raise config.invalid("no_rope_layers", f"should have a 1 or a 0 for each of {depth} layers")
    return [has_rope == 1 for has_rope in rotated[:depth]]


def _every(interval: int, depth: int) -> list[int]:
    """1 for each layer with RoPE: all but every `interval`th one."""
    return [int((index + 1) % interval != 0) for index in range(depth)]


def write_smollm3(design: ModelConfig) -> dict[str, Any]:
    rotated = [int(getattr(layer.mixer, "position", None) is not None) for layer in design_parts.layers(design)]
    interval = rotated.index(0) + 1 if 0 in rotated else SMOLLM3_INTERVAL
    is_usual = rotated == _every(interval, design.depth)
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | _common.write_gated(design)
        | _common.written(design, "attention_bias", "mlp_bias")
        | {"no_rope_layers": rotated, "no_rope_layer_interval": interval if is_usual else SMOLLM3_INTERVAL}
        | _common.written(design, "use_sliding_window", "sliding_window", "layer_types", "rms_norm_eps")
    )


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", read_smollm3, write_smollm3, _common.map_weights)


XIELU, APERTUS_THETA = "xielu", 12e6
APERTUS_ROPE = {  # if the config has no RoPE at all
    "rope_type": "llama3", "rope_theta": APERTUS_THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
SCALAR = reshaped()


def read_apertus(config: ConfigReader) -> dict[str, Any]:
    """Apertus (Swiss AI 2025): Llama's decoder with norms of each head's q and k, an MLP of a learned activation."""
    config.expect_all(qk_norm=True, post_norm=False)
    config.optional("hidden_dropout")  # of training; its class has none
    mixer = _common.read_attention(config, qk_norm="head", bias=config.get("attention_bias", False))
    mixer["position"] = read_rope_or(config, mixer["head_dim"], APERTUS_THETA, APERTUS_ROPE)
    learned = config.get("hidden_act", XIELU) == XIELU
    feedforward = {
        "kind": "mlp",
        "hidden": config.require("intermediate_size", int),
        "activation": XIELU if learned else _common.read_activation(config),
    }
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward))


def write_apertus(design: ModelConfig) -> dict[str, Any]:
    learned = design_parts.first_mlp(design).activation == XIELU
    fields = _common.write_decoder(design) | _common.write_mlp(design)
    return fields | ({"hidden_act": XIELU} if learned else {})


NORMS = {"attention_layernorm": "residual.norms.mixer", "feedforward_layernorm": "residual.norms.feedforward"}


def _map_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    _common.map_gated(weights, hf, heddle)  # without a gate
    weights.add_modules(f"{hf}.act_fn", f"{heddle}.activation", {"alpha_p": "a_p", "alpha_n": "a_n"})
    for name in ("beta", "eps"):
        weights.add_tensor(f"{hf}.act_fn.{name}", f"{heddle}.activation.{name}", transform=SCALAR)


map_apertus = partial(_common.map_weights, names=NORMS, map_feedforward=_map_mlp)
APERTUS = Family("apertus", "ApertusForCausalLM", read_apertus, write_apertus, map_apertus)


def read_nemotron(config: ConfigReader) -> dict[str, Any]:
    """Nemotron 4 and Minitron (NVIDIA 2024): an MLP of squared ReLU, partial RoPE, LayerNorm of weights 1 + γ."""
    mixer = _common.read_attention(config, partial_rotary_factor=0.5, bias=config.get("attention_bias", False))
    layers = _common.same_layers(config, mixer, _common.read_mlp(config, "relu2", config.get("mlp_bias", False)))
    return _common.design_fields(config, {"kind": "layer", "eps": config.get("norm_eps", 1e-5), "offset": 1.0}, layers)


def write_nemotron(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=0.5)
        | _common.write_mlp(design)
        | _common.written(design, "attention_bias", "norm_eps")
        | {"mlp_bias": design_parts.first_mlp(design).bias}
    )


NEMOTRON = Family("nemotron", "NemotronForCausalLM", read_nemotron, write_nemotron, _common.map_weights)


def read_starcoder2(config: ConfigReader) -> dict[str, Any]:
    """StarCoder2 (Lozhkov et al. 2024): biases everywhere, grouped queries and one window for all.

    All layers are the same; `use_bias` applies to every projection.
    """
    config.require("num_key_value_heads", int)
    bias = config.get("use_bias", True)
    config.expect("mlp_type", "default", default="default")  # of the first files
    config.expect("norm_type", "layer_norm", default="layer_norm")
    # The first files repeat other fields in words of GPT-BigCode, which transformers ignores.
    config.note("activation_function", "layer_norm_epsilon", "scale_attn_weights")
    config.note("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    mixer = _common.read_attention(config, bias=bias, window=config.optional("sliding_window"))
    feedforward = _common.read_mlp(config, "gelu_pytorch_tanh", bias)
    return _common.layer_norm_design(
        config,
        _common.same_layers(config, mixer, feedforward),
        "norm_epsilon",
        tied=True,
        embedding={"dropout": config.get("embedding_dropout", 0.0)},
        residual={"kind": "pre_norm", "dropout": config.get("residual_dropout", 0.0)},
    )


def write_starcoder2(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.write_mlp(design)
        | _common.written(design, "sliding_window", "embedding_dropout", "residual_dropout")
        | {
            "use_bias": design_parts.first_mlp(design).bias or design_parts.first_attention(design).bias is True,
            "norm_epsilon": design_parts.norm_eps(design),
        }
    )


def _map_starcoder2_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, {"c_fc": "up", "c_proj": "down"})


map_starcoder2 = partial(_common.map_weights, map_feedforward=_map_starcoder2_mlp)


STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", read_starcoder2, write_starcoder2, map_starcoder2)


def read_aria(config: ConfigReader) -> dict[str, Any]:
    """The text model of Aria (Rhymes AI 2024): Llama's attention, routed experts and shared ones in every layer.

    Its routed experts have SiLU whatever `hidden_act` says of the shared ones, which must be the same.
    """
    config.expect("hidden_act", "silu", "swish", default="silu")
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    mixer = _common.read_attention(config, bias=config.get("attention_bias", False))
    experts = {
        "kind": "moe",
        "experts": config.get("moe_num_experts", 8),
        "top_k": config.get("moe_topk", 2),
        "hidden": config.require("intermediate_size", int),
        "activation": "silu",
        "routing": "topk_softmax",
        "shared": config.get("moe_num_shared_experts", 2),
        "bias": "shared" if config.get("mlp_bias", False) else False,
    }
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, experts))


def write_aria(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | {
            "intermediate_size": moe.hidden,
            "moe_num_experts": moe.experts,
            "moe_topk": moe.top_k,
            "moe_num_shared_experts": (moe.shared_hidden or moe.hidden) // moe.hidden,
            "mlp_bias": moe.bias == "shared",
        }
    )


def _map_aria(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_tensor(f"{hf}.router.weight", f"{heddle}.router.weight")
    for name, roles in {"fc1": ("gate", "up"), "fc2": ("down",)}.items():
        parameters = [f"{heddle}.{role}.weight" for role in roles]
        weights.add_tensor(f"{hf}.experts.{name}.weight", *parameters, transform=STACKED_TRANSPOSED)
    _common.map_gated(weights, f"{hf}.shared_experts", f"{heddle}.shared")


map_aria = partial(_common.map_weights, map_feedforward=_map_aria)
ARIA = Family("aria_text", "AriaTextForCausalLM", read_aria, write_aria, map_aria)


def read_diffllama(config: ConfigReader) -> dict[str, Any]:
    """DiffLlama: Llama's decoder with differential attention (Ye et al. 2024); its head norms have no weights.

    Its files count two heads of queries, keys and values for one of heddle's: first the first halves of all heads, then
    the second. Attention dropout is refused, as by its class.
    """
    heads, eps = _common.read_heads(config), config.get("rms_norm_eps", 1e-5)
    for name, role in (("num_attention_heads", "heads"), ("num_key_value_heads", "kv_heads")):
        if heads[role] % 2:
            raise config.invalid(name, "should be even, since every head has two maps")
        heads[role] //= 2
    config.expect("attention_dropout", 0.0, None)
    config.optional("lambda_std_dev")  # of the first weights
    mixer = {
        "kind": "differential_attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "norm": {"kind": "rms", "eps": eps, "weight": False},
        "position": read_rope(config, heads["head_dim"]),
    }
    return _common.rms_design(config, eps, _common.same_layers(config, mixer, _common.read_gated(config)))


def first_differential(design: ModelConfig) -> DifferentialAttentionConfig:
    """The first differential attention, or a default one."""
    return design_parts.first_mixer(design, DifferentialAttentionConfig(heads=1, kv_heads=1, head_dim=design.width))


def write_diffllama(design: ModelConfig) -> dict[str, Any]:
    mixer = first_differential(design)
    head_dim = mixer.head_dim or design.width
    return (
        _common.write_common(design)
        | _common.write_gated(design)
        | write_rope(design_parts.rope_of(mixer), head_dim, _common.DEFAULT_MAX_POSITIONS)
        | {
            "num_attention_heads": 2 * mixer.heads,
            "num_key_value_heads": 2 * (mixer.kv_heads or mixer.heads),
            "head_dim": head_dim,
            "attention_bias": mixer.bias,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def halves(heads: int) -> TensorTransform:
    """Rows of both parts of each head <-> the first parts of all heads, then the second ones."""
    return TensorTransform(
        lambda parameters: parameters[0].unflatten(0, (heads, 2, -1)).transpose(0, 1).flatten(0, 2),
        lambda tensor, shapes: [tensor.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)],
    )


def map_diffllama(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with the heads of projections in another order, and the vectors of λ."""
    mixer = first_differential(design)
    _common.map_weights(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}.self_attn", f"layers.{index}.mixer"
        for role, heads in (("q", mixer.heads), ("k", mixer.kv_heads or 1), ("v", mixer.kv_heads or 1)):
            weights.add_module(f"{hf}.{role}_proj", f"{heddle}.{role}", transform=halves(heads))
        weights.add_modules(hf, heddle, {name: name for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")})


DIFFLLAMA = Family("diffllama", "DiffLlamaForCausalLM", read_diffllama, write_diffllama, map_diffllama)


CHUNKED, GROWTH = "chunked_attention", "stepwise_from_one"
DEFAULT_CHUNK, DEFAULT_THETA, DEFAULT_GROWTH = 8192, 5e5, 0.1


def read_llama4(config: ConfigReader) -> dict[str, Any]:
    """Llama 4 (Meta 2025): chunked attention with RoPE, full attention without; experts with weighted inputs.

    Norms of queries and keys have no weights, so heddle can apply them before the rotation. `layer_types` says which
    layers have chunks, `no_rope_layers` which rotate, `moe_layers` which have experts.
    """
    config.note("router_jitter_noise", "router_aux_loss_coef", "for_llm_compressor")
    config.get("output_router_logits", False)
    heads = _common.read_heads(config, head_dim=128)
    depth, rotated = _layer_types.read_depth(config), read_rotated(config)
    position = read_rope(config, heads["head_dim"], DEFAULT_THETA) | {"layout": "interleaved"}
    usual = [CHUNKED if has_rope else FULL for has_rope in rotated]
    types = _layer_types.read_kinds(config, "layer_types", usual, (CHUNKED, FULL))
    chunk = config.get_nullable("attention_chunk_size", DEFAULT_CHUNK)
    if chunk is None and CHUNKED in types:
        raise config.invalid("attention_chunk_size", f"layers of type {CHUNKED} need one")
    mixer = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }
    normed = {"qk_norm": "head", "qk_norm_weight": False} if config.get("use_qk_norm", True) else {}
    beta, length = config.get("attn_scale", DEFAULT_GROWTH), config.get("floor_scale", DEFAULT_CHUNK)
    grows = config.get("attn_temperature_tuning", True) and beta
    growing = {"temperature_beta": beta, "temperature_length": length, "temperature_growth": GROWTH} if grows else {}
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers", list(range(max(step, 1) - 1, depth, max(step, 1))))
    dense = {
        "kind": "gated",
        "hidden": config.require("intermediate_size_mlp", int),
        "activation": _common.read_activation(config),
    }
    experts = dense | {
        "kind": "moe",
        "hidden": config.require("intermediate_size", int),
        "experts": config.require("num_local_experts", int),
        "top_k": config.require("num_experts_per_tok", int),
        "routing": "sigmoid",
        "renormalize": False,
        "weighted": "inputs",
        "shared": 1,
    }
    layers = [
        {
            "mixer": mixer
            | ({"position": position, **normed} if has_rope else {"position": None, **growing})
            | ({"window": chunk, "chunked": True} if kind == CHUNKED else {}),
            "feedforward": experts if index in sparse else dense,
        }
        for index, (kind, has_rope) in enumerate(zip(types, rotated, strict=True))
    ]
    return _common.rms_design(config, 1e-5, _layer_types.merge_repeats(layers))


def write_llama4(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_llama4` reads."""
    attention = [mixer for mixer in design_parts.mixers(design) if isinstance(mixer, AttentionConfig)]
    first, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    normed = next((mixer for mixer in attention if design_parts.has_rope(mixer)), first)
    growing = next((mixer for mixer in attention if mixer.temperature_beta is not None), None)
    gated, sparse = design_parts.first_gated(design), design_parts.has_experts(design)
    windows = [getattr(mixer, "window", None) for mixer in design_parts.mixers(design)]
    step = _moe.write_moe_layers(design)["decoder_sparse_step"]
    activation = moe.activation if True in sparse else gated.activation
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | {
            "attention_bias": first.bias is True,
            "use_qk_norm": normed.qk_norm == "head",
            "no_rope_layers": [int(design_parts.has_rope(mixer)) for mixer in design_parts.mixers(design)],
            "layer_types": [FULL if window is None else CHUNKED for window in windows],
            "attention_chunk_size": design_parts.first_window(design) or DEFAULT_CHUNK,
            "attn_temperature_tuning": growing is not None,
            "attn_scale": DEFAULT_GROWTH if growing is None else growing.temperature_beta,
            "floor_scale": DEFAULT_CHUNK if growing is None else growing.temperature_length,
            "interleave_moe_layer_step": step,
            "moe_layers": [index for index, is_sparse in enumerate(sparse) if is_sparse],
            "intermediate_size_mlp": gated.hidden,
            "intermediate_size": moe.hidden,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "hidden_act": design_parts.HF_ACTIVATIONS[activation or "silu"],
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """A layer's feed-forward, dense or with experts."""
    if f"{heddle}.router.weight" not in weights.shapes:
        _common.map_gated(weights, hf, heddle)
        return
    weights.add_module(f"{hf}.router", f"{heddle}.router")
    _common.map_gated(weights, f"{hf}.shared_expert", f"{heddle}.shared")
    gate_up = (f"{heddle}.gate.weight", f"{heddle}.up.weight")
    weights.add_tensor(f"{hf}.experts.gate_up_proj", *gate_up, transform=STACKED_TRANSPOSED)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight", transform=STACKED_TRANSPOSED)


def map_llama4(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the experts'."""
    _common.map_weights(design, weights, map_feedforward=map_feedforward, feedforward="feed_forward")


LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", read_llama4, write_llama4, map_llama4)


def read_emu3(config: ConfigReader) -> dict[str, Any]:
    """Emu3's language model (BAAI 2024): Llama, with the dropout of attention after branches; images are tokens."""
    mixer = _common.read_attention(config, 1e6, bias=config.get("attention_bias", False))
    layers = _common.same_layers(config, mixer, _common.read_gated(config, bias=config.get("mlp_bias", False)))
    return _common.rms_design(config, 1e-5, layers, residual={"kind": "pre_norm", "dropout": mixer["dropout"]})


def write_emu3(design: ModelConfig) -> dict[str, Any]:
    return _common.write_decoder(design, "mlp_bias") | {"bos_token_id": 0, "pad_token_id": 0}  # no null in its class


EMU3 = Family("emu3_text_model", "Emu3ForCausalLM", read_emu3, write_emu3, _common.map_weights)
