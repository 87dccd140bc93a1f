"""The families that llama.cpp runs: the name of its graph for each, and the graph's assumptions.

A design is written to a GGUF through its Hugging Face family. A graph of llama.cpp supports less than the family's
config can express. Its assumptions are listed here; a design that differs is refused, naming the field.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.family import CONCATENATED, Family, TensorTransform, WeightMap, interleaved_by_group, reshaped
from heddle.exchange.gguf import keys_from_config as extra
from heddle.model.config import ModelConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.mixers.mamba2 import Mamba2Config
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig

if TYPE_CHECKING:
    from heddle.exchange.export import HFTensors

# llama.cpp's names of heddle's parameters, and how a tensor of a GGUF is made of them.

# llama.cpp's names of heddle's modules and parameters: of the model, and of a layer. Several with one name are one
# tensor, one after the other in this order. `experts`: a feed-forward beside a router. `latent`: a mixer with latents
# of keys and values. `delta`, `ssm`, `conv`: a gated delta rule, a Mamba-2 mixer, a short convolution.
MODEL_NAMES = {
    "embed": "token_embd", "embed.position": "position_embd", "embed.token_types": "token_types",
    "embed.norm": "token_embd_norm", "final_norm.norm": "output_norm", "head": "output",
}  # fmt: skip
LAYER_NAMES = {
    "residual.norms.mixer": "attn_norm", "residual.norms.shared": "attn_norm", "residual.norms.feedforward": "ffn_norm",
    "residual.after.mixer": "post_attention_norm", "residual.after.feedforward": "post_ffw_norm",
    "mixer.q": "attn_q", "mixer.k": "attn_k", "mixer.v": "attn_v", "mixer.out": "attn_output",
    "mixer.q_norm": "attn_q_norm", "mixer.k_norm": "attn_k_norm", "mixer.gate": "attn_gate",
    "mixer.sink": "attn_sinks.weight",
    "latent.q": "attn_q", "latent.q_down": "attn_q_a", "latent.q_norm": "attn_q_a_norm", "latent.q_up": "attn_q_b",
    "latent.kv_down": "attn_kv_a_mqa", "latent.k_rope": "attn_kv_a_mqa", "latent.kv_norm": "attn_kv_a_norm",
    "latent.k_up": "attn_k_b", "latent.v_up": "attn_v_b", "latent.out": "attn_output",
    "conv.k": "shortconv.in_proj", "conv.q": "shortconv.in_proj", "conv.v": "shortconv.in_proj",
    "conv.convolution": "shortconv.conv", "conv.out": "shortconv.out_proj",
    **dict.fromkeys(("delta.q", "delta.k", "delta.v"), "attn_qkv"), "delta.gate": "attn_gate",
    "delta.beta": "ssm_ba", "delta.a": "ssm_ba",
    **dict.fromkeys(("ssm.gate", "ssm.v", "ssm.k", "ssm.q", "ssm.a"), "ssm_in"), "ssm.skip": "ssm_d",
    **{
        f"{mixer}.{role}": name
        for role, name in (
            ("convolution", "ssm_conv1d"), ("decay.rate", "ssm_a"), ("decay.bias", "ssm_dt.bias"),
            ("norm", "ssm_norm"), ("out", "ssm_out"),
        )
        for mixer in ("delta", "ssm")
    },
    "feedforward.gate": "ffn_gate", "feedforward.up": "ffn_up", "feedforward.down": "ffn_down",
    "feedforward.router": "ffn_gate_inp", "feedforward.router.expert_bias": "exp_probs_b.bias",
    "experts.gate": "ffn_gate_exps", "experts.up": "ffn_up_exps", "experts.down": "ffn_down_exps",
    "feedforward.shared.gate": "ffn_gate_shexp", "feedforward.shared.up": "ffn_up_shexp",
    "feedforward.shared.down": "ffn_down_shexp", "feedforward.shared_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
FUSED_QKV = dict.fromkeys(("mixer.q", "mixer.k", "mixer.v"), "attn_qkv")
FUSED_GATE = dict.fromkeys(("feedforward.gate", "feedforward.up"), "ffn_up")
# Where the norm before the feed-forward is named as the family names it, and where norms come after the branches.
POST_ATTENTION = {"residual.norms.feedforward": "post_attention_norm"}
# Where queries and their gate are one tensor.
FUSED_GATED_QUERY = dict.fromkeys(("mixer.q", "mixer.gate"), "attn_q")
REORDERED = {"residual.norms.mixer": "post_attention_norm", "residual.norms.feedforward": "post_ffw_norm"}


def map_weights(design: ModelConfig, weights: WeightMap, names: Mapping[str, str], tiled_values: bool) -> None:
    """Add the rules between the tensors of a GGUF and the model's parameters.

    names: entries of MODEL_NAMES and LAYER_NAMES that differ. tiled_values: heads of values lie in the order first head
    of each key head, then the second.
    """
    names = dict(names) | {role: name for role, name in (MODEL_NAMES | LAYER_NAMES).items() if role not in names}
    order, groups = list(names), dict[str, list[tuple[int, str]]]()
    for parameter in weights.shapes:
        role, prefix = _role(parameter, weights.shapes)
        module, _, kind = role.rpartition(".")
        name = names[role] if role in names else f"{names[module]}.{kind}"
        place = order.index(module) if module in names else 0
        groups.setdefault(prefix + name, []).append((place, parameter))
    transforms = _transforms(design.resolved(), names["mixer.gate"] == names["mixer.q"], tiled_values)
    for name, parameters in groups.items():
        ordered = [parameter for _, parameter in sorted(parameters)]
        own = name.split(".", 2)[-1] if name.startswith("blk.") else name
        weights.add_tensor(name, *ordered, transform=transforms.get(own, CONCATENATED))


def _transforms(design: ModelConfig, gated_queries: bool, tiled_values: bool) -> dict[str, TensorTransform]:
    """By the name of a layer's tensor, how it is made of parameters, if not by concatenation."""
    heads = design_parts.first_latent_attention(design).heads
    transforms = {"attn_k_b.weight": _by_head(heads, transposed=True), "attn_v_b.weight": _by_head(heads)}
    if gated_queries:
        transforms["attn_q.weight"] = interleaved_by_group(design_parts.first_attention(design).heads)
    delta = design_parts.first_gated_delta(design)
    groups, width = delta.key_heads or delta.heads, delta.value_dim or 1
    transforms["ssm_ba.weight"] = interleaved_by_group(groups)
    if any(isinstance(mixer, Mamba2Config) for mixer in design_parts.mixers(design)):
        transforms |= {"ssm_a": COLUMN, "ssm_d": COLUMN}
    if tiled_values:
        tiled, before = partial(_tiled, groups, delta.heads // groups), 2 * groups * (delta.head_dim or 1)
        by_head = ("ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias")
        transforms |= {name: tiled(1) for name in by_head} | {
            "attn_qkv.weight": tiled(width, before),
            "ssm_conv1d.weight": tiled(width, before),
            "attn_gate.weight": tiled(width),
            "ssm_out.weight": tiled(width, dim=1),
        }
    return transforms


def _role(parameter: str, shapes: Mapping[str, torch.Size]) -> tuple[str, str]:
    """A parameter's key in LAYER_NAMES or MODEL_NAMES, with its kind, and the prefix of its layer's names."""
    if not parameter.startswith("layers."):
        return parameter, ""
    _, index, part, rest = parameter.split(".", 3)
    layer = f"layers.{index}"
    if part == "feedforward" and f"{layer}.feedforward.router.weight" in shapes and rest.count(".") == 1:
        part = "feedforward" if rest.startswith(("router.", "shared_gate.")) else "experts"
    if part == "mixer":
        part = next((kind for kind, own in MIXERS.items() if f"{layer}.mixer.{own}" in shapes), part)
    return f"{part}.{rest}", f"blk.{index}."


# By a parameter that only they have.
MIXERS = {"latent": "kv_down.weight", "delta": "beta.weight", "ssm": "skip", "conv": "convolution.weight"}
COLUMN = reshaped(-1, 1)


def _by_head(heads: int, transposed: bool = False) -> TensorTransform:
    """A projection from a latent, as one matrix for each head; transposed: [latent, head_dim] each."""

    def turned(x: Tensor) -> Tensor:
        return x.mT if transposed else x

    return TensorTransform(
        lambda parameters: turned(parameters[0].unflatten(0, (heads, -1))),
        lambda tensor, shapes: [turned(tensor).flatten(0, 1)],
    )


def _tiled(groups: int, per_group: int, size: int, start: int = 0, dim: int = 0) -> TensorTransform:
    """Concatenated, and the heads of `size` from `start` on in the order first of each group, then the second."""
    heads = torch.arange(groups * per_group * size).unflatten(0, (groups, per_group, size))
    order = torch.cat([torch.arange(start), start + heads.transpose(0, 1).flatten()])

    def select(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(dim, index.to(x.device))

    return TensorTransform(
        lambda parameters: select(CONCATENATED.join(parameters), order),
        lambda tensor, shapes: CONCATENATED.split(select(tensor, order.argsort()), shapes),
    )


Assumption = tuple[str, Any, Any]


@dataclass(frozen=True)
class Architecture:
    """A graph of llama.cpp.

    name: its name in llama.cpp. fixed_fields: config field -> (path in a design, the value that the graph assumes).
    extra_keys: GGUF keys that only this graph has. names: entries of MODEL_NAMES and LAYER_NAMES that differ.
    interleaved_rope: it rotates dims (2i, 2i + 1), so the rows of q and k are reordered. norm_plus_one: its norms
    multiply by the weight, but the family's by 1 + weight, so 1 is added. full_attention_period: one in this many
    layers has no window, and all others have one; None: no layer has a window. windowed_depth: only models of this
    depth have windows, and in others every layer has positions. window_base: of RoPE in layers with a window: its own,
    the same, or the same whatever the file says ("ignored"). scaled_windows: layers with a window have the RoPE scaling
    of the others; else they have none. width_scaled_depth: models of this depth scale scores by 1 / sqrt(width / heads)
    instead of 1 / sqrt(head_dim), as the largest Gemmas. any_scale: scores may have any scale. assumed: (path, value,
    value that it assumes) of a resolved design. square_heads: width must be heads · head_dim. grouped_heads: several
    heads may share keys and values. moe_in_every_layer: no dense layers. moe_to_the_end: after the first mixture of
    experts there is no dense layer. rope_scalings: the kinds of RoPE scaling that it supports. yarn_log: if YaRN has an
    mscale, the GGUF has mscale_all_dim times this number; mscale is 1, or in latent attention mscale_all_dim. qk_norm:
    q and k may have norms, if the family has them. partial_rope: RoPE may rotate some dims of a head only. nope_period:
    one in this many layers has no positions; 0: every layer has positions. latent: its attention is latent attention.
    tiled_values: heads of values lie key head by key head, the first of each, then the second. encoder: it has no
    language head, and pools the outputs of a text. gating: llama.cpp's number of the function of router logits, where
    the family has one. factor_without_type: a factor of RoPE scales layers with a window also where the type of scaling
    is none. fixed_keys: keys that llama.cpp reads where the family has no field, and the only values that are read.
    """

    name: str
    fixed_fields: dict[str, tuple[str, Any]] = field(default_factory=dict)
    extra_keys: Callable[[extra.ConfigFields], extra.ConfigFields] = lambda config: {}
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False
    norm_plus_one: bool = False
    full_attention_period: int | None = None
    windowed_depth: int | None = None
    window_base: str = "same"
    scaled_windows: bool = False
    width_scaled_depth: int | None = None
    any_scale: bool = False
    assumed: Callable[[ModelConfig], Iterator[Assumption]] = lambda design: iter(())
    square_heads: bool = False
    grouped_heads: bool = True
    moe_in_every_layer: bool = False
    moe_to_the_end: bool = False
    rope_scalings: tuple[type, ...] = (LinearConfig, YarnConfig)
    yarn_log: float | None = None
    qk_norm: bool = True
    partial_rope: bool = False
    nope_period: int | None = None
    latent: bool = False
    tiled_values: bool = False
    encoder: bool = False
    gating: int | None = None
    factor_without_type: bool = False
    fixed_keys: Mapping[str, Any] = field(default_factory=dict)

    def of_depth(self, depth: int) -> "Architecture":
        """The graph of models of this depth."""
        has_windows = self.windowed_depth in (None, depth)
        return self if has_windows else replace(self, full_attention_period=None, nope_period=0)

    def stored(self, family: Family) -> Family:
        """The family with its parameters named and grouped as in a GGUF."""
        return replace(family, map_weights=partial(map_weights, names=self.names, tiled_values=self.tiled_values))


POSITION = "layers.*.mixer.position"
ACTIVATION = "layers.*.feedforward.activation"
LITE_DEPTHS = (26, 27)  # of DeepSeek-V2-Lite and its kin, whose queries have no latent
# The epsilon of the norms of latents, and of queries and keys in a gated delta rule. llama.cpp uses the model's.
INNER_EPS = 1e-6


def _latent(design: ModelConfig) -> Iterator[Assumption]:
    yield "norm.eps", design_parts.norm_eps(design), INNER_EPS
    rank = design_parts.first_latent_attention(design).query_rank
    is_lite = design.depth in LITE_DEPTHS
    if (rank is None) != is_lite:
        yield "layers.*.mixer.query_rank", rank, None if is_lite else design.width


def _scaled_embedding(design: ModelConfig) -> Iterator[Assumption]:
    yield "embedding.multiplier", design.embedding.multiplier, design.width**0.5


def _softcaps(design: ModelConfig) -> Iterator[Assumption]:
    mixer, head = design_parts.first_attention(design), design.head
    yield "layers.*.mixer.softcap", mixer.softcap, mixer.softcap or 50.0
    yield "head.softcap", head.softcap, head.softcap or 30.0


def _delta_rule(design: ModelConfig) -> Iterator[Assumption]:
    yield "norm.eps", design_parts.norm_eps(design), INNER_EPS
    for mixer in design_parts.mixers(design):
        if isinstance(mixer, GatedDeltaConfig):
            yield "layers.*.mixer.value_dim", mixer.value_dim, mixer.head_dim


def _mamba2(design: ModelConfig) -> Iterator[Assumption]:
    for mixer in design_parts.mixers(design):
        if isinstance(mixer, Mamba2Config):
            yield "layers.*.mixer.time_step_limit", mixer.time_step_limit, None
            yield "layers.*.mixer.conv_bias", mixer.conv_bias, True
            yield "layers.*.mixer.bias", mixer.bias, False


def _mamba2_twice_as_wide(design: ModelConfig) -> Iterator[Assumption]:
    yield from _mamba2(design)
    for mixer in design_parts.mixers(design):
        if isinstance(mixer, Mamba2Config):
            yield "layers.*.mixer.head_dim", mixer.head_dim, 2 * design.width // mixer.heads


SILU = {"hidden_act": (ACTIVATION, "silu")}
RELU2 = {"hidden_act": (ACTIVATION, "relu2")}
GELU = {"hidden_activation": (ACTIVATION, "gelu_pytorch_tanh")}
NO_MLP_BIAS = {"mlp_bias": ("layers.*.feedforward.bias", False)}
NO_ATTENTION_BIAS = {"attention_bias": ("layers.*.mixer.bias", False)}
TIED = {"tie_word_embeddings": ("head.tied", True)}
UNTIED = {"tie_word_embeddings": ("head.tied", False)}
RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", True)}
NOT_RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", False)}
LLAMA_SCALINGS = (LinearConfig, YarnConfig, Llama3Config)

# llama.cpp's number of the mean over tokens, as sentence encoders are trained. A design does not record it.
MEAN_POOLING = 1
GRANITE_MOE = Architecture(
    "granitemoe",
    SILU,
    extra_keys=extra.granite_keys,
    interleaved_rope=True,
    any_scale=True,
    rope_scalings=LLAMA_SCALINGS,
)
# Of RoPE by axes of images, which orders the rows of a head otherwise.
NO_SECTIONS = {"rope.dimension_sections": [0, 0, 0, 0]}
QWEN3_NEXT = Architecture(
    "qwen3next",
    SILU | NO_ATTENTION_BIAS | RENORMALIZED,
    extra_keys=lambda config: extra.shared_expert_keys(config) | extra.delta_keys(config),
    names=FUSED_GATED_QUERY | POST_ATTENTION,
    norm_plus_one=True,
    assumed=_delta_rule,
    moe_in_every_layer=True,
    partial_rope=True,
    rope_scalings=(),
    fixed_keys={"attention.layer_norm_rms_epsilon": INNER_EPS},
)
DEEPSEEK = Architecture(
    "deepseek2",
    SILU | NO_ATTENTION_BIAS | {"rope_interleave": (f"{POSITION}.layout", True)},
    extra_keys=extra.latent_keys,
    partial_rope=True,
    latent=True,
    yarn_log=0.1,
    assumed=_latent,
    moe_to_the_end=True,
    rope_scalings=(YarnConfig,),
)
# What llama.cpp's graphs of other families leave out.
LEFT_OUT = {
    "nemotron_h": "the least time step of Mamba-2",
    "falcon_h1": "the multipliers of branches, which its files have in the weights",
}
# By the model_type of the family. Mistral is Llama, as long as it has no window.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mistral": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mixtral": Architecture(
        "llama", SILU, extra_keys=extra.expert_keys, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS
    ),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU | NO_ATTENTION_BIAS),
    "qwen3_moe": Architecture(
        "qwen3moe", SILU | NO_ATTENTION_BIAS | RENORMALIZED, extra_keys=extra.expert_keys, moe_in_every_layer=True
    ),
    "qwen2_moe": Architecture(
        "qwen2moe", SILU | NOT_RENORMALIZED, extra_keys=extra.shared_expert_keys, moe_in_every_layer=True
    ),
    "olmoe": Architecture(
        "olmoe",
        SILU | NO_ATTENTION_BIAS | NOT_RENORMALIZED | UNTIED,
        extra_keys=extra.expert_keys,
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
        extra_keys=extra.local_keys,
        norm_plus_one=True,
        full_attention_period=2,
        assumed=_softcaps,
        width_scaled_depth=46,
        rope_scalings=(),
        factor_without_type=True,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        GELU | NO_ATTENTION_BIAS,
        extra_keys=extra.local_keys,
        norm_plus_one=True,
        full_attention_period=6,
        window_base="own",
        width_scaled_depth=62,
        rope_scalings=(LinearConfig,),
    ),
    "olmo2": Architecture("olmo2", SILU | NO_ATTENTION_BIAS | UNTIED, names=REORDERED, square_heads=True),
    "olmo3": Architecture(
        "olmo2",
        SILU | NO_ATTENTION_BIAS | UNTIED,
        extra_keys=extra.local_keys,
        names=REORDERED,
        full_attention_period=4,
        window_base="ignored",
        square_heads=True,
    ),
    "smollm3": Architecture("smollm3", SILU | NO_ATTENTION_BIAS | NO_MLP_BIAS, interleaved_rope=True, nope_period=4),
    "phi3": Architecture("phi3", SILU, names=FUSED_QKV | FUSED_GATE, partial_rope=True, rope_scalings=()),
    "phi": Architecture(
        "phi2",
        {"hidden_act": (ACTIVATION, "gelu_new")} | UNTIED,
        qk_norm=False,
        partial_rope=True,
        square_heads=True,
        rope_scalings=(),
    ),
    "gpt2": Architecture("gpt2", {"activation_function": (ACTIVATION, "gelu_new")}, names=FUSED_QKV),
    "gpt_neox": Architecture(
        "gptneox",
        {"hidden_act": (ACTIVATION, "gelu_pytorch_tanh"), "attention_bias": ("layers.*.mixer.bias", True)} | UNTIED,
        extra_keys=lambda config: {"use_parallel_residual": config["use_parallel_residual"]},
        names=FUSED_QKV,
        partial_rope=True,
        rope_scalings=(LinearConfig,),
    ),
    "cohere": Architecture(
        "command-r",
        SILU | NO_ATTENTION_BIAS | TIED,
        qk_norm=False,
        extra_keys=extra.cohere_keys,
        square_heads=True,
        rope_scalings=(LinearConfig,),
    ),
    "cohere2": Architecture(
        "cohere2",
        SILU | NO_ATTENTION_BIAS | TIED,
        extra_keys=extra.cohere_keys,
        full_attention_period=4,
        square_heads=True,
        rope_scalings=(),
    ),
    "arcee": Architecture(
        "arcee", RELU2 | NO_ATTENTION_BIAS | NO_MLP_BIAS, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS
    ),
    "granite": Architecture(
        "granite",
        SILU,
        extra_keys=extra.granite_keys,
        interleaved_rope=True,
        any_scale=True,
        rope_scalings=LLAMA_SCALINGS,
        fixed_keys={"rope.scaling.finetuned": True, "deepstack_mapping": []},  # whether it has positions; of images
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE,
    "glm4": Architecture("glm4", SILU, names=FUSED_GATE, partial_rope=True, fixed_keys=NO_SECTIONS),
    "glm": Architecture("chatglm", SILU, names=FUSED_GATE, partial_rope=True, square_heads=True),
    "glm4_moe": Architecture(
        "glm4moe",
        SILU,
        extra_keys=extra.deepseek_keys,
        names=POST_ATTENTION,
        partial_rope=True,
        moe_to_the_end=True,
        gating=extra.SIGMOID,
    ),
    "exaone4": Architecture(
        "exaone4",
        SILU,
        extra_keys=extra.local_keys,
        names=REORDERED,
        full_attention_period=4,
        windowed_depth=64,
        scaled_windows=True,
        square_heads=True,
        nope_period=4,
        rope_scalings=LLAMA_SCALINGS,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        SILU | NO_MLP_BIAS | {"attention_out_bias": ("layers.*.mixer.bias", False)},
        names=POST_ATTENTION,
    ),
    "stablelm": Architecture("stablelm", SILU | UNTIED, partial_rope=True, square_heads=True),
    "starcoder2": Architecture(
        "starcoder2",
        {"hidden_act": (ACTIVATION, "gelu_pytorch_tanh"), "use_bias": ("layers.*.mixer.bias", True)},
        square_heads=True,
    ),
    "olmo": Architecture(
        "olmo",
        SILU | NO_ATTENTION_BIAS,
        interleaved_rope=True,
        square_heads=True,
        fixed_keys={"attention.layer_norm_epsilon": 1e-5},
    ),
    "dots1": Architecture(
        "dots1",
        SILU | NO_ATTENTION_BIAS | UNTIED,
        extra_keys=extra.deepseek_keys,
        grouped_heads=False,
        moe_to_the_end=True,
        gating=extra.SIGMOID,
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        SILU | {"use_bias": ("layers.*.mixer.bias", False)},
        extra_keys=extra.ernie_keys,
        moe_to_the_end=True,
        gating=extra.SOFTMAX,
    ),
    "hunyuan_v1_moe": Architecture(
        "hunyuan-moe",
        SILU | NO_ATTENTION_BIAS,
        extra_keys=extra.hunyuan_keys,
        rope_scalings=LLAMA_SCALINGS,
        gating=extra.SOFTMAX,
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        SILU | UNTIED,
        extra_keys=extra.expert_keys,
        partial_rope=True,
        gating=extra.SIGMOID,
    ),
    "afmoe": Architecture(
        "afmoe",
        SILU,
        extra_keys=extra.afmoe_keys,
        assumed=_scaled_embedding,
        full_attention_period=4,
        moe_to_the_end=True,
        rope_scalings=(),
        gating=extra.SIGMOID,
        factor_without_type=True,
        fixed_keys={"attention.sliding_window_pattern": 4, "expert_weights_norm": True},  # 4: of RoPE, whatever it says
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        {
            "attention_bias": ("layers.*.mixer.bias", True),
            "swiglu_limit": ("layers.*.feedforward.limit", 7.0),
            "swiglu_alpha": ("layers.*.feedforward.alpha", 1.702),
        }
        | UNTIED,
        extra_keys=lambda config: extra.expert_keys(config) | extra.local_keys(config),
        names=POST_ATTENTION,
        full_attention_period=2,
        scaled_windows=True,
        factor_without_type=True,
    ),
    "deepseek_v2": replace(
        DEEPSEEK,
        fixed_fields=SILU
        | NO_ATTENTION_BIAS
        | {
            "mlp_bias": ("layers.*.feedforward.bias", False),
            "topk_method": ("layers.*.feedforward.routing", "greedy"),
        },
    ),
    "deepseek_v3": DEEPSEEK,
    "lfm2": Architecture(
        "lfm2",
        {"conv_bias": ("layers.*.mixer.conv_bias", False)},
        extra_keys=extra.lfm2_keys,
        names={"final_norm.norm": "token_embd_norm"},
        square_heads=True,
        rope_scalings=(),
        fixed_keys={"attention.sliding_window": 0},
    ),
    "ministral3": Architecture(
        "mistral3",
        SILU,
        extra_keys=extra.ministral_keys,
        interleaved_rope=True,
        rope_scalings=(YarnConfig,),
        yarn_log=1.0,
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "qwen3_5_text": Architecture(
        "qwen35",
        SILU | NO_ATTENTION_BIAS,
        extra_keys=extra.qwen35_keys,
        names=FUSED_GATED_QUERY | POST_ATTENTION | {"delta.beta": "ssm_beta", "delta.a": "ssm_alpha"},
        norm_plus_one=True,
        assumed=_delta_rule,
        partial_rope=True,
        tiled_values=True,
        rope_scalings=(),
        fixed_keys={"attention.layer_norm_rms_epsilon": INNER_EPS},
    ),
    "granitemoehybrid": Architecture(
        "granitehybrid",
        SILU,
        extra_keys=extra.hybrid_keys,
        interleaved_rope=True,
        any_scale=True,
        assumed=_mamba2_twice_as_wide,
    ),
    "mamba2": Architecture("mamba2", extra_keys=extra.mamba2_keys, assumed=_mamba2),
    "falcon": Architecture(
        "falcon",
        {
            "activation": (ACTIVATION, "gelu_pytorch_tanh"),
            "bias": ("layers.*.mixer.bias", False),
            "parallel_attn": ("residual.kind", True),
        },
        names=FUSED_QKV | {"residual.norms.mixer": "attn_norm_2", "residual.norms.feedforward": "attn_norm"},
        rope_scalings=(LinearConfig,),
    ),
    "bloom": Architecture("bloom", names=FUSED_QKV),
    "gpt_bigcode": Architecture(
        "starcoder", {"activation_function": (ACTIVATION, "gelu_pytorch_tanh")}, names=FUSED_QKV
    ),
    "jais2": Architecture(
        "jais2",
        RELU2
        | {
            "attention_bias": ("layers.*.mixer.bias", True),
            "mlp_bias": ("layers.*.feedforward.bias", True),
        },
    ),
    "bert": Architecture(
        "bert",
        {"hidden_act": (ACTIVATION, "gelu")},
        extra_keys=lambda config: {"attention.causal": False, "pooling_type": MEAN_POOLING},
        names={"residual.norms.mixer": "attn_output_norm", "residual.norms.feedforward": "layer_output_norm"},
        square_heads=True,
        grouped_heads=False,
        qk_norm=False,
        encoder=True,
    ),
}


# The tensors of a GGUF: their dtypes, and rows ordered for llama.cpp's RoPE.


# Routers, learned positions, types of tokens and convolutions.
FLOAT32_WEIGHTS = ("ffn_gate_inp", "position_embd", "token_types", "shortconv.conv", "ssm_conv1d", "ssm_norm")
FLOAT32_ENDS = (".bias", ".ssm_a", ".ssm_d")
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF. transform, restore: from and to the parameters that its rule joins.

    may_quantize: whether llama.cpp reads it quantized.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    transform: Transform
    restore: Transform
    may_quantize: bool

    def build(self, tensors: "HFTensors") -> Tensor:
        """Make the tensor, in its own memory."""
        return self.transform(tensors[self.name].to(torch.float32)).to(self.dtype).contiguous()


def gguf_tensors(
    tensors: "HFTensors", config: dict[str, Any], graph: Architecture, dtype: torch.dtype
) -> Iterator[GGUFTensor]:
    """All tensors of a GGUF, in the order of the model's parameters.

    tensors: the family's, as in `graph.stored`. dtype: of matrices. Vectors, biases and FLOAT32_WEIGHTS are always
    float32, as llama.cpp requires.
    """
    for name, rule in tensors.weight_map.rules.items():
        shape = tensors.weight_map.hf_shape(rule)
        is_float32 = len(shape) < 2 or name.endswith(FLOAT32_ENDS) or any(role in name for role in FLOAT32_WEIGHTS)
        transform, restore = _transforms_of(name, config, graph)
        own_dtype = torch.float32 if is_float32 else dtype
        yield GGUFTensor(name, shape, own_dtype, transform, restore, may_quantize=not is_float32)


def _transforms_of(name: str, config: dict[str, Any], graph: Architecture) -> tuple[Transform, Transform]:
    """The transform that makes a tensor from the family's, and its inverse."""
    for role, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
        if graph.interleaved_rope and role in name:
            return partial(interleave_rope_rows, heads=config[heads]), partial(_separate_rope_rows, heads=config[heads])
    if name.endswith(".ssm_a"):
        return _negative_rate, _log_rate
    if graph.norm_plus_one and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        return partial(torch.add, other=1.0), partial(torch.sub, other=1.0)
    return _identity, _identity


def interleave_rope_rows(x: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from RoPE pairs (i, i + d/2) to pairs (2i, 2i + 1)."""
    split: Tensor = x.unflatten(0, (heads, 2, -1))
    return split.transpose(1, 2).flatten(0, 2)


def _separate_rope_rows(x: Tensor, heads: int) -> Tensor:
    split: Tensor = x.unflatten(0, (heads, -1, 2))
    return split.transpose(1, 2).flatten(0, 2)


def _negative_rate(x: Tensor) -> Tensor:
    return -x.exp()


def _log_rate(x: Tensor) -> Tensor:
    return x.neg().log()


def _identity(x: Tensor) -> Tensor:
    return x
