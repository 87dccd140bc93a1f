"""A model as a folder: `config.json`, `model.safetensors` and, with a tokenizer, `tokenizer.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heddle.errors import CheckpointError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build, held_in
from heddle.model.load_config import load_config
from heddle.model.lora import merge_lora
from heddle.progress import say
from heddle.storage.checkpoints import FOLDER, latest
from heddle.storage.folder import Contents, read_folder, write_folder
from heddle.tokenization.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    documents: Mapping[str, str] | None = None,
) -> None:
    """Write a model so that the folder is at every instance whole; `documents`, texts by file name, go with it.

    Adapters (LoRA) are merged. Raises CheckpointError or MachineError.
    """
    tensors, texts = {WEIGHTS: model_tensors(model)}, dict(documents or {}) | model_documents(model, tokenizer)
    write_folder(Path(folder), tensors=tensors, documents=texts, kind="model")


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer | None]:
    """Read a model folder, or the newest checkpoint of a run, verified to the byte.

    dtype None keeps that of the file. Raises CheckpointError naming the file and tensor that is wrong.
    """
    contents = read_folder(find(Path(folder)))
    model = restore(contents, dtype, device)
    return model.eval(), Tokenizer.from_documents(contents.documents)


def find(folder: Path) -> Path:
    """The folder itself if it holds a model, else the newest whole checkpoint of the run it is."""
    if (folder / FOLDER).is_dir() and not (folder / CONFIG).is_file():
        newest = latest(folder)
        lost = newest.path is None and newest.damaged
        for damage in newest.damaged[1:] if lost else newest.damaged:
            say(f"warning: {damage}")
        if lost:  # the newest is the one that was meant
            raise CheckpointError(newest.damaged[0])
        if newest.path is None:
            raise CheckpointError(f"{folder}: holds no checkpoint yet; let the training save one")
        return newest.path
    return folder


def model_tensors(model: Decoder) -> dict[str, Tensor]:
    """The parameters by name; a tied head is written once, as the embedding, and adapters are merged."""
    return {name: parameter.detach() for name, parameter in merge_lora(model).named_parameters()}


def model_documents(model: Decoder, tokenizer: Tokenizer | None) -> dict[str, str]:
    """The texts that belong to a model."""
    documents = {CONFIG: json.dumps(model.config.dump(), indent=2) + "\n"}
    return documents if tokenizer is None else documents | tokenizer.documents()


def read_design(contents: Contents) -> dict[str, Any]:
    """The design in a folder, as plain data."""
    try:
        data = json.loads(contents.documents[CONFIG])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{contents.folder}/{CONFIG}: is missing or no JSON; this is no model folder") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{contents.folder}/{CONFIG}: holds no design")
    return data


def restore(
    contents: Contents, dtype: torch.dtype | None, device: torch.device | str, config: ModelConfig | None = None
) -> Decoder:
    """Build the design of a folder, or another one of the same parameters, with its weights."""
    model = build(load_config(read_design(contents)) if config is None else config, device="meta")
    held = contents.tensors(WEIGHTS, device)
    expected = dict(model.named_parameters())
    place = f"{contents.folder}/{WEIGHTS}"
    for name in expected.keys() | held.keys():
        if name not in held or name not in expected:
            fault = "is missing" if name in expected else "belongs to no part of the design"
            raise CheckpointError(f"{place}: tensor '{name}' {fault}; the folder's config and weights do not fit")
        if held[name].shape != expected[name].shape:
            shapes = f"has shape {list(held[name].shape)}, the design needs {list(expected[name].shape)}"
            raise CheckpointError(f"{place}: tensor '{name}' {shapes}; the folder's config and weights do not fit")
    for name, parameter in expected.items():
        owner, _, last = name.rpartition(".")
        tensor = held.pop(name)
        tensor = tensor.to(tensor.dtype if dtype is None else held_in(parameter, dtype))
        setattr(model.get_submodule(owner), last, nn.Parameter(tensor, parameter.requires_grad))
    model.tie()
    return model
