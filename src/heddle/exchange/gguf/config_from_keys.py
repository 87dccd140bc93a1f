"""The keys of a GGUF as the config.json of a family. Only the graphs that heddle writes are read."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import short_repr
from heddle.exchange.gguf.architectures import ARCHITECTURES
from heddle.exchange.gguf.keys_from_config import SIGMOID
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.llama3 import Llama3Config

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name
# Graphs whose RoPE may rotate some dims of a head only.
PARTIAL_ROPE = (
    "phi2", "phi3", "gptneox", "glm4", "chatglm", "glm4moe", "stablelm", "minimax-m2", "deepseek2",
    "qwen3next", "qwen35",
)  # fmt: skip
# Fields that the families of these graphs do not have.
MISSING_FIELDS = {
    "phi2": ("rms_norm_eps",),
    "gpt2": ("head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"),
    "gptneox": ("head_dim", "num_key_value_heads", "rms_norm_eps"),
    "command-r": ("rms_norm_eps",),
    "cohere2": ("rms_norm_eps",),
    "bert": ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"),
    "stablelm": ("rms_norm_eps",),
    "starcoder2": ("rms_norm_eps",),
    "olmo": ("rms_norm_eps",),
    "jais2": ("rms_norm_eps",),
    "deepseek2": ("head_dim", "num_key_value_heads"),
    "lfm2": ("rms_norm_eps",),
    "falcon": ("head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps"),
    "bloom": ("head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"),
    "starcoder": (
        "head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta",
    ),
    "mamba2": (
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
        "rope_theta",
    ),
}  # fmt: skip
YARN_LOG = {graph.name: graph.yarn_log or 1.0 for graph in ARCHITECTURES.values() if graph.latent}
KV_HEADS_BY_LAYER = ("lfm2", "granitehybrid")
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
# Of the scalings that Llama 3 was published with; a GGUF holds its factors alone.
LLAMA3_FACTORS = (8.0, 32.0)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}


class Keys:
    """Typed access to the keys. rope_factors: the factors of RoPE's frequencies, if the file has them."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields, self.source = fields, source
        self.rope_factors: list[float] = []

    def get(self, name: str, default: T) -> T:
        """A key's value, or the default. Raises CheckpointError for another kind of value."""
        value: Any = self.fields.get(name, default)
        if isinstance(default, float):
            value = _decimal(value) if isinstance(value, int | float) else value
        return value if isinstance(value, type(default)) else self._refuse(name, value, type(default))

    def require(self, name: str, kind: type[T]) -> T:
        """The value of a key that must be there."""
        if name not in self.fields:
            raise CheckpointError(f"{self.source}: key '{name}' is missing; without it the model cannot be built")
        value = self.fields[name]
        return value if isinstance(value, kind) else self._refuse(name, value, kind)

    @cached_property
    def graph(self) -> str:
        """The name of its graph, with which the names of the model's keys begin."""
        return self.require("general.architecture", str)

    def of_graph(self, name: str, default: T) -> T:
        """A key of the graph, as `get`."""
        return self.get(f"{self.graph}.{name}", default)

    def number(self, name: str) -> int:
        """An integer of the graph that must be there."""
        return self.require(f"{self.graph}.{name}", int)

    @property
    def head_dim(self) -> int:
        """Dims of a head: those of the file, or the width's share."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        return self.of_graph("attention.key_length", width // max(heads, 1))

    def _refuse(self, name: str, value: Any, kind: type) -> Any:
        raise CheckpointError(f"{self.source}: key '{name}' is {short_repr(value)}; should be of type {kind.__name__}")


def _decimal(value: float) -> Any:
    """A float32 as the shortest decimal number that rounds to it."""
    return float(str(np.float32(value)))


def config_from_keys(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    """The config.json, with its model_type. Raises ConfigError for a graph that heddle does not read."""
    if keys.graph not in ARCHITECTURE_FIELDS:
        known = ", ".join(ARCHITECTURE_FIELDS)
        raise ConfigError(
            f"{keys.source}: its architecture {short_repr(keys.graph)} is not supported; heddle reads {known}"
        )
    config = _common_fields(keys, shapes) | ARCHITECTURE_FIELDS[keys.graph](keys, shapes)
    missing = MISSING_FIELDS.get(keys.graph, ())
    return {name: value for name, value in config.items() if name not in missing}


def _common_fields(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    graph, head_dim, heads = keys.graph, keys.head_dim, keys.number("attention.head_count")
    value_length = () if graph == "deepseek2" else ("attention.value_length",)
    for name in (*value_length, *(() if graph in PARTIAL_ROPE else ("rope.dimension_count",))):
        if keys.of_graph(name, head_dim) != head_dim:
            raise ConfigError(f"{keys.source}: key '{graph}.{name}' should be key_length = {head_dim}")
    theta = keys.of_graph("rope.freq_base", 10000.0)
    by_layer = graph in KV_HEADS_BY_LAYER
    kv_heads = max(keys.of_graph("attention.head_count_kv", [heads])) if by_layer else 0
    return {
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": keys.number("embedding_length"),
        "num_hidden_layers": keys.number("block_count") - keys.of_graph("nextn_predict_layers", 0),
        "intermediate_size": keys.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or keys.of_graph("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.of_graph("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": keys.of_graph("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta} | _scaling(keys, theta, head_dim),
    }


def _scaling(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    kind = keys.of_graph("rope.scaling.type", "none")
    if keys.rope_factors:
        return _llama3(keys, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        name = f"{keys.graph}.rope.scaling.type"
        raise ConfigError(f"{keys.source}: key '{name}' is {kind!r}; heddle reads linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.of_graph("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        if (multiplier := keys.of_graph("rope.scaling.yarn_log_multiplier", 0.0)) != 0.0:
            all_dim = _decimal(multiplier / YARN_LOG.get(keys.graph, 1.0))
            scaling |= {"mscale": all_dim if keys.graph in YARN_LOG else 1.0, "mscale_all_dim": all_dim}
    return scaling


def _llama3(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, by its factors. Raises ConfigError if they are those of none that was published."""
    plain = RopeConfig(base=theta, rotary_dim=head_dim)
    unscaled = plain.build(head_dim).scaled_frequencies(1).inv_freq
    for factor in LLAMA3_FACTORS:
        scaling = Llama3Config(factor=factor, original_length=LLAMA3_LENGTH, **LLAMA3)
        scaled = plain.replace(scaling=scaling).build(head_dim).scaled_frequencies(1).inv_freq
        factors = [float(a / b) for a, b in zip(unscaled, scaled, strict=True)]
        same = len(factors) == len(keys.rope_factors)
        if same and all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(factors, keys.rope_factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": LLAMA3_LENGTH,
                **LLAMA3,
            }
    raise ConfigError(f"{keys.source}: its RoPE factors match no published Llama 3; import the original folder")


def _biases(shapes: Shapes) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_down.bias" in shapes}


def _llama(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    experts = keys.of_graph("expert_count", 0)
    if not experts:
        return {"model_type": "llama", **_biases(shapes)}
    used = keys.number("expert_used_count")
    return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}


def _experts(keys: Keys, renormalized: bool) -> dict[str, Any]:
    numbers = {"num_experts": keys.number("expert_count"), "num_experts_per_tok": keys.number("expert_used_count")}
    return numbers | {"norm_topk_prob": renormalized}


def _qwen3_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    experts = _experts(keys, True)
    return {"model_type": "qwen3_moe", **experts, "moe_intermediate_size": keys.number("expert_feed_forward_length")}


def _qwen2_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **_experts(keys, False),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.number("expert_shared_feed_forward_length"),
    }


def _olmoe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "olmoe", **_experts(keys, False), "attention_bias": False}


def _gemma(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", **GEMMA_ACTIVATION}


def _query_scale(keys: Keys, depth: int) -> dict[str, Any]:
    """Gemma's scale of scores: by head_dim, but in the largest by width / heads."""
    is_largest = keys.number("block_count") == depth
    dim = keys.number("embedding_length") // keys.number("attention.head_count") if is_largest else keys.head_dim
    return {"query_pre_attn_scalar": dim, "sliding_window": keys.of_graph("attention.sliding_window", 4096)}


def _gemma2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    caps = {name: keys.of_graph(name, default) for name, default in caps.items()}
    return {"model_type": "gemma2", **GEMMA_ACTIVATION, **_query_scale(keys, 46), **caps}


def _ropes(keys: Keys, theta: float, sliding_theta: float) -> dict[str, Any]:
    """The RoPEs of layers without and with a window; the thetas are the defaults."""
    head_dim = keys.number("attention.key_length")
    theta, sliding = keys.of_graph("rope.freq_base", theta), keys.of_graph("rope.freq_base_swa", sliding_theta)
    full = {"rope_theta": theta} | _scaling(keys, theta, head_dim)
    tables = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": sliding}}
    return {"rope_parameters": tables, "rope_theta": None}


def _gemma3(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    cap = {"final_logit_softcapping": keys.fields.get(f"{keys.graph}.final_logit_softcapping")}
    return {"model_type": "gemma3_text", **GEMMA_ACTIVATION, **_query_scale(keys, 62), **cap, **_ropes(keys, 1e6, 1e4)}


def _olmo2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    window = keys.of_graph("attention.sliding_window", 0)
    if not window:
        return {"model_type": "olmo2"}
    theta = keys.of_graph("rope.freq_base", 500000.0)
    return {"model_type": "olmo3", "sliding_window": window, **_ropes(keys, theta, theta)}


def _rotary_factor(keys: Keys) -> float:
    """The share of the dims of a head that RoPE rotates."""
    return keys.of_graph("rope.dimension_count", keys.head_dim) / max(keys.head_dim, 1)


def _layer_norm_eps(keys: Keys, default: float = 1e-5) -> float:
    return keys.of_graph("attention.layer_norm_epsilon", default)


def _phi3(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "phi3", "partial_rotary_factor": _rotary_factor(keys), "sliding_window": None}


def _phi(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"partial_rotary_factor": _rotary_factor(keys), "layer_norm_eps": _layer_norm_eps(keys)}
    return {"model_type": "phi", **numbers, "hidden_act": "gelu_new"}


def _gpt2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"n_inner": keys.number("feed_forward_length"), "layer_norm_epsilon": _layer_norm_eps(keys)}
    return {"model_type": "gpt2", **numbers, "activation_function": "gelu_new"}


def _gpt_neox(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "rotary_pct": _rotary_factor(keys),
        "rotary_emb_base": keys.of_graph("rope.freq_base", 10000.0),
        "layer_norm_eps": _layer_norm_eps(keys),
        "hidden_act": "gelu_pytorch_tanh",
        "use_parallel_residual": keys.of_graph("use_parallel_residual", True),
    }


def _cohere(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"logit_scale": keys.of_graph("logit_scale", 0.0625), "layer_norm_eps": _layer_norm_eps(keys)}
    if keys.graph == "command-r":
        return {"model_type": "cohere", **numbers}
    return {"model_type": "cohere2", **numbers, "sliding_window": keys.number("attention.sliding_window")}


def _bert(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": _layer_norm_eps(keys, 1e-12),
        "max_position_embeddings": shapes.get("position_embd.weight", (512,))[0],
        "type_vocab_size": shapes.get("token_types.weight", (2,))[0],
    }


def _granite(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "granite",
        **_biases(shapes),
        "attention_multiplier": keys.of_graph("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.of_graph("embedding_scale", 1.0),
        "residual_multiplier": keys.of_graph("residual_scale", 1.0),
        "logits_scaling": keys.of_graph("logit_scale", 1.0),
    }


def _granite_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    shared = keys.of_graph("expert_shared_feed_forward_length", 0)
    config = _granite(keys, shapes) | {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        **({"shared_intermediate_size": shared} if shared else {}),
    }
    del config["mlp_bias"]
    return config


def _glm(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    """GLM-4, with norms after the branches or without."""
    return {
        "model_type": "glm4" if keys.graph == "glm4" else "glm",
        "partial_rotary_factor": _rotary_factor(keys),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _deepseek_experts(keys: Keys) -> dict[str, Any]:
    groups = keys.of_graph("expert_group_count", 1)
    return {
        "n_routed_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "n_shared_experts": keys.number("expert_shared_count"),
        "first_k_dense_replace": keys.of_graph("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.of_graph("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.of_graph("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": keys.of_graph("expert_group_used_count", groups),
    }


def _glm4_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe",
        **_deepseek_experts(keys),
        "partial_rotary_factor": _rotary_factor(keys),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _deepseek(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    """DeepSeek-V2 or V3, by the function of its router's logits."""
    rope_dim, rank = keys.number("rope.dimension_count"), keys.of_graph("attention.q_lora_rank", 0)
    config = {
        **_deepseek_experts(keys),
        "model_type": "deepseek_v3",
        "q_lora_rank": rank or None,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.number("attention.key_length_mla") - rope_dim,
        "v_head_dim": keys.number("attention.value_length_mla"),
    }
    if keys.of_graph("expert_gating_func", 0) == SIGMOID:
        return config
    return {name: value for name, value in config.items() if name not in ("n_group", "topk_group")} | {
        "model_type": "deepseek_v2"
    }


def _stablelm(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "stablelm",
        "partial_rotary_factor": _rotary_factor(keys),
        "layer_norm_eps": _layer_norm_eps(keys),
        "use_qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
    }


def _ernie4_5_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    hidden = keys.number("expert_feed_forward_length")
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": False,
        "moe_num_experts": keys.number("expert_count"),
        "moe_k": keys.number("expert_used_count"),
        "moe_intermediate_size": hidden,
        "moe_num_shared_experts": keys.of_graph("expert_shared_feed_forward_length", 0) // hidden,
        "moe_layer_start_index": keys.of_graph("leading_dense_block_count", 0),
        "moe_layer_interval": keys.number("interleave_moe_layer_step"),
    }


def _hunyuan_moe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    numbers = {"num_experts": keys.number("expert_count"), "moe_topk": keys.number("expert_used_count")}
    return {"model_type": "hunyuan_v1_moe", **numbers, "attention_bias": False}


def _minimax_m2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "minimax_m2",
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "rotary_dim": keys.of_graph("rope.dimension_count", keys.head_dim),
    }


def _afmoe(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "afmoe",
        "num_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "moe_intermediate_size": keys.number("expert_feed_forward_length"),
        "num_shared_experts": keys.number("expert_shared_count"),
        "num_dense_layers": keys.of_graph("leading_dense_block_count", 0),
        "route_scale": keys.of_graph("expert_weights_scale", 1.0),
        "sliding_window": keys.number("attention.sliding_window"),
        "mup_enabled": True,
    }


def _gpt_oss(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "num_local_experts": keys.number("expert_count"),
        "num_experts_per_tok": keys.number("expert_used_count"),
        "sliding_window": keys.number("attention.sliding_window"),
    }


def _ministral3(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    rope = {
        "rope_theta": keys.of_graph("rope.freq_base", 10000.0),
        **_scaling(keys, 0.0, keys.head_dim),
        "original_max_position_embeddings": keys.number("rope.scaling.original_context_length"),
        "llama_4_scaling_beta": keys.of_graph("attention.temperature_scale", 0.0),
    }
    return {"model_type": "ministral3", "rope_parameters": rope, "sliding_window": None}


def _delta(keys: Keys) -> dict[str, Any]:
    """The fields of Qwen's two kinds of layers."""
    depth, interval = keys.number("block_count"), keys.of_graph("full_attention_interval", 4)
    usual = [(index + 1) % max(interval, 1) != 0 for index in range(depth)]
    recurrent = keys.of_graph("attention.recurrent_layers", usual)[: depth - keys.of_graph("nextn_predict_layers", 0)]
    heads = keys.number("ssm.time_step_rank")
    return {
        "partial_rotary_factor": _rotary_factor(keys),
        "attention_bias": False,
        "layer_types": ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": keys.number("ssm.inner_size") // max(heads, 1),
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
    }


def _qwen3_next(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return _delta(keys) | _qwen2_moe(keys, shapes) | {"model_type": "qwen3_next", "norm_topk_prob": True}


def _mamba(keys: Keys, names: Sequence[str]) -> dict[str, Any]:
    """The fields of Mamba-2. names: the family's, of heads, head_dim, state, groups and kernel."""
    heads = keys.number("ssm.time_step_rank")
    sizes = (
        heads,
        keys.number("ssm.inner_size") // max(heads, 1),
        keys.number("ssm.state_size"),
        keys.number("ssm.group_count"),
        keys.number("ssm.conv_kernel"),
    )
    return dict(zip(names, sizes, strict=True))


def _mamba2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {
        "model_type": "mamba2",
        **_mamba(keys, ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")),
        "expand": keys.number("ssm.inner_size") // max(keys.number("embedding_length"), 1),
        "layer_norm_epsilon": keys.of_graph("attention.layer_norm_rms_epsilon", 1e-5),
    }


def _granite_hybrid(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    kv_heads = keys.require(f"{keys.graph}.attention.head_count_kv", list)
    experts, hidden = keys.of_graph("expert_count", 0), keys.number("feed_forward_length")
    config = _granite(keys, shapes) | {
        "model_type": "granitemoehybrid",
        **_mamba(keys, ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")),
        "attention_bias": any(name.endswith("attn_q.bias") for name in shapes),
        "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
        "position_embedding_type": "rope" if keys.of_graph("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.of_graph("expert_used_count", 0),
        "shared_intermediate_size": keys.of_graph("expert_shared_feed_forward_length", 0) if experts else hidden,
    }
    del config["mlp_bias"]
    return config


def _lfm2(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    kv_heads = keys.require(f"{keys.graph}.attention.head_count_kv", list)
    return {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": keys.number("shortconv.l_cache"),
        "norm_eps": keys.of_graph("attention.layer_norm_rms_epsilon", 1e-5),
        "block_auto_adjust_ff_dim": False,
    }


def _falcon(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    heads = keys.number("attention.head_count")
    kv_heads, norms = keys.of_graph("attention.head_count_kv", heads), 1 + ("blk.0.attn_norm_2.weight" in shapes)
    is_new = norms == 2 or kv_heads not in (1, heads)
    return {
        "model_type": "falcon",
        "activation": "gelu_pytorch_tanh",
        "ffn_hidden_size": keys.number("feed_forward_length"),
        "layer_norm_epsilon": _layer_norm_eps(keys),
        "new_decoder_architecture": is_new,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads if is_new else heads,
        "num_ln_in_parallel_attn": norms if is_new else None,
    }


def _bloom(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    return {"model_type": "bloom", "layer_norm_epsilon": _layer_norm_eps(keys)}


def _gpt_bigcode(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    several = keys.of_graph("attention.head_count_kv", keys.number("attention.head_count")) != 1
    config = _gpt2(keys, shapes) | {"model_type": "gpt_bigcode", "activation_function": "gelu_pytorch_tanh"}
    return config | {"multi_query": not several}


ARCHITECTURE_FIELDS: dict[str, Callable[[Keys, Shapes], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda keys, shapes: {"model_type": "qwen2"},
    "qwen3": lambda keys, shapes: {"model_type": "qwen3", "attention_bias": False},
    "qwen3moe": _qwen3_moe,
    "qwen2moe": _qwen2_moe,
    "olmoe": _olmoe,
    "ernie4_5": lambda keys, shapes: {"model_type": "ernie4_5", "use_bias": False},
    "hunyuan-dense": lambda keys, shapes: {"model_type": "hunyuan_v1_dense", "attention_bias": False},
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "smollm3": lambda keys, shapes: {"model_type": "smollm3"},
    "phi3": _phi3,
    "phi2": _phi,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "command-r": _cohere,
    "cohere2": _cohere,
    "bert": _bert,
    "arcee": lambda keys, shapes: {"model_type": "arcee"},
    "granite": _granite,
    "granitemoe": _granite_moe,
    "glm4": _glm,
    "chatglm": _glm,
    "glm4moe": _glm4_moe,
    "exaone4": lambda keys, shapes: {
        "model_type": "exaone4", "sliding_window": keys.of_graph("attention.sliding_window", 0) or None,
    },
    "seed_oss": lambda keys, shapes: {
        "model_type": "seed_oss", "attention_bias": "blk.0.attn_q.bias" in shapes, **NO_DROPOUT,
    },
    "stablelm": _stablelm,
    "starcoder2": lambda keys, shapes: {"model_type": "starcoder2", "norm_epsilon": _layer_norm_eps(keys)},
    "olmo": lambda keys, shapes: {
        "model_type": "olmo", "clip_qkv": keys.fields.get("olmo.attention.clamp_kqv"),
    },
    "dots1": lambda keys, shapes: {"model_type": "dots1", **_deepseek_experts(keys), "sliding_window": None},
    "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
    "afmoe": _afmoe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek,
    "lfm2": _lfm2,
    "mistral3": _ministral3,
    "qwen3next": _qwen3_next,
    "qwen35": lambda keys, shapes: {"model_type": "qwen3_5_text", **_delta(keys)},
    "granitehybrid": _granite_hybrid,
    "mamba2": _mamba2,
    "falcon": _falcon,
    "bloom": _bloom,
    "starcoder": _gpt_bigcode,
    "jais2": lambda keys, shapes: {"model_type": "jais2", "layer_norm_eps": _layer_norm_eps(keys)},
}  # fmt: skip
