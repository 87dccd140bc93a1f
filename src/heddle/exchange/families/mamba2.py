"""Mamba-2, alone or with attention: the fields of the mixer, under each family's names, and its tensors."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap, reshaped
from heddle.exchange.rope import read_rope
from heddle.exchange.safetensors_folder import INFINITY
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config
from heddle.parts.mixers.pair import PairConfig

AUTO = "auto"
UNLIMITED = 1e30  # a time step no smaller counts as infinite
# Of the first weights, or of kernels.
UNUSED_FIELDS = """time_step_min time_step_max time_step_floor time_step_rank chunk_size use_mamba_kernels
rescale_prenorm_residual""".split()  # noqa: SIM905


# A family's names of the mixer's fields, each with its default there.
Names = Mapping[str, tuple[str, int]]


PREFIXED_NAMES: Names = {  # of Granite 4, Bamba and Falcon-H1
    "heads": ("mamba_n_heads", 128), "head_dim": ("mamba_d_head", 64), "state_size": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1), "conv_kernel": ("mamba_d_conv", 4), "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False), "expand": ("mamba_expand", 2),
}  # fmt: skip


def read_mixer(config: ConfigReader, names: Names, eps: float) -> dict[str, Any]:
    """The mixer, with time steps as `time_step_limit` has them.

    Raises ConfigError if its heads are not `expand` times as wide as the model.
    """
    fields, expand = read_fields(config, names, eps), names["expand"]
    if config.get(*expand) * config.require_count("hidden_size") != fields["heads"] * fields["head_dim"]:
        heads = f"{fields['heads']} heads of {fields['head_dim']}"
        raise config.invalid(expand[0], f"times hidden_size is not {heads}; make them equal")
    return fields | read_time_step_limit(config)


def read_mamba(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The Mamba-2 mixer; `mamba_d_head: auto` divides the inner width by the heads."""
    inner: int = config.get("mamba_expand", 2) * config.require_count("hidden_size")
    heads: int = config.get("mamba_n_heads", 128)
    if heads < 1:
        raise config.invalid("mamba_n_heads", "should be above 0")
    return read_mixer(config, {**PREFIXED_NAMES, "head_dim": ("mamba_d_head", inner // heads)}, eps)


def read_time_step_limit(config: ConfigReader) -> dict[str, Any]:
    """The mixer's limits of time steps as `time_step_limit` has them."""
    limit = config.optional("time_step_limit") or [0.0, UNLIMITED]
    least, maximum = (UNLIMITED if step == INFINITY else float(step) for step in limit)
    return time_step_limit(least, maximum)


def read_fields(config: ConfigReader, names: Names, eps: float) -> dict[str, Any]:
    """The mixer without its time steps; some files have AUTO for a default."""
    fields: dict[str, Any] = {"kind": "mamba2", "norm": {"kind": "rms", "eps": eps}}
    for field, (name, default) in names.items():
        if field != "expand":
            fields[field] = default if config.data.get(name) == AUTO else config.get(name, default)
            config.unread.discard(name)
    config.ignore(*UNUSED_FIELDS)
    return fields


def time_step_limit(least: float, maximum: float = UNLIMITED) -> dict[str, Any]:
    """The mixer's limits of time steps, none if they limit nothing."""
    free = least <= 0.0 and maximum >= UNLIMITED
    return {} if free else {"time_step_limit": [least, min(maximum, UNLIMITED)]}


def write_mixer(design: ModelConfig, names: Names) -> dict[str, Any]:
    """The fields that `read_mixer` reads."""
    mixer = first_mamba(design)
    expand = {names["expand"][0]: max(1, mixer.heads * (mixer.head_dim or 1) // design.width)}
    return write_fields(design, names) | expand | write_time_step_limit(mixer)


def write_time_step_limit(mixer: Mamba2Config) -> dict[str, Any]:
    """The field that `read_time_step_limit` reads."""
    least, maximum = mixer.time_step_limit or (0.0, UNLIMITED)
    return {"time_step_limit": [least, INFINITY if maximum >= UNLIMITED else maximum]}


def write_fields(design: ModelConfig, names: Names) -> dict[str, Any]:
    """The fields of the first Mamba-2 mixer, without its time steps."""
    mixer = first_mamba(design)
    return {name: getattr(mixer, field) for field, (name, _) in names.items() if field != "expand"}


def first_mamba(design: ModelConfig) -> Mamba2Config:
    """The first Mamba-2 mixer, also of a pair, or a default one."""
    return design_parts.first_mixer(design, Mamba2Config(heads=1, head_dim=design.width))


NORM_BY_GROUP = reshaped(-1)  # the weights of a norm of several groups are stored one after the other
LAYER = {"conv1d.bias": "convolution.bias", "A_log": "decay.rate", "dt_bias": "decay.bias", "D": "skip"}


def map_mixer(weights: WeightMap, hf: str, heddle: str) -> None:
    """The tensors of a mixer; its input projections are one, and k, q and v are the paper's B, C and x."""
    weights.add_module(f"{hf}.in_proj", *(f"{heddle}.{role}" for role in ("gate", "v", "k", "q", "a")))
    weights.add_tensor(f"{hf}.conv1d.weight", f"{heddle}.convolution.weight", transform=DEPTHWISE_CONV)
    weights.add_modules(hf, heddle, LAYER)
    weights.add_tensor(f"{hf}.norm.weight", f"{heddle}.norm.weight", transform=NORM_BY_GROUP)
    weights.add_module(f"{hf}.out_proj", f"{heddle}.out")


NAMES: Names = {
    "heads": ("num_heads", 128), "head_dim": ("head_dim", 64), "state_size": ("state_size", 128),
    "groups": ("n_groups", 8), "conv_kernel": ("conv_kernel", 4), "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False), "expand": ("expand", 2),
}  # fmt: skip


def read_mamba2(config: ConfigReader) -> dict[str, Any]:
    """Mamba-2 (Dao & Gu 2024): a state space model in every layer, and neither attention nor feed-forwards.

    `residual_in_fp32` only affects the precision of sums in narrow dtypes; heddle's stream has the weights' dtype.
    """
    eps = config.get("layer_norm_epsilon", 1e-5)
    config.expect("hidden_act", "silu", default="silu")
    config.expect("rms_norm", True, default=True)
    config.note("residual_in_fp32", "norm_before_gate", "intermediate_size", "time_step_init_scheme", "time_step_scale")
    layer = {"repeat": _layer_types.read_depth(config), "mixer": read_mixer(config, NAMES, eps)}
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, [layer])


def write_mamba2(design: ModelConfig) -> dict[str, Any]:
    common = _common.without(_common.write_common(design), "max_position_embeddings") | {"hidden_act": "silu"}
    return common | write_mixer(design, NAMES) | _common.written(design, "layer_norm_epsilon")


def map_backbone(
    design: ModelConfig, weights: WeightMap, map_one: Callable[[WeightMap, str, str], None] = map_mixer
) -> None:
    """The names of Mamba and Mamba-2. map_one: maps the tensors of a mixer, by its two paths."""
    _common.map_embedding_and_head(design, weights, "backbone.embeddings", "backbone.norm_f")
    for hf, heddle, _ in _common.named_layers(design, prefix="backbone.layers"):
        weights.add_module(f"{hf}.norm", f"{heddle}.residual.norms.mixer")
        map_one(weights, f"{hf}.mixer", f"{heddle}.mixer")


MAMBA2 = Family("mamba2", "Mamba2ForCausalLM", read_mamba2, write_mamba2, map_backbone)


ROTARY_FACTOR = 0.5  # in the table of RoPE another may stand; transformers overwrites the one beside it

# Of kernels, of generation, of training, and of files of the first version.
BAMBA_UNUSED_FIELDS = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")


def read_bamba(config: ConfigReader) -> dict[str, Any]:
    """Bamba (IBM, Princeton, CMU & UIUC 2024): Mamba-2 in most layers, attention with half-rotated heads in others."""
    # `attn_layer_indices` are the layers with attention.
    config.expect("hidden_act", "silu", default="silu")  # the convolution uses it, too
    config.expect("partial_rotary_factor", ROTARY_FACTOR, None)
    config.ignore(*BAMBA_UNUSED_FIELDS)
    eps, heads, bias = config.get("rms_norm_eps", 1e-5), _common.read_heads(config), config.get("attention_bias", False)
    rope = read_rope(config, heads["head_dim"], partial_rotary_factor=ROTARY_FACTOR)
    attention, mamba = _common.attention(config, heads, rope, bias=bias), read_mamba(config, eps)
    depth, indices = _layer_types.read_depth(config), config.get("attn_layer_indices", list[int]())
    mixers = [attention if index in indices else mamba for index in range(depth)]
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    return _common.rms_design(config, eps, _layer_types.layers_of(mixers, feedforward))


def write_bamba(design: ModelConfig) -> dict[str, Any]:
    mamba = [isinstance(layer.mixer, Mamba2Config) for layer in design_parts.layers(design)]
    fields = _common.write_decoder(design, "mlp_bias") | write_mixer(design, PREFIXED_NAMES)
    fields |= _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
    fields = _common.without(fields, "partial_rotary_factor")
    return fields | {"attn_layer_indices": [index for index, is_mamba in enumerate(mamba) if not is_mamba]}


def map_bamba(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of attention; its own of the norms, the feed-forward and Mamba-2."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    for hf, heddle, layer in _common.named_layers(design):
        if isinstance(layer.mixer, Mamba2Config):
            map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer")
        else:
            _common.map_attention(weights, hf, heddle)
        map_feedforward(weights, hf, heddle)


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """The feed-forward of a layer, and the norms before its two branches, as in Falcon-H1."""
    _common.map_gated(weights, f"{hf}.feed_forward", f"{heddle}.feedforward")
    weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.pre_ff_layernorm", f"{heddle}.residual.norms.feedforward")


BAMBA = Family("bamba", "BambaForCausalLM", read_bamba, write_bamba, map_bamba)


CHANNELS = "mamba_d_ssm"
BRANCHES = ("attention", "ssm")  # first and second of each layer's pair, in names of multipliers
NORMS = {(False, True): "none", (False, False): "none", (True, True): "before", (True, False): "after"}


def read_falcon_h1(config: ConfigReader) -> dict[str, Any]:
    """Falcon-H1 (TII 2025): attention and Mamba-2 side by side in every layer, and a multiplier of each branch.

    `key_multiplier` is part of attention's scale. `projectors_bias`, of Mamba-2's last projection, must be as
    `mamba_proj_bias`, of its first.
    """
    # A multiplier of 1 is none.
    eps = config.get("rms_norm_eps", 1e-5)
    config.expect("hidden_act", "silu", default="silu")
    config.expect("mamba_use_mlp", True, None)
    config.expect("attn_layer_indices", None)
    config.ignore("mamba_chunk_size", "num_logits_to_keep")
    pair: dict[str, Any] = {"kind": "pair", "first": _read_attention(config), "second": _read_mamba(config, eps)}
    for way in ("in", "out"):
        numbers = [_read_multiplier(config, f"{branch}_{way}_multiplier") for branch in BRANCHES]
        pair |= {f"{way}put_multipliers": None if numbers == [1.0, 1.0] else numbers}
    gate, down = _read_multipliers(config, "mlp_multipliers", 2)
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    feedforward |= {"gate_multiplier": _common.multiplier(gate), "multiplier": _common.multiplier(down)}
    embedding = {"multiplier": _common.multiplier(_read_multiplier(config, "embedding_multiplier"))}
    scale = _read_multiplier(config, "lm_head_multiplier")
    head = {"tied": config.get("tie_word_embeddings", False), "scale": scale}
    layers = _common.same_layers(config, pair, feedforward)
    return _common.rms_design(config, eps, layers, embedding=embedding, head=head)


def _read_multiplier(config: ConfigReader, name: str) -> float:
    number = config.get(name, 1.0)
    if not 0.0 < number < math.inf:
        raise config.invalid(name, "should be a number above 0")
    return number


def _read_multipliers(config: ConfigReader, name: str, count: int) -> list[float]:
    numbers = config.get(name, [1.0] * count)
    if len(numbers) != count or not all(isinstance(x, int | float) and 0.0 < x < math.inf for x in numbers):
        raise config.invalid(name, f"should be {count} numbers above 0")
    return [float(number) for number in numbers]


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    config.require_count("hidden_size")
    attention = _common.read_attention(config, bias=config.get("attention_bias", False))
    key = _common.multiplier(_read_multiplier(config, "key_multiplier"))
    return attention | {"scale": None if key is None else key * attention["head_dim"] ** -0.5}


def _read_mamba(config: ConfigReader, eps: float) -> dict[str, Any]:
    """`mamba_d_ssm: null` stands for `mamba_expand` times the width, `mamba_d_head: auto` divides it by the heads."""
    expanded: int = config.get("mamba_expand", 2) * config.require_count("hidden_size")
    inner = config.get_nullable(CHANNELS, 1024)
    inner = expanded if inner is None else inner
    heads: int = config.get("mamba_n_heads", 128)
    if type(inner) is not int or heads < 1 or inner < 1:
        raise config.invalid(CHANNELS, "should be a number of channels, with at least one head")
    fields = read_fields(config, {**PREFIXED_NAMES, "head_dim": ("mamba_d_head", inner // heads)}, eps)
    if fields["heads"] * fields["head_dim"] != inner:
        raise config.invalid(CHANNELS, f"is not {fields['heads']} heads of {fields['head_dim']}; make them equal")
    if config.get("projectors_bias", False) != fields["bias"]:
        raise config.invalid("projectors_bias", "it should equal 'mamba_proj_bias'")
    has_norm, is_before = config.get("mamba_rms_norm", False), config.get("mamba_norm_before_gate", True)
    numbers = _read_multipliers(config, "ssm_multipliers", 5)
    fields |= {"gated_norm": NORMS[has_norm, is_before], "multipliers": None if numbers == [1.0] * 5 else numbers}
    return fields | {"norm": fields["norm"] if has_norm else None} | read_time_step_limit(config)


def write_falcon_h1(design: ModelConfig) -> dict[str, Any]:
    attention, dense = design_parts.first_attention(design), design_parts.first_gated(design)
    mamba = first_mamba(design)
    return (
        _common.write_decoder(design)
        | write_fields(design, PREFIXED_NAMES)
        | write_time_step_limit(mamba)
        | _write_branches(design)
        | {
            CHANNELS: mamba.heads * (mamba.head_dim or 1),
            "projectors_bias": mamba.bias,
            "mamba_rms_norm": mamba.gated_norm != "none",
            "mamba_norm_before_gate": mamba.gated_norm != "after",
            "ssm_multipliers": list(mamba.multipliers or [1.0] * 5),
            "key_multiplier": float(f"{(attention.scale or 1.0) * (attention.head_dim or 1) ** 0.5:.12g}"),
            "mlp_bias": design_parts.first_gated(design).bias,
            "mlp_multipliers": [dense.gate_multiplier or 1.0, dense.multiplier or 1.0],
            "embedding_multiplier": design.embedding.multiplier or 1.0,
            "lm_head_multiplier": design.head.scale,
        }
    )


def _write_branches(design: ModelConfig) -> dict[str, Any]:
    """The multipliers of the first pair of mixers."""
    pairs = [layer.mixer for layer in design_parts.layers(design) if isinstance(layer.mixer, PairConfig)]
    inputs, outputs = (pairs[0].input_multipliers, pairs[0].output_multipliers) if pairs else (None, None)
    ways = {"in": inputs or (1.0, 1.0), "out": outputs or (1.0, 1.0)}
    return {
        f"{branch}_{way}_multiplier": number
        for way, numbers in ways.items()
        for branch, number in zip(BRANCHES, numbers, strict=True)
    }


def map_falcon_h1(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of attention and of the feed-forward."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    for hf, heddle, _ in _common.named_layers(design):
        for name, role in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
            weights.add_module(f"{hf}.self_attn.{name}_proj", f"{heddle}.mixer.first.{role}")
        map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer.second")
        map_feedforward(weights, hf, heddle)


FALCON_H1 = Family("falcon_h1", "FalconH1ForCausalLM", read_falcon_h1, write_falcon_h1, map_falcon_h1)
