"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, an MLP, biases everywhere, grouped queries and one window for all."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; `use_bias` applies to every projection."""
    config.require("num_key_value_heads", int)
    bias = config.get("use_bias", True)
    config.expect("mlp_type", "default", default="default")  # of the first files
    config.expect("norm_type", "layer_norm", default="layer_norm")
    # The first files repeat other fields in words of GPT-BigCode, which transformers ignores.
    config.note("activation_function", "layer_norm_epsilon", "scale_attn_weights")
    config.note("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    mixer = _common.read_attention(config, bias=bias, window=config.optional("sliding_window"))
    feedforward = _common.read_mlp(config, "gelu_pytorch_tanh", bias)
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("norm_epsilon", 1e-5)},
        _common.same_layers(config, mixer, feedforward),
        tied=True,
        embedding={"dropout": config.get("embedding_dropout", 0.0)},
        residual={"kind": "pre_norm", "dropout": config.get("residual_dropout", 0.0)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.write_mlp(design)
        | _common.written(design, "sliding_window", "embedding_dropout", "residual_dropout")
        | {
            "use_bias": design_parts.first_mlp(design).bias or design_parts.first_attention(design).bias is True,
            "norm_epsilon": design_parts.norm_eps(design),
        }
    )


def _map_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, {"c_fc": "up", "c_proj": "down"})


map_weights = partial(_common.map_weights, map_feedforward=_map_mlp)


FAMILY = Family("starcoder2", "Starcoder2ForCausalLM", read_config, write_config, map_weights)
