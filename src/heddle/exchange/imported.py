"""What an import gives, and an export may be told of: a model, its tokenizer, and what belongs to neither."""

from dataclasses import dataclass, field
from typing import Any

from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class Imported:
    """A model and what came with it: `carried` fields and documents that an export writes again."""

    model: Decoder
    tokenizer: Tokenizer | None
    carried: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)
