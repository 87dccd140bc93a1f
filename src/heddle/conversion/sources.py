"""Models to convert: a run, a model folder or a folder of transformers, with parameters read one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from heddle.conversion.weights import TensorSpec, Weights
from heddle.exchange.lazy_checkpoint import LazyCheckpoint
from heddle.exchange.safetensors_folder import parse_json, read_text_file
from heddle.model.load_config import load_config
from heddle.storage.checkpoints import CHECKPOINTS_FOLDER
from heddle.storage.folder import FolderContents, read_folder, tensors_sha256
from heddle.storage.model import CONFIG_FILE, WEIGHTS_FILE, find_model_folder, read_config, read_imported_config
from heddle.storage.tensor_header import DTYPES
from heddle.tokenization.tokenizer import COMPANION_FILES, Tokenizer


@dataclass(frozen=True)
class ConversionSource:
    """A model to convert.

    folder: where it lies. tokenizer: None if it has none. documents: the texts of the other files of its tokenizer.
    imported_config: the fields that an export to its family writes again.
    """

    folder: Path
    weights: Weights
    hash_weights: Callable[[], str]
    tokenizer: Tokenizer | None
    documents: dict[str, str] = field(default_factory=dict)
    imported_config: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def weights_sha256(self) -> str:
        """A hash of all weights; the bytes of a folder of transformers are read for it."""
        return self.hash_weights()


class FolderWeights(Weights):
    """The parameters in a model folder of heddle."""

    def __init__(self, contents: FolderContents) -> None:
        self.design = load_config(read_config(contents)).resolved()
        self.contents = contents

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        records = self.contents.tensor_records(WEIGHTS_FILE)
        return {name: (DTYPES[record.dtype], tuple(record.shape)) for name, record in records.items()}

    def tensor(self, name: str) -> Tensor:
        """As in `Weights`. Raises CheckpointError if the file was altered."""
        return self.contents.tensor(WEIGHTS_FILE, name)


class TransformersWeights(Weights):
    """The parameters in a folder of transformers."""

    def __init__(self, checkpoint: LazyCheckpoint) -> None:
        self.design = checkpoint.design.resolved()
        self.checkpoint = checkpoint

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        return self.checkpoint.specs

    def tensor(self, name: str) -> Tensor:
        """As in `Weights`."""
        return self.checkpoint.tensor(name)


def open_source(folder: Path) -> ConversionSource:
    """Open a model. Only headers and small files are read. Raises CheckpointError and ConfigError."""
    if is_transformers_folder(folder):
        checkpoint = LazyCheckpoint(folder)
        tokenizer, documents = checkpoint.read_tokenizer()
        weights = TransformersWeights(checkpoint)
        return ConversionSource(
            folder, weights, checkpoint.weights_sha256, tokenizer, documents, checkpoint.imported_config
        )
    contents = read_folder(find_model_folder(folder))
    documents = {name: text for name, text in contents.documents.items() if name in COMPANION_FILES}
    return ConversionSource(
        folder,
        FolderWeights(contents),
        lambda: tensors_sha256(contents, WEIGHTS_FILE),
        Tokenizer.from_files(contents.documents),
        documents,
        read_imported_config(contents),
    )


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder's config.json is that of transformers."""
    if (folder / CHECKPOINTS_FOLDER).is_dir() or not (folder / CONFIG_FILE).is_file():
        return False
    return "model_type" in parse_json(read_text_file(folder / CONFIG_FILE), folder / CONFIG_FILE)
