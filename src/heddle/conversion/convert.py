"""Convert a model: apply rewrites one after the other, and write the result layer by layer."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.rewrite import Rewrite, UnchangedError, merged_repeats, naming_layers
from heddle.conversion.weights import CalibrationText, OneDtype, TensorSpec, Weights, build_model
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.load import LazyCheckpoint
from heddle.exchange.safetensors_folder import parse_json, read_text_file
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.progress import print_status, progress_bar
from heddle.storage.file_io import refuse_existing
from heddle.storage.folder import FolderContents, read_folder, tensors_sha256, write_folder
from heddle.storage.manifest import parse_json_object
from heddle.storage.model import (
    CONFIG_FILE,
    IMPORTED_FILE,
    WEIGHTS_FILE,
    find_model_folder,
    multiplied_names,
    read_config,
    read_imported_config,
)
from heddle.storage.run_log import CHECKPOINTS_FOLDER, first_difference, to_plain_json
from heddle.storage.tensor_file import DTYPES, LazyTensors
from heddle.tokenization.tokenizer import COMPANION_FILES, Tokenizer

# Models to convert: a run, a model folder or a folder of transformers, with parameters read one at a time.


@dataclass(frozen=True)
class ConversionSource:
    """A model to convert.

    folder: where it lies. tokenizer: None if it has none. documents: the text of the tokenizer's other files, by
    name. imported_config: the config.json fields that an export to its family writes back.
    """

    folder: Path
    weights: Weights
    hash_weights: Callable[[], str]
    tokenizer: Tokenizer | None
    documents: dict[str, str] = field(default_factory=dict)
    imported_config: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str | None:
        """The family (`model_type`) that the model was imported from."""
        return self.imported_config.get("model_type")

    @cached_property
    def weights_sha256(self) -> str:
        """A hash of all weights; the bytes of a folder of transformers are read for it."""
        return self.hash_weights()

    def check_tokenizers(self, rewrite: Rewrite) -> None:
        """Raises ConfigError if another model that a rewrite reads has a different tokenizer."""
        own = self.tokenizer
        for folder in rewrite.other_models:
            other = open_source(folder).tokenizer
            if own is not None and other is not None and own.hash != other.hash:
                raise ConfigError(
                    f"{folder}: has a different tokenizer from {self.folder}; choose models with one tokenizer"
                )

    @property
    def config(self) -> ModelConfig:
        """Its design, as a `TeacherSource` needs it."""
        return self.weights.design

    def build_model(self, config: ModelConfig, device: str) -> Decoder:
        """Build the model in float32. config: must be this source's design."""
        assert config == self.config
        return build_model(self.weights).float().to(device)


class FolderWeights(Weights):
    """The parameters in a heddle model folder."""

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


class TransformersWeights(LazyCheckpoint, Weights):
    """The parameters in a transformers folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.design = self.design.resolved()


def open_source(folder: Path) -> ConversionSource:
    """Open a model. Only headers and small files are read. Raises CheckpointError and ConfigError."""
    if is_transformers_folder(folder):
        weights = TransformersWeights(folder)
        tokenizer, documents = weights.read_tokenizer()
        in_one = _in_one_dtype(weights, folder)
        return ConversionSource(folder, in_one, weights.weights_sha256, tokenizer, documents, weights.imported_config)
    contents = read_folder(find_model_folder(folder))
    documents = {name: text for name, text in contents.documents.items() if name in COMPANION_FILES}
    return ConversionSource(
        folder,
        _in_one_dtype(FolderWeights(contents), folder),
        lambda: tensors_sha256(contents, WEIGHTS_FILE),
        Tokenizer.from_files(contents.documents),
        documents,
        read_imported_config(contents),
    )


def _in_one_dtype(weights: Weights, folder: Path) -> Weights:
    """The weights in the widest dtype of the matrices, if they differ: a mixed model cannot be run."""
    names = multiplied_names(build(weights.design, device="meta"))
    kinds = sorted({weights.specs[name][0] for name in names if name in weights.specs}, key=str)
    if len(kinds) < 2:
        return weights
    dtype = reduce(torch.promote_types, kinds)
    print_status(f"{folder}: holds matrices of {' and '.join(map(str, kinds))}; all are read in {dtype}")
    return OneDtype(weights, dtype)


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder has a config.json of transformers. Raises CheckpointError if it is damaged."""
    if (folder / CHECKPOINTS_FOLDER).is_dir() or not (folder / CONFIG_FILE).is_file():
        return False
    return "model_type" in parse_json(read_text_file(folder / CONFIG_FILE), folder / CONFIG_FILE)


def _applied(rewrite: Rewrite, weights: Weights, text: CalibrationText | None) -> Weights:
    try:
        return rewrite.apply(weights, text)
    except UnchangedError as error:
        raise DesignError(rewrite.name, error.reason) from None


CONVERSION_FILE = "conversion.json"


@dataclass(frozen=True)
class Conversion:
    """A model and the rewrites to apply to it. text: for rewrites with `needs_text`."""

    source: ConversionSource
    rewrites: tuple[Rewrite, ...]
    text: CalibrationText | None = None

    def plan(self) -> Weights:
        """The converted design and its weights, each converted when it is looked up. Raises ConfigError."""
        if not self.rewrites:
            raise ConfigError("to: is empty; give a target such as kv_heads=2")
        weights = self.source.weights
        for rewrite in self.rewrites:
            with naming_layers(weights.design):
                rewrite.check_layers(weights.design)
            if rewrite.needs_text and self.text is None and not rewrite.is_exact(weights.design):
                raise ConfigError(f"{rewrite.name}: needs a text to calibrate on; give one")
            self.source.check_tokenizers(rewrite)
            with naming_layers(weights.design):
                weights = _applied(rewrite, weights, self.text)
        self._check_tokens(weights)
        return weights

    def _check_tokens(self, weights: Weights) -> None:
        """Raises ConfigError if a token of the tokenizer would have no embedding."""
        tokenizer, ids = self.source.tokenizer, weights.design.vocab_size
        if tokenizer is not None and ids is not None and ids < tokenizer.vocab_size:
            tokens = tokenizer.vocab_size
            raise ConfigError(f"vocab_size: {ids} is less than the tokenizer's {tokens} tokens; keep at least {tokens}")

    @cached_property
    def _described(self) -> list[dict[str, Any]]:
        """Each rewrite with the hashes of the other models that it reads. Cached, since hashing reads all bytes."""
        hashes = [[open_source(folder).weights_sha256 for folder in each.other_models] for each in self.rewrites]
        return [
            rewrite.describe() | ({"models_sha256": models} if models else {})
            for rewrite, models in zip(self.rewrites, hashes, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """Plain data that identify the conversion: rewrites, source and text."""
        text = self.text
        return {
            "source": {"name": self.source.folder.resolve().name, "weights_sha256": self.source.weights_sha256},
            "rewrites": [dict(rewrite) for rewrite in self._described],
            "text": None
            if text is None
            else {"name": text.name, "sha256": text.sha256, "samples": text.samples, "tokens": text.tokens}
            | text.rows.record(),
        }


def conversion_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference of two conversions (`Conversion.describe`), named by the option that sets it, or None."""
    text, other = before.get("text"), now.get("text")
    if text and other and text["tokens"] != other["tokens"]:
        return first_difference(text["tokens"], other["tokens"], "--calibration-tokens")
    difference = first_difference(dict(before), dict(now))
    options = {"source": "MODEL", "rewrites": "--to", "text.samples": "--sequence-length", "text": "--data"}
    option = next((option for path, option in options.items() if difference and difference.startswith(path)), None)
    return difference if option is None else f"{option} ({difference})"


class _ConvertedTensors(LazyTensors):
    """The tensors of a converted model, each made when it is written, with a progress bar."""

    def __init__(self, weights: Weights, advance: Any) -> None:
        self.weights, self.advance = weights, advance

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """As in `Weights`."""
        return self.weights.specs

    def __getitem__(self, name: str) -> Tensor:
        """Make one tensor."""
        tensor = self.weights.tensor(name)
        self.advance(tensor.numel() * tensor.element_size())
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self.weights.specs)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.weights.specs)


def saved_conversion(folder: Path) -> dict[str, Any]:
    """The `Conversion.describe` saved in a model folder, and how it was healed; {} if it was not converted."""
    return parse_json_object(read_folder(folder).documents.get(CONVERSION_FILE, "{}").encode())


def holds_conversion(folder: Path, conversion: Conversion, named: Path | None = None) -> bool:
    """Whether there is a folder, with this conversion. Raises CheckpointError, of the folder `named`, for another."""
    if not folder.is_dir():
        return False
    saved = saved_conversion(folder)
    saved.pop("healing", None)
    if difference := conversion_difference(saved, to_plain_json(conversion.describe())):
        remedy = "give its options again, remove it, or choose another name"
        raise CheckpointError(f"{named or folder}: holds another conversion: {difference}; {remedy}")
    return True


def convert(conversion: Conversion, out: Path) -> Weights:
    """Write the converted model as a model folder, atomically; the source is not changed.

    Memory: the weights of one layer of the source and of the converted model, and the text's activations. Raises
    ConfigError for a conversion that is not possible, CheckpointError if `out` exists, MachineError for a full disk.
    """
    refuse_existing(out, "the converted model")
    weights = conversion.plan()
    source = conversion.source
    documents = dict(source.documents) | ({} if source.tokenizer is None else source.tokenizer.to_files())
    documents[CONFIG_FILE] = _json(merged_repeats(weights.design).dump())
    documents[CONVERSION_FILE] = _json(conversion.describe())
    if source.imported_config:
        documents[IMPORTED_FILE] = _json(source.imported_config)
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in weights.specs.values())
    with progress_bar("converting", total, "bytes") as bar:
        tensors = _ConvertedTensors(weights, bar.advance)
        write_folder(out, tensors={WEIGHTS_FILE: tensors}, documents=documents, kind="model")
    return weights


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
