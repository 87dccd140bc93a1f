"""CodeGen (Nijkamp et al. 2022): GPT-J, whose queries, values and keys are one matrix in four blocks of heads."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _gpt, gptj
from heddle.exchange.family import Family, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig

BLOCKS = 4  # a constant in transformers: the devices that trained it


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    heads = config.require_count("n_head", "num_attention_heads")
    if heads % BLOCKS:
        raise config.invalid("n_head", f"its class asks a multiple of {BLOCKS}")
    return gptj.read_config(config)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """GPT-J's tensor names but for the projections that are one."""
    gptj.map_weights(design, weights, "out")
    for index in range(design.depth):
        roles = (f"layers.{index}.mixer.{role}" for role in "qvk")
        weights.add_module(f"transformer.h.{index}.attn.qkv_proj", *roles, transform=interleaved_by_group(BLOCKS))


FAMILY = Family(
    "codegen",
    "CodeGenForCausalLM",
    read_config,
    gptj.write_config,
    map_weights,
    ignored_tensors=(*_gpt.MASK_BUFFERS, "*.attn.causal_mask"),
)
