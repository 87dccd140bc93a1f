"""heddle's own architecture, for designs that no other family can express. The config holds the design itself.

transformers finds our classes by `auto_map`, which names a file of the folder that only imports them. Programs run that
file with `trust_remote_code`; heddle never does.
"""

from typing import Any

from heddle.config import parse_config
from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.model.load_config import DEFAULTS

PREFIX = "model.decoder."
CODE_FILE = "modeling_heddle.py"
CODE = '''"""The classes of this model. They are those of the installed heddle: this folder holds no other code."""

try:
    from heddle.exchange.transformers import HeddleConfig, HeddleForCausalLM, HeddleModel
    from heddle.exchange.transformers import HeddleForSequenceClassification, HeddleForTokenClassification
except ImportError as error:
    raise ImportError("this model needs heddle: pip install 'heddle-lm[hf]'") from error

__all__ = ["HeddleConfig", "HeddleForCausalLM", "HeddleModel"]
__all__ += ["HeddleForSequenceClassification", "HeddleForTokenClassification"]
'''
_CLASSES = {
    "AutoConfig": "HeddleConfig",
    "AutoModel": "HeddleModel",
    "AutoModelForCausalLM": "HeddleForCausalLM",
    "AutoModelForSequenceClassification": "HeddleForSequenceClassification",
    "AutoModelForTokenClassification": "HeddleForTokenClassification",
}
AUTO_MAP = {auto_class: f"{CODE_FILE.removesuffix('.py')}.{name}" for auto_class, name in _CLASSES.items()}
# Sizes that are also written at the top level, under the names that other programs look for.
SIZE_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings",
)  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The design as it was written. The sizes at the top level must agree with it."""
    design: dict[str, Any] = config.require("design", dict)
    config.optional("auto_map")  # ours, for other programs
    sizes = write_config(parse_config(ModelConfig, DEFAULTS | design).resolved())
    for name in SIZE_FIELDS:
        config.expect(name, sizes[name], default=sizes[name])
    return design


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The design, its sizes, and where other programs find our classes."""
    mixer = design_parts.first_attention(design)
    sizes = (
        design.vocab_size, design.width, design.depth, mixer.heads, mixer.kv_heads, mixer.head_dim, design.head.tied
    )  # fmt: skip
    return {"design": design.dump(), "auto_map": AUTO_MAP, **dict(zip(SIZE_FIELDS, sizes, strict=True))}


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Heddle's parameter names, below the module that holds the decoder."""
    for name in weights.shapes:
        weights.add_tensor(PREFIX + name, name)


FAMILY = Family(
    "heddle", "HeddleForCausalLM", read_config, write_config, map_weights, priority=1000, documents={CODE_FILE: CODE}
)
