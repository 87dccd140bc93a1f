"""What the dense Qwen3.5 and its mixture share: Qwen3-Next's layers with one tensor for each input projection."""

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _qwen_hybrid
from heddle.exchange.family import WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

IGNORED_TENSORS = ("mtp.",)


def check_fixed_fields(config: ConfigReader) -> None:
    """Fields with one value in every published model, and those of the layers that predict further tokens."""
    config.expect("attn_output_gate", True, default=True)
    config.expect("output_gate_type", "swish", None)
    config.expect("mamba_ssm_dtype", "float32", None)  # heddle's states have at least float32
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.optional(name)
    config.expect("mlp_only_layers", [], None)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, those of the delta rule, and those of experts."""
    _common.map_embedding_and_head(design, weights)
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            _map_delta(weights, f"{hf}.linear_attn", f"{heddle}.mixer")
        elif isinstance(layer.mixer, AttentionConfig):
            _qwen_hybrid.map_attention(weights, hf, heddle, layer.mixer.heads)
        _qwen_hybrid.map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


def _map_delta(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_module(f"{hf}.in_proj_qkv", *(f"{heddle}.{role}" for role in "qkv"))
    for name, role in (("z", "gate"), ("b", "beta"), ("a", "a")):
        weights.add_module(f"{hf}.in_proj_{name}", f"{heddle}.{role}")
    _qwen_hybrid.map_delta(weights, hf, heddle)
