"""An imported model together with the parts of its folder that heddle does not use but an export writes again."""

from dataclasses import dataclass, field
from typing import Any

from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """preserved_config: fields of config.json, and text_files: tokenizer files, that an export writes again."""

    model: Decoder
    tokenizer: Tokenizer | None
    preserved_config: dict[str, Any] = field(default_factory=dict)
    text_files: dict[str, str] = field(default_factory=dict)
