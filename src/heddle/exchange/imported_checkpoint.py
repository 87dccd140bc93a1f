"""Data that an import stores in a heddle checkpoint, for an export to Hugging Face."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from heddle.exchange.safetensors_folder import parse_json, read_text_file
from heddle.model.decoder import Decoder
from heddle.storage.folder import read_folder
from heddle.storage.model import IMPORTED_FILE, find_model_folder, restore_model, trained_length
from heddle.storage.run_log import CHECKPOINTS_FOLDER
from heddle.tokenization.tokenizer import COMPANION_FILES, Tokenizer

LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
)  # names of the length that a model was trained for

# An imported model together with the parts of its folder that heddle does not use but an export writes again.


@dataclass(frozen=True)
class ImportedModel:
    """text_files: the tokenizer's files that an export writes back."""

    model: Decoder
    tokenizer: Tokenizer | None
    text_files: dict[str, str] = field(default_factory=dict)

    @property
    def preserved_config(self) -> dict[str, Any]:
        """The fields of config.json that an export writes back. They belong to the model."""
        return self.model.imported_config


def imported_family(folder: str | Path) -> str | None:
    """The family (`model_type`) that the model in a folder was imported from, None if it was not, or if there is none.

    Only the one file is read, and it is not verified. Raises CheckpointError if it is not JSON.
    """
    family = _imported_fields(folder).get("model_type")
    return family if isinstance(family, str) else None


def context_length(folder: str | Path) -> int | None:
    """The tokens that the model in a folder was made for: as its import says, else of a sequence in its training.

    None if neither is known. Raises as `imported_family`.
    """
    fields = _imported_fields(folder)
    length = next((fields[name] for name in LENGTH_FIELDS if isinstance(fields.get(name), int)), None)
    return trained_length(Path(folder)) if length is None else length


def _imported_fields(folder: str | Path) -> dict[str, Any]:
    """What an import left in a folder, or in the newest checkpoint of a run that has it; {} without it."""
    checkpoints = sorted(Path(folder, CHECKPOINTS_FOLDER).glob("step-*"))
    for file in (Path(folder, IMPORTED_FILE), *(path / IMPORTED_FILE for path in reversed(checkpoints))):
        if file.is_file():
            return parse_json(read_text_file(file), file)
    return {}


def open_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> ImportedModel:
    """Open a checkpoint, or the newest one of a run, with the data that an import stored in it.

    Raises as `heddle.load`.
    """
    contents = read_folder(find_model_folder(folder))
    tokenizer_files = {name: text for name, text in contents.documents.items() if name in COMPANION_FILES}
    model = restore_model(contents, dtype, "cpu").eval()
    return ImportedModel(model, Tokenizer.from_files(contents.documents), tokenizer_files)
