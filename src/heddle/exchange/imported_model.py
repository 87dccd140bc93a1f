"""An imported model together with the parts of its folder that heddle does not use but an export writes again."""

from dataclasses import dataclass, field
from typing import Any

from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImportedModel:
    """text_files: the tokenizer's files that an export writes again."""

    model: Decoder
    tokenizer: Tokenizer | None
    text_files: dict[str, str] = field(default_factory=dict)

    @property
    def preserved_config(self) -> dict[str, Any]:
        """The fields of config.json that an export writes again. They belong to the model."""
        return self.model.imported_config
