"""What an import brings along, kept beside a model in its checkpoint until an export writes it again."""

import json
from pathlib import Path

import torch

from heddle.errors import CheckpointError
from heddle.exchange.imported import Imported
from heddle.storage.folder import read_folder
from heddle.storage.model import find, load, save
from heddle.tokenization.tokenizer import BESIDE

CARRIED = "imported.json"


def save_imported(given: Imported, folder: Path) -> None:
    """Write a model folder of ours. Raises as `heddle.save`."""
    documents = given.documents | {CARRIED: json.dumps(given.carried, indent=2) + "\n"}
    save(given.model, folder, given.tokenizer, documents)


def open_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> Imported:
    """A model folder, or the newest checkpoint of a run, and what an import left beside it. Raises as `heddle.load`."""
    place = find(folder)
    model, tokenizer = load(place, dtype)
    documents = dict(read_folder(place).documents)
    carried = documents.pop(CARRIED, "{}")
    try:
        fields = json.loads(carried)
    except ValueError as error:
        raise CheckpointError(f"{place}/{CARRIED}: is no JSON ({error}); import the model again") from None
    along = {name: text for name, text in documents.items() if name in BESIDE}
    return Imported(model, tokenizer, fields, along)
