"""Gemma 1 (Gemma Team 2024): Llama's decoder with scaled embeddings, norms with weights 1 + γ, and GeGLU.

The activation that its first files call `gelu` is the tanh approximation, as in transformers.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

ACTIVATION = "gelu_pytorch_tanh"


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. transformers ignores `hidden_activation`."""
    config.expect("use_bidirectional_attention", False, None)
    config.unread.discard("hidden_activation")
    mixer = _common.read_attention(config, head_dim=256, bias=config.get("attention_bias", False))
    feedforward = _common.read_gated(config, default=ACTIVATION)
    if config.get("hidden_act", ACTIVATION) == "gelu":
        feedforward["activation"] = design_parts.HEDDLE_ACTIVATIONS[ACTIVATION]
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "offset": 1.0, "cast": "after"},
        _common.same_layers(config, mixer, feedforward),
        tied=True,
        embedding={"scale": True},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_decoder(design)


FAMILY = Family("gemma", "GemmaForCausalLM", read_config, write_config, _common.map_weights, priority=9)
