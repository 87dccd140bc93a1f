"""The keys of a GGUF as the config.json of a family. Only the graphs that heddle writes are read."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import short_repr
from heddle.exchange.gguf.architectures import ARCHITECTURES, INNER_EPS, Architecture
from heddle.exchange.gguf.keys_from_config import SIGMOID, SOFTMAX
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import MAX_LAYERS
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.llama3 import Llama3Config

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name
# Of several families with one graph, the last, which has what the others lack.
GRAPHS = {graph.name: graph for graph in ARCHITECTURES.values()}
# Keys of RoPE that llama.cpp reads and heddle has one value for.
ROPE_FIXED = {
    "alpha": 0.0,
    "attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
# Of the scalings that Llama 3 and EXAONE 4 were published with; a GGUF holds its factors alone.
LLAMA3_FACTORS = (8.0, 16.0, 32.0)
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
        return self._checked(name, self.fields.get(name, default), type(default))

    def require(self, name: str, kind: type[T]) -> T:
        """The value of a required key."""
        if name not in self.fields:
            raise CheckpointError(f"{self.source}: key '{name}' is missing; without it the model cannot be built")
        return self._checked(name, self.fields[name], kind)

    @cached_property
    def graph(self) -> str:
        """The name of its graph, with which the names of the model's keys begin."""
        return self.require("general.architecture", str)

    @cached_property
    def assumed(self) -> Architecture:
        """What its graph assumes of a model of this depth."""
        return GRAPHS[self.graph].of_depth(self.number("block_count"))

    def of_graph(self, name: str, default: T) -> T:
        """A key of the graph, as `get`."""
        return self.get(f"{self.graph}.{name}", default)

    def number(self, name: str) -> int:
        """A required integer of the graph."""
        return self.require(f"{self.graph}.{name}", int)

    def expect_same(self, name: str, expected: T) -> None:
        """Raises ConfigError if a key of the graph has another value."""
        if f"{self.graph}.{name}" in self.fields and (value := self.of_graph(name, expected)) != expected:
            raise ConfigError(f"{self.source}: key '{self.graph}.{name}' is {value}; heddle reads {expected} here")

    def layer_types(self, depth: int) -> list[str]:
        """Which layers have a window: as an array says, or all but each `sliding_window_pattern`-th; 0: all."""
        name, depth = "attention.sliding_window_pattern", min(depth, MAX_LAYERS)
        array = self.fields.get(f"{self.graph}.{name}")
        if isinstance(array, list):
            windowed = [*array[:depth], *[False] * (depth - len(array))]
        else:
            period = self.of_graph(name, self.assumed.full_attention_period or 0)
            windowed = [not period or (index + 1) % period for index in range(depth)]
        return [SLIDING if each else FULL for each in windowed]

    @property
    def head_dim(self) -> int:
        """Dims of a head: from the file, or width / heads."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        return self.of_graph("attention.key_length", width // max(heads, 1))

    @property
    def kv_heads(self) -> int:
        """Heads of keys: from the file, or all."""
        return self.of_graph("attention.head_count_kv", self.number("attention.head_count"))

    def _checked(self, name: str, value: Any, kind: type[T]) -> T:
        """The value. One number for all layers may be an array with a number for each."""
        if kind is int and isinstance(value, list) and len(set(value)) == 1:
            [value] = set(value)
        if kind is float and isinstance(value, int | float):
            value = _decimal(value)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            remedy = f"should be of type {kind.__name__}"
            raise CheckpointError(f"{self.source}: key '{name}' is {short_repr(value)}; {remedy}")
        return value


Entry = Any  # a field's value: a function of the keys and the shapes, such as a `Key`, or a constant
ABSENT: Entry = object()  # of a field that all others have
FieldTable = dict[str, Any]  # of these


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
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{keys.source}: tensor 'token_embd.weight' is missing; download it again")
    graph, head_dim = keys.assumed, keys.head_dim
    if not graph.encoder and not keys.of_graph("attention.causal", True):
        raise ConfigError(
            f"{keys.source}: key '{keys.graph}.attention.causal' is false; heddle reads causal models only"
        )
    if graph.window_base == "same":
        keys.expect_same("rope.freq_base_swa", keys.of_graph("rope.freq_base", 10000.0))
    keys.expect_same("rope.dimension_count_swa", keys.of_graph("rope.dimension_count", head_dim))
    for name, value in graph.fixed_keys.items():
        keys.expect_same(name, value)
    if graph.gating is not None:
        keys.expect_same("expert_gating_func", graph.gating)
    for name, is_free in (("attention.value_length", graph.latent), ("rope.dimension_count", graph.partial_rope)):
        if not is_free and keys.of_graph(name, head_dim) != head_dim:
            raise ConfigError(f"{keys.source}: key '{keys.graph}.{name}' should be key_length = {head_dim}")
    table = ARCHITECTURE_FIELDS[keys.graph]
    own = table(keys, shapes) if callable(table) else table
    entries = {name: entry for name, entry in (FIELDS | own).items() if entry is not ABSENT}
    config = {name: entry(keys, shapes) if callable(entry) else entry for name, entry in entries.items()}
    if config.get("n_group") is None and keys.of_graph("expert_group_count", 0):  # llama.cpp has groups in all graphs
        keys.expect_same("expert_group_count", 1)
    if config.get("sliding_window"):
        types = keys.layer_types(config["num_hidden_layers"])
        config |= {"sliding_window": None} if graph.full_attention_period is None else {"layer_types": types}
    return config


def _scaling(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of RoPE, with llama.cpp's defaults: a factor without a type is linear, and a factor of 0 is none."""
    kind = keys.of_graph("rope.scaling.type", "linear")
    factor = keys.of_graph("rope.scaling.factor", keys.of_graph("rope.scale_linear", 0.0)) or 1.0
    for name, fixed in ROPE_FIXED.items():
        if (value := keys.of_graph(f"rope.scaling.{name}", fixed)) != fixed:
            key = f"{keys.graph}.rope.scaling.{name}"
            raise ConfigError(
                f"{keys.source}: key '{key}' is {value}; heddle reads {fixed} only; import the original folder"
            )
    by_kind = {"none": keys.assumed.factor_without_type, "linear": keys.assumed.latent}
    if factor != 1.0 and (by_kind.get(kind) or (kind != "none" and keys.rope_factors)):
        for name in ("rope.scaling.factor", "rope.scale_linear"):
            keys.expect_same(name, 1.0)
    if keys.rope_factors:
        return _llama3(keys, theta, head_dim)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        name = f"{keys.graph}.rope.scaling.type"
        raise ConfigError(f"{keys.source}: key '{name}' is {kind!r}; heddle reads linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        multiplier = keys.of_graph("rope.scaling.yarn_log_multiplier", 0.0)
        if multiplier != 0.0 and keys.assumed.yarn_log is not None:
            all_dim = _decimal(multiplier / keys.assumed.yarn_log)
            scaling |= {"mscale": all_dim if keys.assumed.latent else 1.0, "mscale_all_dim": all_dim}
        elif keys.assumed.latent:
            key = f"{keys.graph}.rope.scaling.yarn_log_multiplier"
            raise ConfigError(
                f"{keys.source}: key '{key}' is {multiplier}; heddle needs one; import the original folder"
            )
    return scaling


def _llama3(keys: Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, by its factors. Raises ConfigError if no published model has these factors."""
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
    raise ConfigError(f"{keys.source}: its RoPE factors are not published ones of Llama 3; import the original folder")


class Key(NamedTuple):
    """A key of the graph with the value of a field. default: a type: llama.cpp requires the key, of this type."""

    name: str
    default: Any = int

    def __call__(self, keys: Keys, shapes: Shapes) -> Any:
        """The field's value."""
        if isinstance(self.default, type):
            return keys.require(f"{keys.graph}.{self.name}", self.default)
        return keys.of_graph(self.name, self.default)


class Present(NamedTuple):
    """Whether the file has a tensor of this name in its first layer."""

    name: str

    def __call__(self, keys: Keys, shapes: Shapes) -> bool:
        """The field's value."""
        return f"blk.0.{self.name}" in shapes


def _rope(keys: Keys, shapes: Shapes) -> dict[str, Any]:
    theta = keys.of_graph("rope.freq_base", 10000.0)
    return {"rope_theta": theta} | _scaling(keys, theta, keys.head_dim)


def _rotary_factor(keys: Keys, shapes: Shapes) -> float:
    """The share of the dims of a head that RoPE rotates."""
    return keys.of_graph("rope.dimension_count", keys.head_dim) / max(keys.head_dim, 1)


# A field's value: a key's value, a function of the file, or a constant.
ATTENTION_BIAS = {"attention_bias": Present("attn_q.bias")}
BIASES = ATTENTION_BIAS | {"mlp_bias": Present("ffn_down.bias")}
LAYER_NORM_EPS = Key("attention.layer_norm_epsilon", float)
LAYER_NORM = {"layer_norm_eps": LAYER_NORM_EPS, "rms_norm_eps": ABSENT}
NO_ROPE = dict.fromkeys(("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta"), ABSENT)
RMS_NORM_EPS = Key("attention.layer_norm_rms_epsilon", float)
WINDOW = Key("attention.sliding_window")
# Of every graph whose entry has no others.
FIELDS: FieldTable = {
    "vocab_size": lambda _, shapes: shapes["token_embd.weight"][0],
    "hidden_size": Key("embedding_length"),
    "num_hidden_layers": lambda keys, _: keys.number("block_count") - keys.of_graph("nextn_predict_layers", 0),
    "intermediate_size": Key("feed_forward_length"),
    "num_attention_heads": Key("attention.head_count"),
    "num_key_value_heads": lambda keys, _: keys.kv_heads,
    "head_dim": lambda keys, _: keys.head_dim,
    "rms_norm_eps": RMS_NORM_EPS,
    "max_position_embeddings": Key("context_length"),
    "tie_word_embeddings": lambda _, shapes: "output.weight" not in shapes,
    "rope_theta": Key("rope.freq_base", 10000.0),
    "rope_parameters": _rope,
}
COUNT, USED, EXPERT_WIDTH = Key("expert_count"), Key("expert_used_count"), Key("expert_feed_forward_length")
DENSE_LAYERS, EXPERT_SCALE = Key("leading_dense_block_count", 0), Key("expert_weights_scale", 1.0)
EXPERTS = {"num_experts": COUNT, "num_experts_per_tok": USED}
LOCAL_EXPERTS = {"num_local_experts": COUNT, "num_experts_per_tok": USED}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": COUNT, "num_experts_per_tok": USED, "moe_intermediate_size": EXPERT_WIDTH,
    "n_shared_experts": Key("expert_shared_count"), "first_k_dense_replace": DENSE_LAYERS,
    "routed_scaling_factor": EXPERT_SCALE, "norm_topk_prob": Key("expert_weights_norm", False),
    "n_group": Key("expert_group_count", 1),
    "topk_group": lambda keys, _: keys.of_graph("expert_group_used_count", keys.of_graph("expert_group_count", 1)),
}  # fmt: skip
SHARED_EXPERT = {
    **EXPERTS, "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
}  # fmt: skip
GRANITE = {
    "model_type": "granite",
    **BIASES,
    "attention_multiplier": lambda keys, _: keys.of_graph("attention.scale", keys.head_dim**-0.5),
    "embedding_multiplier": Key("embedding_scale", 1.0),
    "residual_multiplier": Key("residual_scale", 1.0),
    "logits_scaling": Key("logit_scale", float),
}
GPT2 = {
    "model_type": "gpt2", "n_inner": Key("feed_forward_length"), "layer_norm_epsilon": LAYER_NORM_EPS,
    "activation_function": "gelu_new", "intermediate_size": ABSENT, **NO_ROPE,
}  # fmt: skip
COHERE = {
    "model_type": "cohere", "logit_scale": lambda keys, _: keys.of_graph("logit_scale", 0.0) or 1.0, **LAYER_NORM,
}  # fmt: skip
GLM = {"model_type": "glm", "partial_rotary_factor": _rotary_factor, **ATTENTION_BIAS}
# Of a recurrent mixer: heads, head_dim, state, groups and kernel.
STATE_SIZES: tuple[Entry, ...] = (
    Key("ssm.time_step_rank"),
    lambda keys, _: keys.number("ssm.inner_size") // max(keys.number("ssm.time_step_rank"), 1),
    Key("ssm.state_size"), Key("ssm.group_count"), Key("ssm.conv_kernel"),
)  # fmt: skip


def _query_scale(keys: Keys, depth: int) -> dict[str, Any]:
    """Gemma's scale of scores: by head_dim, but in the largest by width / heads."""
    is_largest = keys.number("block_count") == depth
    heads = max(keys.number("attention.head_count"), 1)
    dim = keys.number("embedding_length") // heads if is_largest else keys.head_dim
    return {"query_pre_attn_scalar": dim, "sliding_window": keys.of_graph("attention.sliding_window", 4096)}


def _ropes(keys: Keys, sliding_theta: float) -> dict[str, Any]:
    """The RoPEs of layers without and with a window."""
    theta = keys.of_graph("rope.freq_base", 10000.0)
    full = {"rope_theta": theta} | _scaling(keys, theta, keys.number("attention.key_length"))
    tables = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": sliding_theta}}
    return {"rope_parameters": tables, "rope_theta": None}


def _gemma3(keys: Keys, shapes: Shapes) -> FieldTable:
    fields = {"model_type": "gemma3_text", **GEMMA_ACTIVATION, **_query_scale(keys, 62)}
    fields |= {"final_logit_softcapping": keys.fields.get(f"{keys.graph}.final_logit_softcapping")}
    fields |= _ropes(keys, keys.of_graph("rope.freq_base_swa", 10000.0))
    if keys.of_graph("attention.sliding_window", 0):
        return fields
    return fields | {"sliding_window": None, "layer_types": [FULL] * min(keys.number("block_count"), MAX_LAYERS)}


def _olmo2(keys: Keys, shapes: Shapes) -> FieldTable:
    if not keys.of_graph("attention.sliding_window", 0):
        return {"model_type": "olmo2"}
    return {"model_type": "olmo3", "sliding_window": WINDOW, **_ropes(keys, keys.of_graph("rope.freq_base", 10000.0))}


def _granite_moe(keys: Keys, shapes: Shapes) -> FieldTable:
    shared = keys.of_graph("expert_shared_feed_forward_length", 0)
    kind = {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}
    return GRANITE | {"model_type": "granitemoe", "mlp_bias": None} | LOCAL_EXPERTS | kind


def _deepseek(keys: Keys, shapes: Shapes) -> FieldTable:
    """DeepSeek-V2 or V3, by the function of its router's logits."""
    rope_dim = keys.number("rope.dimension_count")
    if keys.of_graph("attention.layer_norm_rms_epsilon", INNER_EPS) > 1e-5:  # GLM-4.7-Flash's, whose class has two
        keys.expect_same("attention.layer_norm_rms_epsilon", INNER_EPS)
    config = DEEPSEEK_EXPERTS | {
        "model_type": "deepseek_v3",
        "q_lora_rank": keys.of_graph("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": Key("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.number("attention.key_length_mla") - rope_dim,
        "v_head_dim": Key("attention.value_length_mla"),
        **dict.fromkeys(("head_dim", "num_key_value_heads"), ABSENT),
    }
    if keys.of_graph("expert_gating_func", 0) == SIGMOID:
        return config
    if keys.of_graph("expert_gating_func", 0):
        keys.expect_same("expert_gating_func", SOFTMAX)
    keys.expect_same("expert_weights_norm", False)
    return config | {"model_type": "deepseek_v2", "n_group": None, "topk_group": None}


def _ministral3(keys: Keys, shapes: Shapes) -> FieldTable:
    rope = {
        "rope_theta": keys.of_graph("rope.freq_base", 10000.0),
        **_scaling(keys, 0.0, keys.head_dim),
        "original_max_position_embeddings": keys.number("rope.scaling.original_context_length"),
        "llama_4_scaling_beta": keys.of_graph("attention.temperature_scale", 0.0),
    }
    return {"model_type": "ministral3", "rope_parameters": rope, "sliding_window": None}


def _delta(keys: Keys, shapes: Shapes) -> FieldTable:
    """Qwen3.5, with two kinds of layers."""
    depth, interval = keys.number("block_count"), keys.of_graph("full_attention_interval", 4)
    usual = [(index + 1) % max(interval, 1) != 0 for index in range(min(depth, MAX_LAYERS))]
    recurrent = keys.of_graph("attention.recurrent_layers", usual)[: depth - keys.of_graph("nextn_predict_layers", 0)]
    names = ("num_value_heads", "value_head_dim", "key_head_dim", "num_key_heads", "conv_kernel_dim")
    return {
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": _rotary_factor,
        "attention_bias": False,
        "layer_types": ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent],
        **{f"linear_{name}": size for name, size in zip(names, STATE_SIZES, strict=True)},
    }


def _qwen3_next(keys: Keys, shapes: Shapes) -> FieldTable:
    return _delta(keys, shapes) | SHARED_EXPERT | {"model_type": "qwen3_next", "norm_topk_prob": True}


def _granite_hybrid(keys: Keys, shapes: Shapes) -> FieldTable:
    kv_heads = keys.require(f"{keys.graph}.attention.head_count_kv", list)
    shared = "expert_shared_feed_forward_length" if keys.of_graph("expert_count", 0) else "feed_forward_length"
    names = ("n_heads", "d_head", "d_state", "n_groups", "d_conv")
    return GRANITE | {
        "model_type": "granitemoehybrid",
        **{f"mamba_{name}": size for name, size in zip(names, STATE_SIZES, strict=True)},
        "attention_bias": any(name.endswith("attn_q.bias") for name in shapes),
        "mlp_bias": None,
        "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
        "num_key_value_heads": max(kv_heads, default=0) or Key("attention.head_count"),
        "position_embedding_type": "rope" if keys.of_graph("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": Key("expert_count", 0),
        "num_experts_per_tok": Key("expert_used_count", 0),
        "shared_intermediate_size": Key(shared, 0),
    }


def _lfm2(keys: Keys, shapes: Shapes) -> FieldTable:
    kv_heads = keys.require(f"{keys.graph}.attention.head_count_kv", list)
    types = ["full_attention" if heads else "conv" for heads in kv_heads]
    own = {"conv_L_cache": Key("shortconv.l_cache"), "norm_eps": RMS_NORM_EPS, "block_auto_adjust_ff_dim": False}
    own |= {"num_key_value_heads": max(kv_heads, default=0) or Key("attention.head_count"), "rms_norm_eps": ABSENT}
    return {"model_type": "lfm2", "layer_types": types, **own}


def _afmoe(keys: Keys, shapes: Shapes) -> FieldTable:
    keys.require(f"{keys.graph}.expert_weights_norm", bool)
    return {
        "model_type": "afmoe",
        **EXPERTS,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_shared_experts": Key("expert_shared_count"),
        "num_dense_layers": DENSE_LAYERS,
        "route_scale": EXPERT_SCALE,
        "sliding_window": WINDOW,
        "mup_enabled": True,
    }


def _falcon(keys: Keys, shapes: Shapes) -> FieldTable:
    heads = keys.number("attention.head_count")
    kv_heads, norms = keys.kv_heads, 1 + ("blk.0.attn_norm_2.weight" in shapes)
    is_new = norms == 2 or kv_heads not in (1, heads)
    return {
        "model_type": "falcon",
        "activation": "gelu_pytorch_tanh",
        "ffn_hidden_size": Key("feed_forward_length"),
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "new_decoder_architecture": is_new,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads if is_new else heads,
        "num_ln_in_parallel_attn": norms if is_new else None,
        **dict.fromkeys(("head_dim", "intermediate_size", "num_key_value_heads", "rms_norm_eps"), ABSENT),
    }


# By graph, the fields beside those that all have, or a function that makes them.
ARCHITECTURE_FIELDS: dict[str, FieldTable | Callable[[Keys, Shapes], FieldTable]] = {
    "llama": lambda keys, _: (
        {"model_type": "mixtral", **LOCAL_EXPERTS}
        if keys.of_graph("expert_count", 0)
        else {"model_type": "llama", **BIASES}
    ),
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "attention_bias": False},
    "qwen3moe": {
        "model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": EXPERT_WIDTH,
    },
    "qwen2moe": {"model_type": "qwen2_moe", **SHARED_EXPERT, "norm_topk_prob": False},
    "olmoe": {"model_type": "olmoe", **EXPERTS, "norm_topk_prob": False, "attention_bias": False},
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": False},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense", "attention_bias": False},
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", **GEMMA_ACTIVATION},
    "gemma2": lambda keys, _: {
        "model_type": "gemma2", **GEMMA_ACTIVATION, **_query_scale(keys, 46),
        "attn_logit_softcapping": Key("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": Key("final_logit_softcapping", 30.0),
    },
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "smollm3": {"model_type": "smollm3"},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": _rotary_factor, "sliding_window": None},
    "phi2": {
        "model_type": "phi", "partial_rotary_factor": _rotary_factor, "hidden_act": "gelu_new", **LAYER_NORM,
    },
    "gpt2": GPT2,
    "gptneox": {
        "model_type": "gpt_neox", "rotary_pct": _rotary_factor, "rotary_emb_base": Key("rope.freq_base", 10000.0),
        "hidden_act": "gelu_pytorch_tanh", "use_parallel_residual": Key("use_parallel_residual", bool),
        **dict.fromkeys(("head_dim", "num_key_value_heads"), ABSENT), **LAYER_NORM,
    },
    "command-r": COHERE,
    "cohere2": COHERE | {"model_type": "cohere2", "logit_scale": Key("logit_scale", float), "sliding_window": WINDOW},
    "bert": {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", **NO_ROPE,
        "layer_norm_eps": LAYER_NORM_EPS,
        "max_position_embeddings": lambda _, shapes: shapes.get("position_embd.weight", (512,))[0],
        "type_vocab_size": lambda _, shapes: shapes.get("token_types.weight", (2,))[0],
    },
    "arcee": {"model_type": "arcee"},
    "granite": GRANITE,
    "granitemoe": _granite_moe,
    "glm4": GLM | {"model_type": "glm4"},  # with norms after the branches
    "chatglm": GLM,
    "glm4moe": GLM | DEEPSEEK_EXPERTS | {"model_type": "glm4_moe", "use_qk_norm": Present("attn_q_norm.weight")},
    "exaone4": {"model_type": "exaone4", "sliding_window": Key("attention.sliding_window", 4096)},
    "seed_oss": {"model_type": "seed_oss", **ATTENTION_BIAS, **NO_DROPOUT},
    "stablelm": {
        "model_type": "stablelm", "partial_rotary_factor": _rotary_factor, **LAYER_NORM,
        "use_qkv_bias": Present("attn_q.bias"), "qk_layernorm": Present("attn_q_norm.weight"),
        "use_parallel_residual": lambda _, shapes: "blk.0.ffn_norm.weight" not in shapes,
    },
    "starcoder2": {"model_type": "starcoder2", "norm_epsilon": LAYER_NORM_EPS, "rms_norm_eps": ABSENT},
    "olmo": {
        "model_type": "olmo", "clip_qkv": lambda keys, _: keys.fields.get("olmo.attention.clamp_kqv"),
        "rms_norm_eps": ABSENT,
    },
    "dots1": {"model_type": "dots1", **DEEPSEEK_EXPERTS, "sliding_window": None},
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe", "use_bias": False, "moe_num_experts": COUNT, "moe_k": USED,
        "moe_intermediate_size": EXPERT_WIDTH, "moe_layer_start_index": DENSE_LAYERS,
        "moe_num_shared_experts": lambda keys, shapes: (
            keys.of_graph("expert_shared_feed_forward_length", 0) // max(EXPERT_WIDTH(keys, shapes), 1)
        ),
        "moe_layer_interval": Key("interleave_moe_layer_step"),
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe", "num_experts": COUNT, "moe_topk": USED, "attention_bias": False,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", **LOCAL_EXPERTS,
        "rotary_dim": lambda keys, _: keys.of_graph("rope.dimension_count", keys.head_dim),
    },
    "afmoe": _afmoe,
    "gpt-oss": {
        "model_type": "gpt_oss", **LOCAL_EXPERTS, "intermediate_size": EXPERT_WIDTH, "sliding_window": WINDOW,
    },
    "deepseek2": _deepseek,
    "lfm2": _lfm2,
    "mistral3": _ministral3,
    "qwen3next": _qwen3_next,
    "qwen35": _delta,
    "granitehybrid": _granite_hybrid,
    "mamba2": NO_ROPE | {
        "model_type": "mamba2",
        **dict(zip(("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"), STATE_SIZES, strict=True)),
        "expand": lambda keys, _: keys.number("ssm.inner_size") // max(keys.number("embedding_length"), 1),
        "layer_norm_epsilon": RMS_NORM_EPS, "intermediate_size": ABSENT, "num_attention_heads": ABSENT,
    },
    "falcon": _falcon,
    "bloom": NO_ROPE | {
        "model_type": "bloom", "layer_norm_epsilon": LAYER_NORM_EPS, "intermediate_size": ABSENT,
    },
    "starcoder": GPT2 | {
        "model_type": "gpt_bigcode", "activation_function": "gelu_pytorch_tanh",
        "multi_query": lambda keys, _: keys.kv_heads == 1,
    },
    "jais2": {"model_type": "jais2", **LAYER_NORM},
}  # fmt: skip
