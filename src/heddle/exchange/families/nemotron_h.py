"""Nemotron-H, Nano 2 and 3 (NVIDIA 2025): one branch per layer: Mamba-2, attention without positions, MLP, experts.

Multi-token modules (`mtp.`) are ignored: each is an attention layer and a mixture, where heddle's has one layer.
Experts on latents (`moe_latent_size`) are refused. Time steps are at least `time_step_min`, as in transformers,
whatever `time_step_limit` says. `residual_in_fp32` only affects the precision of sums in narrow dtypes.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, mamba2
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.mamba2 import Mamba2Config

LINEAR, MLP, MOE = _layer_types.LINEAR, "mlp", "moe"
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
ALIASES = {"mamba": LINEAR, "attention": FULL}
NAMES: mamba2.Names = {
    "heads": ("mamba_num_heads", 128), "head_dim": ("mamba_head_dim", 64), "state_size": ("ssm_state_size", 128),
    "groups": ("n_groups", 8), "conv_kernel": ("conv_kernel", 4), "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
}  # fmt: skip
EXPERTS = _common.Fields(
    top_k=("num_experts_per_tok", 2),
    hidden=("moe_intermediate_size", 7688),
    scale=("routed_scaling_factor", 1.0),
    renormalize=("norm_topk_prob", True),
    groups=("n_group", 1),
    top_groups=("topk_group", 1),
    experts=("n_routed_experts", 8, "num_local_experts"),
)
PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
# Of kernels, of training and of layers that are not built; transformers computes the same whatever they say.
UNUSED_FIELDS = """num_hidden_layers num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
num_logits_to_keep mamba_ssm_cache_dtype mamba_proj_bias moe_shared_expert_overlap output_router_logits
n_shared_experts expand time_step_limit""".split()  # noqa: SIM905


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layers_block_type`, or in older files `hybrid_override_pattern`, says what each layer is."""
    eps = config.get("layer_norm_epsilon", 1e-5, "rms_norm_eps", "norm_eps")
    config.expect("tie_word_embeddings", False, default=False)  # transformers never ties them
    config.expect("mamba_hidden_act", "silu", default="silu")
    config.expect("sliding_window", None)
    config.note("residual_in_fp32")
    least = config.get("time_step_min", 0.001)
    kinds = {
        LINEAR: {"mixer": mamba2.read_fields(config, NAMES, eps) | mamba2.time_step_limit(least)},
        FULL: {"mixer": _read_attention(config)},
        MLP: {"feedforward": _read_mlp(config)},
        MOE: {"feedforward": _read_experts(config)},
    }
    config.ignore(*UNUSED_FIELDS)
    layers = _layer_types.merge_repeats([kinds[kind] for kind in _read_types(config)])
    residual = {"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)}
    return _common.design_fields(config, {"kind": "rms", "eps": eps, "cast": "after"}, layers, residual=residual)


def _read_types(config: ConfigReader) -> list[str]:
    pattern = config.get("hybrid_override_pattern", "")
    types = config.get("layers_block_type", [PATTERN.get(kind, kind) for kind in pattern], "layer_types")
    types = [ALIASES.get(kind, kind) for kind in types]
    if not types or set(types) - set(PATTERN.values()):
        name = "hybrid_override_pattern" if pattern else "layers_block_type"
        raise config.invalid(name, f"should say {LINEAR}, {FULL}, {MLP} or {MOE} of each layer")
    return types


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    heads = _common.read_heads(config, config.get("head_dim", 128, "attention_head_dim"))
    return {"kind": "attention", **heads, "dropout": config.get("attention_dropout", 0.0)}


def _read_mlp(config: ConfigReader) -> dict[str, Any]:
    return {
        "kind": "mlp",
        "hidden": config.get("intermediate_size", 21504),
        "activation": _common.read_activation(config, "mlp_hidden_act", "relu2"),
        "bias": config.get("mlp_bias", False),
    }


def _read_experts(config: ConfigReader) -> dict[str, Any]:
    """Experts of two matrices, and a shared one of a width of its own."""
    config.expect("moe_latent_size", None)
    mlp = _read_mlp(config)
    return {
        "kind": "moe",
        "expert": "mlp",
        **EXPERTS.read(config),
        "activation": mlp["activation"],
        "bias": "shared" if mlp["bias"] else False,
        "shared": 1,
        "shared_hidden": config.get("moe_shared_expert_intermediate_size", 7688),
        "routing": "sigmoid",
        "bias_update": 0.0,
    }


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, mlp = design_parts.first_attention(design), design_parts.first_mlp(design)
    moe, limit = design_parts.first_moe(design), mamba2.first_mamba(design).time_step_limit
    has_experts = any(design_parts.has_experts(design))
    activation = moe.activation if has_experts else mlp.activation
    shared = {"moe_shared_expert_intermediate_size": moe.shared_hidden or moe.hidden}
    return (
        _common.write_common(design)
        | mamba2.write_fields(design, NAMES)
        | {
            "mamba_ssm_cache_dtype": "float32",  # for vLLM
            "time_step_min": 0.0 if limit is None else limit[0],
            "tie_word_embeddings": False,
            "layers_block_type": [_type(layer) for layer in design_parts.layers(design)],
            "num_attention_heads": mixer.heads,
            "num_key_value_heads": mixer.kv_heads,
            "head_dim": mixer.head_dim,
            "attention_dropout": mixer.dropout,
            "intermediate_size": mlp.hidden,
            "mlp_hidden_act": design_parts.HF_ACTIVATIONS[activation or "relu2"],
            "mlp_bias": moe.bias == "shared" if has_experts else mlp.bias,
        }
        | _common.written(design, "hidden_dropout", "layer_norm_epsilon")
        | (EXPERTS.write(moe) | shared if has_experts else {})
    )


def _type(layer: LayerConfig) -> str:
    """The nearest type of a layer."""
    if layer.mixer is not None:
        return LINEAR if isinstance(layer.mixer, Mamba2Config) else FULL
    return MOE if isinstance(layer.feedforward, MoEConfig) else MLP


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Its own names: the branch of a layer, of any kind, is its `mixer`."""
    _common.map_embedding_and_head(design, weights, "backbone.embeddings", "backbone.norm_f")
    for hf, heddle, layer in _common.named_layers(design, prefix="backbone.layers"):
        for branch in ("mixer", "feedforward"):
            weights.add_module(f"{hf}.norm", f"{heddle}.residual.norms.{branch}")
        if isinstance(layer.mixer, Mamba2Config):
            mamba2.map_mixer(weights, f"{hf}.mixer", f"{heddle}.mixer")
            continue
        weights.add_modules(f"{hf}.mixer", f"{heddle}.mixer", PROJECTIONS)
        _map_feedforward(weights, f"{hf}.mixer", f"{heddle}.feedforward")


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    names = {"up": "up_proj", "down": "down_proj"}
    if f"{heddle}.router.weight" in weights.shapes:
        _moe.map_experts(weights, hf, heddle, names)
        weights.add_tensor(f"{hf}.gate.e_score_correction_bias", f"{heddle}.router.expert_bias")
        hf, heddle = f"{hf}.shared_experts", f"{heddle}.shared"
    for role, name in names.items():
        weights.add_module(f"{hf}.{name}", f"{heddle}.{role}")


FAMILY = Family("nemotron_h", "NemotronHForCausalLM", read_config, write_config, map_weights, ignored_tensors=("mtp.",))
