"""gpt-oss (OpenAI 2025): sinks, every other layer a window, YaRN, experts of clamped SwiGLU with biases.

Their experts stand in one tensor a projection, as inputs × outputs; gate and up alternate among its outputs.
"""

from typing import Any

import torch

from heddle.exchange import views
from heddle.exchange.families import _blocks, _experts, _local
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import FULL, SLIDING, read_rope
from heddle.exchange.rules import Form, Rules
from heddle.model.config import ModelConfig

WINDOW = 128  # of a file that does not tell
THETA = 150000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: Fields) -> dict[str, Any]:
    """A layer each, with or without the window."""
    mixer = {
        "kind": "attention",
        **_blocks.read_heads(fields, fields.need("hidden_size", int)),
        "bias": fields.take("attention_bias", True),
        "sink": True,
        "dropout": fields.take("attention_dropout", 0.0),
    }
    mixer["position"] = _read_rope(fields, mixer["head_dim"])
    feedforward = _read_experts(fields)
    usual = [FULL if index % 2 else SLIDING for index in range(_local.depth(fields))]
    windows = _local.windows(fields, _local.read_types(fields, usual), fields.given("sliding_window", WINDOW))
    layers = [{"mixer": mixer | {"window": window}, "feedforward": feedforward} for window in windows]
    norm = {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-5), "cast": "after"}
    return _blocks.frame(fields, norm, _local.stack(layers))


def _read_rope(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Their own YaRN where nothing is told; always all dims."""
    told = (
        fields if fields.find("rope_parameters", "rope_scaling") else Fields({**fields.data, "rope_parameters": YARN})
    )
    rope = read_rope(told, head_dim, THETA)
    fields.unread -= {"rope_parameters", "rope_scaling", "rope_theta"}
    fields.unread.discard("partial_rotary_factor")
    trained = rope.get("scaling", {}).get("original_length")
    fields.expect("initial_context_length", trained, default=trained)
    return rope


def _read_experts(fields: Fields) -> dict[str, Any]:
    """Experts in every layer."""
    fields.expect("hidden_act", "silu", default="silu")
    top_k = fields.need("num_experts_per_tok", int)
    fields.expect("experts_per_token", top_k, default=top_k)
    return {
        "kind": "moe",
        "experts": fields.need("num_local_experts", int, "num_experts"),
        "top_k": top_k,
        "hidden": fields.need("intermediate_size", int),
        "activation": "swiglu_clamped",
        "limit": fields.take("swiglu_limit", 7.0),
        "alpha": fields.take("swiglu_alpha", 1.702),
        "bias": True,
        "routing": "topk_softmax",
        "router_bias": True,
        **_experts.read_loss(fields, top_k, _local.depth(fields)),
    }


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    mixer, experts = views.attention(design), views.moe(design)
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | {
            "attention_bias": mixer.bias is True,
            "layer_types": views.layer_types(design),
            "sliding_window": views.window(design) or WINDOW,
            "rms_norm_eps": views.eps(design),
            "hidden_act": "silu",
            "intermediate_size": experts.hidden,
            "num_local_experts": experts.experts,
            "num_experts_per_tok": experts.top_k,
            "experts_per_token": experts.top_k,
            "swiglu_limit": experts.limit or 7.0,
            "swiglu_alpha": experts.alpha or 1.702,
            **_experts.write_loss(design, experts),
        }
    )


ALTERNATING = Form(  # of gate and up; a matrix an expert, transposed, or a bias an expert
    lambda ours: _turned(torch.stack(list(ours), dim=2).flatten(1, 2)),
    lambda theirs, shapes: _turned(theirs).unflatten(1, (-1, 2)).unbind(2),
)
TURNED = Form(lambda ours: ours[0].mT, lambda theirs, shapes: [theirs.mT])


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.dim() == 3 else x


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, and those of sinks, router and experts."""
    _blocks.ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        _blocks.attention(to, theirs, ours)
        _blocks.pre_norms(to, theirs, ours)
        to.tensor(f"{theirs}.self_attn.sinks", f"{ours}.mixer.sink")
        to.module(f"{theirs}.mlp.router", f"{ours}.feedforward.router")
        stack, own = f"{theirs}.mlp.experts", f"{ours}.feedforward"
        for suffix, name in (("", "weight"), ("_bias", "bias")):
            to.tensor(f"{stack}.gate_up_proj{suffix}", f"{own}.gate.{name}", f"{own}.up.{name}", form=ALTERNATING)
        to.tensor(f"{stack}.down_proj", f"{own}.down.weight", form=TURNED)
        to.tensor(f"{stack}.down_proj_bias", f"{own}.down.bias")


FAMILY = Family("gpt_oss", "GptOssForCausalLM", read, write, rules)
