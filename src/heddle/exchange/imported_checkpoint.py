"""Save an imported model as a heddle checkpoint, with what an export to Hugging Face needs, and open it again."""

import json
from pathlib import Path

import torch

from heddle.errors import CheckpointError
from heddle.exchange.imported_model import ImportedModel
from heddle.storage.folder import read_folder
from heddle.storage.model import find_model_folder, load, save
from heddle.tokenization.tokenizer import COMPANION_FILES

IMPORTED_FILE = "imported.json"


def save_imported(imported: ImportedModel, folder: Path) -> None:
    """Write a heddle checkpoint, with the preserved config fields in `imported.json`. Raises as `heddle.save`."""
    text_files = imported.text_files | {IMPORTED_FILE: json.dumps(imported.preserved_config, indent=2) + "\n"}
    save(imported.model, folder, imported.tokenizer, text_files)


def open_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> ImportedModel:
    """Open a checkpoint, or the newest one of a run, with what an import left in it. Raises as `heddle.load`."""
    checkpoint = find_model_folder(folder)
    model, tokenizer = load(checkpoint, dtype)
    text_files = dict(read_folder(checkpoint).documents)
    imported_json = text_files.pop(IMPORTED_FILE, "{}")
    try:
        preserved_config = json.loads(imported_json)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}/{IMPORTED_FILE}: is not JSON ({error}); import the model again") from None
    tokenizer_files = {name: text for name, text in text_files.items() if name in COMPANION_FILES}
    return ImportedModel(model, tokenizer, preserved_config, tokenizer_files)
