"""Save and load a model folder: `config.json`, `model.safetensors` and, with a tokenizer, `tokenizer.json`.

A model that was imported also has `imported.json`: the fields that an export to its family writes again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heddle.errors import CheckpointError, describe_path, no_folder_reason
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import storage_dtype
from heddle.model.load_config import load_config
from heddle.model.lora import merge_lora
from heddle.progress import print_warning
from heddle.storage.checkpoints import CHECKPOINTS_FOLDER, latest_checkpoint
from heddle.storage.folder import FolderContents, read_folder, write_folder
from heddle.storage.manifest import parse_json_object
from heddle.tokenization.tokenizer import Tokenizer

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
IMPORTED_FILE = "imported.json"


def save(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    documents: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder, whole or not at all. LoRA adapters are merged.

    documents: more text files to write, by name. Raises CheckpointError or MachineError.
    """
    tensors, texts = {WEIGHTS_FILE: model_tensors(model)}, dict(documents or {}) | model_documents(model, tokenizer)
    write_folder(Path(folder), tensors=tensors, documents=texts, kind="model")


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer | None]:
    """Read a model folder, or the newest checkpoint of a run, and verify every byte.

    dtype: None keeps the dtype of the file. Raises CheckpointError that names the file and tensor that is wrong.
    """
    contents = read_folder(find_model_folder(Path(folder)))
    model = restore_model(contents, dtype, device)
    return model.eval(), Tokenizer.from_files(contents.documents)


def find_model_folder(folder: Path) -> Path:
    """Return the folder itself if it holds a model, else the newest intact checkpoint of the run in it."""
    if describe_path(folder) not in ("is a folder", "does not exist"):
        raise CheckpointError(f"{folder}: {no_folder_reason(folder)}; name a folder that heddle saved")
    if (folder / CHECKPOINTS_FOLDER).is_dir() and not (folder / CONFIG_FILE).is_file():
        newest = latest_checkpoint(folder)
        nothing_intact = newest.path is None and newest.damaged
        for damage in newest.damaged[1:] if nothing_intact else newest.damaged:
            print_warning(damage)
        if nothing_intact:  # the user meant the newest one
            raise CheckpointError(newest.damaged[0])
        if newest.path is None:
            raise CheckpointError(f"{folder}: holds no checkpoint yet; let the training save one")
        return newest.path
    return folder


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return the parameters by name. A tied head appears once, as the embedding; adapters are merged."""
    return {name: parameter.detach() for name, parameter in merge_lora(model).named_parameters()}


def model_documents(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the text files of a model folder by name: its config, its import's fields, and its tokenizer's files."""
    documents = {CONFIG_FILE: json.dumps(model.config.dump(), indent=2) + "\n"}
    if model.imported_config:
        documents[IMPORTED_FILE] = json.dumps(model.imported_config, indent=2) + "\n"
    return documents if tokenizer is None else documents | tokenizer.to_files()


def read_config(contents: FolderContents) -> dict[str, Any]:
    """Return the design in a folder, as plain data. Raises CheckpointError."""
    if CONFIG_FILE not in contents.documents:
        raise CheckpointError(f"{contents.folder}/{CONFIG_FILE}: is missing; this is no model folder")
    return _parse_document(contents, CONFIG_FILE)


def read_imported_config(contents: FolderContents) -> dict[str, Any]:
    """Return the fields that an import left in a folder; empty for other models. Raises CheckpointError."""
    return _parse_document(contents, IMPORTED_FILE) if IMPORTED_FILE in contents.documents else {}


def _parse_document(contents: FolderContents, name: str) -> dict[str, Any]:
    try:
        return parse_json_object(contents.documents[name].encode())
    except ValueError as error:
        raise CheckpointError(
            f"{contents.folder}/{name}: is no table in JSON ({error}); save the model again"
        ) from error


def restore_model(
    contents: FolderContents, dtype: torch.dtype | None, device: torch.device | str, config: ModelConfig | None = None
) -> Decoder:
    """Build a model with the weights of a folder.

    config: a design with the same parameters, instead of the folder's own. Raises CheckpointError that names a
    tensor that does not fit.
    """
    model = build(load_config(read_config(contents)) if config is None else config, device="meta")
    tensors = contents.tensors(WEIGHTS_FILE, device)
    expected = dict(model.named_parameters())
    path = f"{contents.folder}/{WEIGHTS_FILE}"
    for name in expected.keys() | tensors.keys():
        if name not in tensors or name not in expected:
            fault = "is missing" if name in expected else "belongs to no part of the design"
            raise CheckpointError(f"{path}: tensor '{name}' {fault}; the folder's config and weights do not fit")
        if tensors[name].shape != expected[name].shape:
            shapes = f"has shape {list(tensors[name].shape)}, the design needs {list(expected[name].shape)}"
            raise CheckpointError(f"{path}: tensor '{name}' {shapes}; the folder's config and weights do not fit")
    for name, parameter in expected.items():
        module_path, _, parameter_name = name.rpartition(".")
        tensor = tensors.pop(name)
        tensor = tensor.to(tensor.dtype if dtype is None else storage_dtype(parameter, dtype))
        setattr(model.get_submodule(module_path), parameter_name, nn.Parameter(tensor, parameter.requires_grad))
    model.tie()
    model.imported_config = read_imported_config(contents)
    return model
