"""heddle's own architecture, for designs that no other family has: the design itself stands in the config."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

PREFIX = "model.decoder."


def read(fields: Fields) -> dict[str, Any]:
    """The design, as it was written; what stands beside it is told for other readers only."""
    design: dict[str, Any] = fields.need("design", dict)
    fields.unread -= set(_told())
    return design


def write(design: ModelConfig) -> dict[str, Any]:
    """The design, and its sizes under the names that other programs look for."""
    mixer = views.attention(design)
    return {
        "design": design.dump(),
        **_told(
            vocab_size=design.vocab_size,
            hidden_size=design.width,
            num_hidden_layers=design.depth,
            num_attention_heads=mixer.heads,
            num_key_value_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            tie_word_embeddings=design.head.tied,
        ),
    }


def _told(**values: Any) -> dict[str, Any]:
    names = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "tie_word_embeddings", "layer_types",
    )  # fmt: skip
    return values or dict.fromkeys(names)


def rules(design: ModelConfig, to: Rules) -> None:
    """Our names, below the module that holds the decoder."""
    for name in to.shapes:
        to.tensor(PREFIX + name, name)


FAMILY = Family("heddle", "HeddleForCausalLM", read, write, rules, preferred=1000)
