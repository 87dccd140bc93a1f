"""Mamba's selective scan, alone (Mamba, Falcon-Mamba) or with attention and experts (Jamba)."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.families.mamba2 import AUTO, map_backbone
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba import EXPANSION, MambaConfig
from heddle.parts.norms.rms import RMSConfig

FIELDS = _common.Fields(
    state_size=("state_size", 16),
    conv_kernel=("conv_kernel", 4),
    conv_bias=("use_conv_bias", True),
    bias=("use_bias", False),
)
PREFIXED_FIELDS = _common.Fields(
    state_size=("mamba_d_state", 16),
    conv_kernel=("mamba_d_conv", 4),
    conv_bias=("mamba_conv_bias", True),
    bias=("mamba_proj_bias", False),
)
LAYER = {
    "conv1d.bias": "convolution.bias", "dt_proj": "time_step_up", "dt_proj.bias": "time_step_bias", "A_log": "rate",
    "D": "skip", "dt_layernorm": "time_step_norm", "b_layernorm": "k_norm", "c_layernorm": "q_norm", "out_proj": "out",
}  # fmt: skip
# Of the first weights, of kernels, or older names that transformers does not read.
UNUSED_FIELDS = """time_step_min time_step_max time_step_floor time_step_init_scheme time_step_scale
rescale_prenorm_residual use_mambapy use_falcon_mambapy use_associative_scan use_mamba_kernels d_inner d_model n_layer
ssm_cfg fused_add_norm pad_vocab_size_multiple""".split()  # noqa: SIM905


def read_rank(config: ConfigReader, name: str) -> int | None:
    """The rank of the time steps; None: the paper's."""
    return None if config.optional(name) in (None, AUTO) else config.require_count(name)


def first_scan(design: ModelConfig) -> MambaConfig:
    """The first Mamba mixer, or a default one."""
    return design_parts.first_mixer(design, MambaConfig(hidden=EXPANSION * design.width, time_step_rank=1))


def map_scan(weights: WeightMap, hf: str, heddle: str) -> None:
    """The tensors of a mixer: `in_proj` computes v and z, `x_proj` the input of Δ, and k and q."""
    weights.add_module(f"{hf}.in_proj", f"{heddle}.v", f"{heddle}.gate")
    weights.add_tensor(f"{hf}.conv1d.weight", f"{heddle}.convolution.weight", transform=DEPTHWISE_CONV)
    weights.add_module(f"{hf}.x_proj", *(f"{heddle}.{role}" for role in ("time_step_down", "k", "q")))
    weights.add_modules(hf, heddle, LAYER)


def read_mamba(config: ConfigReader, **mixer: Any) -> dict[str, Any]:
    """Mamba (Gu & Dao 2023): a selective scan in every layer, and neither attention nor feed-forwards.

    `expand` counts where `intermediate_size` is absent, as in transformers. `residual_in_fp32` is about the precision
    of sums in narrow types.
    """
    eps, width = config.get("layer_norm_epsilon", 1e-5), config.require_count("hidden_size")
    config.expect("hidden_act", "silu", default="silu")
    config.expect("rms_norm", True, default=True)
    config.note("residual_in_fp32")
    config.ignore(*UNUSED_FIELDS)
    channels = config.get("intermediate_size", config.get("expand", EXPANSION) * width)
    mixer |= {"kind": "mamba", "hidden": channels, "time_step_rank": read_rank(config, "time_step_rank")}
    layer = {"repeat": _layer_types.read_depth(config), "mixer": mixer | FIELDS.read(config)}
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, [layer], tied=True)


def write_mamba(design: ModelConfig) -> dict[str, Any]:
    common, scan = _common.without(_common.write_common(design), "max_position_embeddings"), first_scan(design)
    channels = scan.hidden or EXPANSION * design.width
    return (
        common
        | FIELDS.write(scan)
        | {"hidden_act": "silu", "expand": max(1, channels // design.width), "intermediate_size": channels}
        | {"time_step_rank": scan.time_step_rank}
        | _common.written(design, "layer_norm_epsilon")
    )


map_mamba = partial(map_backbone, map_one=map_scan)
MAMBA = Family("mamba", "MambaForCausalLM", read_mamba, write_mamba, map_mamba)


def read_falcon_mamba(config: ConfigReader) -> dict[str, Any]:
    """Falcon-Mamba (TII 2024): Mamba with norms, without weights, of Δ's input and of B and C."""
    return read_mamba(config, norm={"kind": "rms", "eps": config.get("mixer_rms_eps", 1e-6), "weight": False})


def write_falcon_mamba(design: ModelConfig) -> dict[str, Any]:
    norm = first_scan(design).norm
    return write_mamba(design) | {"mixer_rms_eps": norm.eps if isinstance(norm, RMSConfig) else 1e-6}


FALCON_MAMBA = Family("falcon_mamba", "FalconMambaForCausalLM", read_falcon_mamba, write_falcon_mamba, map_mamba)


ATTENTION, EXPERTS = "attn_layer", "expert_layer"
NORMS = {"input_layernorm": "residual.norms.mixer", "pre_ff_layernorm": "residual.norms.feedforward"}


def read_jamba(config: ConfigReader) -> dict[str, Any]:
    """Jamba (AI21 2024): Mamba with norms of Δ, B and C, attention without positions in every eighth layer, experts."""
    config.expect("hidden_act", "silu", default="silu")  # the convolution uses it, too
    config.expect_all(sliding_window=None, mamba_inner_layernorms=True)
    config.ignore("num_logits_to_keep", "calc_logits_for_entire_prompt", "n_ctx", *UNUSED_FIELDS)
    depth, width = _layer_types.read_depth(config), config.require_count("hidden_size")
    eps = config.get("rms_norm_eps", 1e-6)
    heads = _common.read_heads(config)
    heads["kv_heads"] = config.get_nullable("num_key_value_heads", 8) or heads["heads"]
    attention = _common.attention(config, heads)
    scan: dict[str, Any] = {"kind": "mamba", "hidden": config.get("mamba_expand", EXPANSION) * width}
    scan |= {"time_step_rank": read_rank(config, "mamba_dt_rank"), "norm": {"kind": "rms", "eps": eps}}
    scan |= PREFIXED_FIELDS.read(config)
    mixers = [attention if has_attention else scan for has_attention in _read_every(config, ATTENTION, 8, 4, depth)]
    number, gated = config.get("num_experts", 16, "num_local_experts"), _common.read_gated(config)
    sparse = [number > 1 and is_sparse for is_sparse in _read_every(config, EXPERTS, 2, 1, depth)]
    top_k = config.get("num_experts_per_tok", 2)
    experts = gated | {"kind": "moe", "experts": number, "top_k": top_k, "renormalize": False}
    experts |= _moe.read_aux_loss(config, top_k, sum(sparse))
    layers = _layer_types.layers_of(mixers, [experts if is_sparse else gated for is_sparse in sparse])
    return _common.rms_design(config, eps, layers)


def _read_every(config: ConfigReader, name: str, period: int, offset: int, depth: int) -> list[bool]:
    """Whether each layer is one of every `{name}_period`, the first of which is at `{name}_offset`."""
    period, offset = config.get(f"{name}_period", period), config.get(f"{name}_offset", offset)
    if not 0 <= offset < period:
        raise config.invalid(f"{name}_offset", f"should be from 0 to below {name}_period = {period}")
    return [index % period == offset for index in range(depth)]


def _write_every(name: str, layers: list[bool]) -> dict[str, int]:
    """The fields that `_read_every` reads, with the least period."""
    found, depth = [index for index, is_there in enumerate(layers) if is_there], len(layers)
    offset = found[0] if found else depth
    period = found[1] - offset if len(found) > 1 else depth - offset
    return {f"{name}_period": max(period, offset + 1), f"{name}_offset": offset}


def write_jamba(design: ModelConfig) -> dict[str, Any]:
    mixer, scan, moe = design_parts.first_attention(design), first_scan(design), design_parts.first_moe(design)
    layers, sparse = design_parts.layers(design), design_parts.has_experts(design)
    hidden = moe.hidden if all(sparse) else design_parts.first_gated(design).hidden
    return (
        _common.write_common(design)
        | PREFIXED_FIELDS.write(scan)
        | {
            "hidden_act": "silu",
            "mamba_expand": max(1, (scan.hidden or 1) // design.width),
            "mamba_dt_rank": scan.time_step_rank,
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.kv_heads,
            "head_dim": mixer.head_dim,
            "attention_dropout": mixer.dropout,
            "intermediate_size": hidden,
            "num_experts": moe.experts if any(sparse) else 1,
            "num_experts_per_tok": moe.top_k if any(sparse) else 1,
            **_write_every(ATTENTION, [not isinstance(layer.mixer, MambaConfig) for layer in layers]),
            **_write_every(EXPERTS, sparse),
            **_moe.write_aux_loss(design, moe),
        }
        | _common.written(design, "rms_norm_eps")
    )


def map_jamba(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of attention; its own of the norms, the feed-forward and Mamba."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    for hf, heddle, layer in _common.named_layers(design):
        weights.add_modules(hf, heddle, NORMS)
        if isinstance(layer.mixer, MambaConfig):
            map_scan(weights, f"{hf}.mamba", f"{heddle}.mixer")
        else:
            _common.map_attention(weights, hf, heddle)
        _moe.map_feedforward(weights, f"{hf}.feed_forward", f"{heddle}.feedforward", router="router")


JAMBA = Family("jamba", "JambaForCausalLM", read_jamba, write_jamba, map_jamba)
