"""DeepSeek-V3 (DeepSeek-AI 2024): as V2, with sigmoid scores, a balancing bias, and experts chosen within groups.

Multi-token modules (`num_nextn_predict_layers`) are read where the weights hold them, as further layers.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    layout = "interleaved" if config.get("rope_interleave", True) else "half"
    mixer = _deepseek.read_attention(config, layout)
    layers = _deepseek.read_layers(config, mixer, _deepseek.read_sigmoid_routing(config), False)
    return _common.rms_design(config, 1e-6, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    rope = design_parts.rope_of(design_parts.first_latent_attention(design))
    routing = _deepseek.write_sigmoid_routing(design) | {"rope_interleave": rope.layout == "interleaved"}
    return _deepseek.write_common(design) | routing


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read_config,
    write_config,
    _deepseek.map_weights,
    ignored_tensors=("model.layers.{depth}.",),
    multi_token=_deepseek.MODULES,
)
