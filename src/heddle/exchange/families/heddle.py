"""heddle's own architecture, for designs that no other family has: the design itself stands in the config."""

from typing import Any

from heddle.config import decode
from heddle.exchange import views
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig
from heddle.model.load_config import DEFAULTS

PREFIX = "model.decoder."
# Sizes under the names that other programs look for.
TOLD = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings",
)  # fmt: skip


def read(fields: Fields) -> dict[str, Any]:
    """The design, as it was written; what is told beside it may not say otherwise."""
    design: dict[str, Any] = fields.need("design", dict)
    told = write(decode(ModelConfig, DEFAULTS | design).resolved())
    for name in TOLD:
        fields.expect(name, told[name], default=told[name])
    return design


def write(design: ModelConfig) -> dict[str, Any]:
    """The design, and its sizes."""
    mixer = views.attention(design)
    sizes = (
        design.vocab_size, design.width, design.depth, mixer.heads, mixer.kv_heads, mixer.head_dim, design.head.tied
    )  # fmt: skip
    return {"design": design.dump(), **dict(zip(TOLD, sizes, strict=True))}


def rules(design: ModelConfig, to: Rules) -> None:
    """Our names, below the module that holds the decoder."""
    for name in to.shapes:
        to.tensor(PREFIX + name, name)


FAMILY = Family("heddle", "HeddleForCausalLM", read, write, rules, preferred=1000)
