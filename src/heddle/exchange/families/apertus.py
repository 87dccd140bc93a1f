"""Apertus (Swiss AI 2025): Llama's decoder with norms of each head's q and k, and an MLP of a learned activation."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.exchange.rope import read_rope_or
from heddle.model.config import ModelConfig

XIELU, DEFAULT_THETA = "xielu", 12e6
DEFAULT_ROPE = {  # if the config has no RoPE at all
    "rope_type": "llama3", "rope_theta": DEFAULT_THETA, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
SCALAR = TensorTransform(lambda parameters: parameters[0].reshape(()), lambda tensor, shapes: [tensor.reshape(1)])


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    config.expect("qk_norm", True, None)
    config.expect("post_norm", False, None)
    config.optional("hidden_dropout")  # of training; its class has none
    mixer = _common.read_attention(config, qk_norm="head", bias=config.get("attention_bias", False))
    mixer["position"] = read_rope_or(config, mixer["head_dim"], DEFAULT_THETA, DEFAULT_ROPE)
    learned = config.get("hidden_act", XIELU) == XIELU
    feedforward = {
        "kind": "mlp",
        "hidden": config.require("intermediate_size", int),
        "activation": XIELU if learned else _common.read_activation(config),
    }
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    learned = design_parts.first_mlp(design).activation == XIELU
    fields = _common.write_decoder(design) | _common.write_mlp(design)
    return fields | ({"hidden_act": XIELU} if learned else {})


def _map_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    for name, branch in (("attention", "mixer"), ("feedforward", "feedforward")):
        weights.add_module(f"{hf}.{name}_layernorm", f"{heddle}.residual.norms.{branch}")


def _map_mlp(weights: WeightMap, hf: str, heddle: str) -> None:
    _common.map_gated(weights, hf, heddle)  # without a gate
    for name, own in (("alpha_p", "a_p"), ("alpha_n", "a_n")):
        weights.add_tensor(f"{hf}.act_fn.{name}", f"{heddle}.activation.{own}")
    for name in ("beta", "eps"):
        weights.add_tensor(f"{hf}.act_fn.{name}", f"{heddle}.activation.{name}", transform=SCALAR)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names but for the norms, and the numbers of the activation."""
    _common.map_weights(design, weights, _map_norms, _map_mlp)


FAMILY = Family("apertus", "ApertusForCausalLM", read_config, write_config, map_weights)
