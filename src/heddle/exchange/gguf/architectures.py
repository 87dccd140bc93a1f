"""The families that llama.cpp runs: the name of its graph for each, and what that graph assumes.

A design is written to a GGUF through its Hugging Face family. A graph of llama.cpp supports less than the family's
config can express. What a graph assumes is listed here; a design that differs is refused, naming the field.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.exchange.export import HFTensors
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig

ConfigFields = dict[str, Any]  # fields of a config.json, or keys of a GGUF


@dataclass(frozen=True)
class Architecture:
    """A graph of llama.cpp.

    name: its name in llama.cpp. fixed_fields: config field -> (path in a design, the value that the graph assumes).
    extra_keys: GGUF keys that only this graph has. interleaved_rope: it rotates dims (2i, 2i + 1), so the rows of q
    and k are reordered. norm_plus_one: its norms multiply by the weight, but the family's by 1 + weight, so 1 is added.
    full_attention_period: every so many layers there is one without a window, and all others have one; None: no layer
    has a window. requires_softcaps: it always caps scores and logits. width_scaled_depth: models of this depth scale
    scores by 1 / sqrt(width / heads) instead of 1 / sqrt(head_dim), as the largest Gemmas. square_heads: width must be
    heads · head_dim. grouped_heads: several heads may share keys and values. moe_in_every_layer: no dense layers.
    rope_scalings: the kinds of RoPE scaling that it supports. qk_norm: q and k may have norms, if the family
    has them. partial_rope: RoPE may rotate some dims of a head only.
    nope_period: every so many layers there is one without positions. transposed: the family stores the matrices of a
    layer as [inputs, outputs]. interleaved_heads: the family's rows of q, k and v in one matrix lie head by head.
    encoder: it has no language head, and pools the outputs of a text.
    """

    name: str
    fixed_fields: dict[str, tuple[str, Any]] = field(default_factory=dict)
    extra_keys: Callable[[ConfigFields], ConfigFields] = lambda config: {}
    interleaved_rope: bool = False
    norm_plus_one: bool = False
    full_attention_period: int | None = None
    requires_softcaps: bool = False
    width_scaled_depth: int | None = None
    square_heads: bool = False
    grouped_heads: bool = True
    moe_in_every_layer: bool = False
    rope_scalings: tuple[type, ...] = (LinearConfig, YarnConfig)
    qk_norm: bool = True
    partial_rope: bool = False
    nope_period: int | None = None
    transposed: bool = False
    interleaved_heads: bool = False
    encoder: bool = False


def _expert_keys(config: ConfigFields) -> ConfigFields:
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
    }


def _local_keys(config: ConfigFields) -> ConfigFields:
    caps = {name: float(config[name]) for name in SOFTCAPS if config.get(name)}
    return {"attention.sliding_window": config["sliding_window"]} | caps


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _shared_expert_keys(config: ConfigFields) -> ConfigFields:
    return _expert_keys(config) | {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _cohere_keys(config: ConfigFields) -> ConfigFields:
    window = {"attention.sliding_window": config["sliding_window"]} if "sliding_window" in config else {}
    return {"logit_scale": float(config["logit_scale"]), **window}


SILU = {"hidden_act": ("layers.*.feedforward.activation", "silu")}
GELU = {"hidden_activation": ("layers.*.feedforward.activation", "gelu_pytorch_tanh")}
ACTIVATION = "layers.*.feedforward.activation"
NO_MLP_BIAS = {"mlp_bias": ("layers.*.feedforward.bias", False)}
NO_ATTENTION_BIAS = {"attention_bias": ("layers.*.mixer.bias", False)}
TIED = {"tie_word_embeddings": ("head.tied", True)}
UNTIED = {"tie_word_embeddings": ("head.tied", False)}
RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", True)}
NOT_RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", False)}
LLAMA_SCALINGS = (LinearConfig, YarnConfig, Llama3Config)

# llama.cpp's number of the mean over tokens, as sentence encoders are trained. A design does not record it.
MEAN_POOLING = 1
# By the model_type of the family. Mistral is Llama, as long as it has no window.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mistral": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mixtral": Architecture(
        "llama", SILU, extra_keys=_expert_keys, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS
    ),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU | NO_ATTENTION_BIAS),
    "qwen3_moe": Architecture(
        "qwen3moe", SILU | NO_ATTENTION_BIAS | RENORMALIZED, extra_keys=_expert_keys, moe_in_every_layer=True
    ),
    "qwen2_moe": Architecture(
        "qwen2moe", SILU | NOT_RENORMALIZED, extra_keys=_shared_expert_keys, moe_in_every_layer=True
    ),
    "olmoe": Architecture(
        "olmoe",
        SILU | NO_ATTENTION_BIAS | NOT_RENORMALIZED | UNTIED,
        extra_keys=_expert_keys,
        moe_in_every_layer=True,
        square_heads=True,
        grouped_heads=False,
    ),
    "ernie4_5": Architecture("ernie4_5", SILU | {"use_bias": ("layers.*.mixer.bias", False)}),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", SILU | NO_ATTENTION_BIAS),
    "gemma": Architecture("gemma", GELU | NO_ATTENTION_BIAS | TIED, norm_plus_one=True, rope_scalings=()),
    "gemma2": Architecture(
        "gemma2",
        GELU | NO_ATTENTION_BIAS | TIED,
        extra_keys=_local_keys,
        norm_plus_one=True,
        full_attention_period=2,
        requires_softcaps=True,
        width_scaled_depth=46,
        rope_scalings=(),
    ),
    "gemma3_text": Architecture(
        "gemma3",
        GELU | NO_ATTENTION_BIAS,
        extra_keys=_local_keys,
        norm_plus_one=True,
        full_attention_period=6,
        width_scaled_depth=62,
        rope_scalings=(LinearConfig,),
    ),
    "olmo2": Architecture("olmo2", SILU | NO_ATTENTION_BIAS | UNTIED, square_heads=True),
    "olmo3": Architecture(
        "olmo2", SILU | NO_ATTENTION_BIAS | UNTIED, extra_keys=_local_keys, full_attention_period=4, square_heads=True
    ),
    "smollm3": Architecture("smollm3", SILU | NO_ATTENTION_BIAS | NO_MLP_BIAS, interleaved_rope=True, nope_period=4),
    "phi3": Architecture("phi3", SILU, partial_rope=True, rope_scalings=()),
    "phi": Architecture(
        "phi2",
        {"hidden_act": (ACTIVATION, "gelu_new")} | UNTIED,
        qk_norm=False,
        partial_rope=True,
        square_heads=True,
        rope_scalings=(),
    ),
    "gpt2": Architecture("gpt2", {"activation_function": (ACTIVATION, "gelu_new")}, transposed=True),
    "gpt_neox": Architecture(
        "gptneox",
        {"hidden_act": (ACTIVATION, "gelu_pytorch_tanh"), "attention_bias": ("layers.*.mixer.bias", True)} | UNTIED,
        extra_keys=lambda config: {"use_parallel_residual": config["use_parallel_residual"]},
        partial_rope=True,
        interleaved_heads=True,
        rope_scalings=(LinearConfig,),
    ),
    "cohere": Architecture(
        "command-r",
        SILU | NO_ATTENTION_BIAS | TIED,
        qk_norm=False,
        extra_keys=_cohere_keys,
        square_heads=True,
        rope_scalings=(LinearConfig,),
    ),
    "cohere2": Architecture(
        "cohere2",
        SILU | NO_ATTENTION_BIAS | TIED,
        extra_keys=_cohere_keys,
        full_attention_period=4,
        square_heads=True,
        rope_scalings=(),
    ),
    "bert": Architecture(
        "bert",
        {"hidden_act": (ACTIVATION, "gelu")},
        extra_keys=lambda config: {"attention.causal": False, "pooling_type": MEAN_POOLING},
        square_heads=True,
        grouped_heads=False,
        qk_norm=False,
        encoder=True,
    ),
}


# The tensors of a GGUF, made of a family's tensors: renamed, experts stacked, rows ordered for llama.cpp's RoPE.


EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.*)")
FLOAT32_WEIGHTS = ("ffn_gate_inp", "position_embd", "token_types")  # routers, learned positions and types of tokens
SUFFIXES = (".weight", ".bias")
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF. It is made of the Hugging Face tensors `hf_names` (stacked if several) by `transform`.

    restore: the inverse, of one of several. may_quantize: whether llama.cpp reads it quantized.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    hf_names: tuple[str, ...]
    transform: Transform
    restore: Transform
    may_quantize: bool

    def build(self, tensors: HFTensors) -> Tensor:
        """Make the tensor, in its own memory."""
        parts = [tensors[name] for name in self.hf_names]
        tensor = parts[0] if len(parts) == 1 else torch.stack(parts)
        return self.transform(tensor.to(torch.float32)).to(self.dtype).contiguous()


def gguf_tensors(
    tensors: HFTensors, config: dict[str, Any], graph: Architecture, dtype: torch.dtype
) -> Iterator[GGUFTensor]:
    """All tensors of a GGUF, in the order of the family's tensors.

    dtype: of matrices. Vectors and what FLOAT32_WEIGHTS names are always float32, as llama.cpp requires.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    names = get_tensor_name_map({name: arch for arch, name in MODEL_ARCH_NAMES.items()}[graph.name], _depth(config))
    for hf_names in _group_experts(list(tensors)):
        stacked_name = EXPERT.sub(r"\g<before>.\g<after>", hf_names[0])
        name = names.get_name(stacked_name, SUFFIXES)
        assert name is not None, f"{stacked_name}: {graph.name} has no name for it"
        hf_shape = tensors.weight_map.hf_shape(tensors.weight_map.rules[hf_names[0]])
        is_expert = stacked_name != hf_names[0]
        shape = torch.Size((len(hf_names), *hf_shape)) if is_expert else hf_shape
        if graph.transposed and _is_layer_matrix(name):
            shape = torch.Size(reversed(shape))
        is_float32 = len(shape) < 2 or any(role in name for role in FLOAT32_WEIGHTS)
        transform, restore = _transforms_of(name, config, graph)
        if is_expert and len(hf_names) == 1:
            transform = partial(torch.unsqueeze, dim=0)
        own_dtype = torch.float32 if is_float32 else dtype
        yield GGUFTensor(name, shape, own_dtype, hf_names, transform, restore, may_quantize=not is_float32)


def _depth(config: dict[str, Any]) -> int:
    depth: int = config.get("num_hidden_layers") or config["n_layer"]
    return depth


def _is_layer_matrix(name: str) -> bool:
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def _group_experts(names: list[str]) -> list[tuple[str, ...]]:
    """Tensor names; those that differ only in the number of the expert are in one group."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(EXPERT.sub(r"\g<before>.*.\g<after>", name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _transforms_of(name: str, config: dict[str, Any], graph: Architecture) -> tuple[Transform, Transform]:
    """The transform that makes a tensor from the family's, and its inverse."""
    for role, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
        if graph.interleaved_rope and role in name:
            return partial(interleave_rope_rows, heads=config[heads]), partial(_separate_rope_rows, heads=config[heads])
    if graph.interleaved_heads and ".attn_qkv." in name:
        heads = config["num_attention_heads"]
        return partial(_swap_groups, sizes=(heads, 3)), partial(_swap_groups, sizes=(3, heads))
    if graph.transposed and _is_layer_matrix(name):
        return Tensor.t, Tensor.t
    if graph.norm_plus_one and name.endswith("norm.weight"):
        return partial(torch.add, other=1.0), partial(torch.sub, other=1.0)
    return _identity, _identity


def interleave_rope_rows(x: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from RoPE pairs (i, i + d/2) to pairs (2i, 2i + 1)."""
    split: Tensor = x.unflatten(0, (heads, 2, -1))
    return split.transpose(1, 2).flatten(0, 2)


def _separate_rope_rows(x: Tensor, heads: int) -> Tensor:
    split: Tensor = x.unflatten(0, (heads, -1, 2))
    return split.transpose(1, 2).flatten(0, 2)


def _swap_groups(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Reorder rows, seen as [*sizes, head_dim], to [sizes[1], sizes[0], head_dim]."""
    split: Tensor = x.unflatten(0, (*sizes, -1))
    return split.transpose(0, 1).flatten(0, 2)


def _identity(x: Tensor) -> Tensor:
    return x
