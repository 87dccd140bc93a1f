"""Qwen3-Next (Qwen 2025): gated delta rules, softmax attention with a gate in every fourth layer, experts in all.

Norms are `1 + γ`, but for that of the delta rule's heads. What predicts further tokens (`mtp.`) is left out.
"""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _experts, _local
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import CHANNELS, Rules, in_groups
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

LINEAR, FULL = "linear_attention", "full_attention"
PART = 0.25  # of the dims of a head turn, where nothing says how many


def read(fields: Fields) -> dict[str, Any]:
    """Two mixers, by the type of each layer."""
    eps = fields.take("rms_norm_eps", 1e-6)
    fields.expect("use_sliding_window", False, default=False)
    mixers = {FULL: _read_attention(fields), LINEAR: _read_delta(fields, eps)}
    shared = fields.need("shared_expert_intermediate_size", int)
    more = {"shared": 1, "shared_hidden": shared, "shared_gate": True}
    forwards = _experts.read_forwards(fields, more, True)
    types = _read_types(fields, len(forwards))
    layers = [{"mixer": mixers[kind], "feedforward": one} for kind, one in zip(types, forwards, strict=True)]
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    return _blocks.frame(fields, norm, _local.stack(layers))


def _read_types(fields: Fields, depth: int) -> list[str]:
    types = fields.take("layer_types", _usual(fields.take("full_attention_interval", 4), depth))
    if len(types) != depth or set(types) - {LINEAR, FULL}:
        raise fields.wrong("layer_types", f"should say {LINEAR} or {FULL} of each of {depth} layers")
    return types


def _usual(interval: int, depth: int) -> list[str]:
    return [LINEAR if (index + 1) % max(interval, 1) else FULL for index in range(depth)]


def _read_attention(fields: Fields) -> dict[str, Any]:
    fields.need("head_dim", int)
    heads = _experts.read_heads(fields)
    return {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "gate": "channel",
        "bias": fields.take("attention_bias", False),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"], part=PART),
    }


def _read_delta(fields: Fields, eps: float) -> dict[str, Any]:
    fields.expect("hidden_act", "silu", default="silu")  # also after the convolution
    return {
        "kind": "gated_delta",
        "heads": fields.need("linear_num_value_heads", int),
        "key_heads": fields.need("linear_num_key_heads", int),
        "head_dim": fields.need("linear_key_head_dim", int),
        "value_dim": fields.need("linear_value_head_dim", int),
        "convolution": fields.need("linear_conv_kernel_dim", int),
        "norm": {"kind": "rms", "eps": eps},
    }


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    delta, moe = views.delta(design), views.moe(design)
    types = [LINEAR if isinstance(one.mixer, GatedDeltaConfig) else FULL for one in views.layers(design)]
    interval = types.index(FULL) + 1 if FULL in types else design.depth + 1
    return (
        _blocks.write_frame(design)
        | {"partial_rotary_factor": 1.0}  # where nothing is said, theirs is 0.25
        | _blocks.write_attention(design, part=PART)
        | _experts.write_forwards(design)
        | {
            "attention_bias": views.attention(design).bias is True,
            "use_sliding_window": False,
            "layer_types": types,
            "full_attention_interval": interval if types == _usual(interval, design.depth) else None,
            "linear_num_value_heads": delta.heads,
            "linear_num_key_heads": delta.key_heads,
            "linear_key_head_dim": delta.head_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.convolution,
            "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden,
            "rms_norm_eps": views.eps(design),
            "hidden_act": "silu",
        }
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """Projections that read the same are one tensor, head by head of the queries or the keys."""
    _blocks.ends(design, to)
    for index, layer in enumerate(views.layers(design)):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            _delta(to, f"{theirs}.linear_attn", f"{ours}.mixer", layer.mixer.key_heads or layer.mixer.heads)
        elif isinstance(layer.mixer, AttentionConfig):
            _blocks.attention(to, theirs, ours)
            both = (f"{ours}.mixer.q", f"{ours}.mixer.gate")
            to.module(f"{theirs}.self_attn.q_proj", *both, form=in_groups(layer.mixer.heads))
        _experts.mlp(to, f"{theirs}.mlp", f"{ours}.feedforward", "shared_expert")
        to.module(f"{theirs}.mlp.shared_expert_gate", f"{ours}.feedforward.shared_gate")
        _blocks.pre_norms(to, theirs, ours)


def _delta(to: Rules, theirs: str, ours: str, groups: int) -> None:
    fused = [f"{ours}.{name}" for name in ("q", "k", "v", "gate")]
    to.module(f"{theirs}.in_proj_qkvz", *fused, form=in_groups(groups))
    to.module(f"{theirs}.in_proj_ba", f"{ours}.beta", f"{ours}.a", form=in_groups(groups))
    to.module(f"{theirs}.conv1d", f"{ours}.convolution", form=CHANNELS)
    to.tensor(f"{theirs}.A_log", f"{ours}.decay.rate")
    to.tensor(f"{theirs}.dt_bias", f"{ours}.decay.bias")
    to.module(f"{theirs}.norm", f"{ours}.norm")
    to.module(f"{theirs}.out_proj", f"{ours}.out")


FAMILY = Family("qwen3_next", "Qwen3NextForCausalLM", read, write, rules, left_out=("mtp.",))
