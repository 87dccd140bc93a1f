"""nanochat (Karpathy 2025): RMSNorm without weights, also of embeddings and rotated heads, squared ReLU, a soft cap.

Its heads are rotated in the opposite direction; exchanging the halves of every head of q and k is equivalent.
"""

from typing import Any

from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    bias = config.get("attention_bias", False)
    mixer = _common.read_attention(config, qk_norm="head", norm_after_rotation=True, bias=bias)
    activation = _common.read_activation(config, default="relu2")
    feedforward = {"kind": "mlp", "hidden": config.require("intermediate_size", int), "activation": activation}
    softcap = config.get_nullable("final_logit_softcapping", 15.0)
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "weight": False},
        _common.same_layers(config, mixer, feedforward),
        embedding={"norm": True},
        head={"tied": config.get("tie_word_embeddings", False), "softcap": softcap},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.written(design, "attention_bias")
        | _common.write_mlp(design)
        | _common.written(design, "rms_norm_eps")
        | {"final_logit_softcapping": design.head.softcap}
    )


def exchanged_halves(heads: int) -> TensorTransform:
    """Each head's second half of rows before its first; its own inverse."""

    def exchanged(tensor: Tensor) -> Tensor:
        rows: Tensor = tensor.unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2)
        return rows

    return TensorTransform(lambda parameters: exchanged(parameters[0]), lambda tensor, shapes: [exchanged(tensor)])


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of embeddings and attention; there is no norm to map."""
    mixer = design_parts.first_attention(design)
    _common.map_weights(design, weights, map_feedforward=_map_mlp)
    for hf, heddle, _ in _common.named_layers(design):
        for role, heads in (("q", mixer.heads), ("k", mixer.kv_heads or mixer.heads)):
            projections = f"{hf}.self_attn.{role}_proj", f"{heddle}.mixer.{role}"
            weights.add_module(*projections, transform=exchanged_halves(heads))


def _map_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, {"fc1": "up", "fc2": "down"})


FAMILY = Family("nanochat", "NanoChatForCausalLM", read_config, write_config, map_weights)
