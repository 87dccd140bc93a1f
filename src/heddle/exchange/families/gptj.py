"""GPT-J (Wang & Komatsuzaki 2021): both branches read one norm, interleaved partial RoPE, a head with a bias."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _gpt
from heddle.exchange.family import CONCATENATED, Family, WeightMap
from heddle.model.config import ModelConfig

THETA = 10000.0  # a constant in transformers, not a field


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    config.expect("rotary", True, default=True)
    config.expect("scale_attn_weights", True, default=True)
    mixer = _gpt.read_attention(config, 0.0)
    mixer["position"] = {
        "kind": "rope",
        "base": THETA,
        "layout": "interleaved",
        "rotary_dim": _read_rotary_dim(config, mixer["heads"]),
    }
    layer = {"repeat": _gpt.read_depth(config), "mixer": mixer, "feedforward": _gpt.read_mlp(config)}
    head = {"tied": config.get("tie_word_embeddings", False), "bias": True}
    return _gpt.design_fields(config, [layer], 0.0, residual={"kind": "parallel", "norms": 1}, head=head)


def _read_rotary_dim(config: ConfigReader, heads: int) -> int:
    """The number of rotated dims of a head. Null means the model's width, which is possible with a single head only."""
    if "rotary_dim" in config.data and config.optional("rotary_dim") is None:
        if heads > 1:
            raise config.invalid("rotary_dim", "this rotates the dims of all heads together; give those of one head")
        return config.require_count("n_embd", "hidden_size")
    return config.get("rotary_dim", 64)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    return _gpt.write_common(design) | {"rotary_dim": design_parts.rope_of(mixer).rotary_dim or mixer.head_dim}


def map_weights(design: ModelConfig, weights: WeightMap, roles: str = "q k v out") -> None:
    """The tensor names; each is one parameter. roles: the projections of attention that are mapped here."""
    _gpt.map_embedding_and_head(weights)
    for index in range(design.depth):
        hf, heddle = f"transformer.h.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.ln_1", f"{heddle}.residual.norms.shared")
        for name in roles.split():
            weights.add_module(f"{hf}.attn.{name}_proj", f"{heddle}.mixer.{name}")
        _gpt.map_mlp(weights, f"{hf}.mlp.fc_in", f"{hf}.mlp.fc_out", f"{heddle}.feedforward", CONCATENATED)


FAMILY = Family("gptj", "GPTJForCausalLM", read_config, write_config, map_weights, ignored_tensors=_gpt.MASK_BUFFERS)
