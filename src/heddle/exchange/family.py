"""A family of Hugging Face models: functions between its config.json and a heddle design, and a map of the weights."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange.config_reader import ConfigReader, short_repr
from heddle.exchange.weight_map import WeightMap
from heddle.model.config import ModelConfig

FAMILIES_FOLDER = Path(__file__).parent / "families"
# What heddle has no part for, by the model_type that needs it.
MISSING_PARTS = {
    "deepseek_v32": "an indexer that chooses which keys each query reads",
    "deepseek_v4": "compressed attention, an indexer that chooses keys, and experts chosen by a token's id",
    "gemma4_text": "embeddings for each layer, and layers that read the keys and values of others",
    "llama4_text": "attention in chunks, and experts whose inputs are weighted",
}


@dataclass(frozen=True)
class Family:
    """One model_type of transformers.

    read_config: config.json -> the plain data of a design. It must read every field that changes what is computed.
    write_config: a resolved design -> the nearest config.json of this family. It must not fail: what the family cannot
    express is found by reading the result again and comparing the two designs.
    map_weights: adds the rules between the family's tensors and the model's parameters.
    ignored_tensors: prefixes of tensor names that heddle skips with a notice. {depth} stands for the number of layers,
    * for anything. optional_prefix: a prefix of tensor names that older files leave out.
    priority: if several families match a design exactly, the one with the lowest number is taken.
    documents: text files that an export writes beside the weights, by name.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigReader], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    map_weights: Callable[[ModelConfig, WeightMap], None]
    ignored_tensors: tuple[str, ...] = ()
    optional_prefix: str = ""
    priority: int = 100
    documents: Mapping[str, str] = field(default_factory=dict)


@cache
def families() -> Mapping[str, Family]:
    """Every family by its model_type, in order of priority: one per file of `families/` that does not begin with _."""
    names = sorted(file.stem for file in FAMILIES_FOLDER.glob("*.py") if not file.stem.startswith("_"))
    result: list[Family] = [importlib.import_module(f"heddle.exchange.families.{name}").FAMILY for name in names]
    result.sort(key=lambda family: (family.priority, family.model_type))
    return {family.model_type: family for family in result}


def family_of(config: Mapping[str, Any], source: str) -> Family:
    """The family that a config.json names, in the oldest files by its class alone.

    Raises ConfigError for a model_type that heddle does not read, and for quantized weights.
    """
    model_type = config.get("model_type")
    if "model_type" not in config:
        classes = {(family.architecture,): name for name, family in families().items()}
        architectures = config.get("architectures")
        model_type = classes.get(tuple(architectures)) if isinstance(architectures, list) else None
    if not isinstance(model_type, str) or model_type not in families():
        if isinstance(model_type, str) and (missing := MISSING_PARTS.get(model_type)):
            raise ConfigError(
                f"{source}: model_type {model_type!r} is not read; it needs {missing}, which heddle lacks"
            )
        near = get_close_matches(model_type[:40], families(), n=1) if isinstance(model_type, str) else []
        question = f"did you mean {near[0]!r}? " if near else ""
        code = "; the code that 'auto_map' names is never run" if config.get("auto_map") else ""
        raise ConfigError(
            f"{source}: model_type {short_repr(model_type)} is not read; {question}"
            f"heddle reads the {len(families())} families of docs/huggingface/families.md{code}"
        )
    for field_name in ("quantization_config", "quantization"):  # transformers, MLX
        quantization = config.get(field_name)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ConfigError(
                f"{source}: field '{field_name}' says the weights are quantized ({short_repr(method)});"
                " ask for them dequantized, or import the unquantized model"
            )
    return families()[model_type]
