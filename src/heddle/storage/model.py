"""Save and load a model folder: `config.json`, `model.safetensors` and, with a tokenizer, `tokenizer.json`.

A model that was imported also has `imported.json`: the fields that an export to its family writes again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heddle.distributed.exchange import call_on_all
from heddle.distributed.ranks import ONE_PROCESS, Ranks, as_sharded, held_rows, local_part, whole
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
from heddle.storage.rank_folder import write_rank_folder
from heddle.tokenization.tokenizer import Tokenizer

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
IMPORTED_FILE = "imported.json"


def save(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    documents: Mapping[str, str] | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> None:
    """Write a model folder, whole or not at all. LoRA adapters are merged.

    documents: more text files to write, by name. ranks: all of them write a sharded model together; no rank needs
    memory for all of it. Raises CheckpointError or MachineError.
    """
    tensors, texts = {WEIGHTS_FILE: model_tensors(model)}, dict(documents or {}) | model_documents(model, tokenizer)
    if ranks.count == 1:
        write_folder(Path(folder), tensors=tensors, documents=texts, kind="model")
    else:
        write_rank_folder(Path(folder), tensors=tensors, documents=texts, kind="model", ranks=ranks)


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer | None]:
    """Read a model folder, or the newest checkpoint of a run, and verify every byte.

    dtype: None keeps the dtype of the file. Raises CheckpointError that names the file and tensor that is wrong.
    """
    contents = read_folder(find_model_folder(Path(folder)))
    model = restore_model(contents, dtype, device)
    return model.eval(), Tokenizer.from_files(contents.documents)


def find_model_folder(folder: Path, ranks: Ranks = ONE_PROCESS) -> Path:
    """Return the folder itself if it holds a model, else the newest intact checkpoint of the run in it.

    ranks: they look for it together, and each verifies a share.
    """
    if describe_path(folder) not in ("is a folder", "does not exist"):
        raise CheckpointError(f"{folder}: {no_folder_reason(folder)}; name a folder that heddle saved")
    if (folder / CHECKPOINTS_FOLDER).is_dir() and not (folder / CONFIG_FILE).is_file():
        newest = latest_checkpoint(folder, ranks=ranks)
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
    """Return the parameters by name. A tied head appears once, as the embedding; adapters are merged.

    Sharded parameters stay sharded, except that sharded adapters are gathered, on all ranks at once.
    """
    return {name: parameter.detach() for name, parameter in merge_lora(model, whole).named_parameters()}


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


def load_shards(
    model: Decoder,
    source: str | Path | FolderContents,
    device: torch.device | str = "cpu",
    ranks: Ranks = ONE_PROCESS,
) -> None:
    """Allocate a model that was sharded on the meta device, and read the rows that this rank holds.

    source: a model folder, or a run, written by any number of ranks. Values are converted to the dtypes that the model
    was built in. Raises CheckpointError, on all ranks, for a tensor that is damaged or does not fit.
    """
    folder = source.folder if isinstance(source, FolderContents) else find_model_folder(Path(source), ranks)
    own_rows = HeldRows(dict(model.named_parameters()))
    rows: dict[str, Tensor] = {}

    def read() -> str:
        contents = source if isinstance(source, FolderContents) else read_folder(folder)
        rows.update(own_rows.read(contents, WEIGHTS_FILE))
        model.imported_config = read_imported_config(contents)
        return ""

    call_on_all(ranks, read)
    model.to_empty(device=torch.device(device))
    model.tie()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local_part(parameter).copy_(rows.pop(name))


class HeldRows:
    """The rows that this rank holds of tensors. They are asked for once, since only the main thread knows its rank.

    tensors: by name. rows: by name; None for a tensor that is not sharded.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.rows: dict[str, range | None] = dict.fromkeys(tensors)
        for name, tensor in tensors.items():
            if as_sharded(tensor) is not None:
                self.rows[name] = range(tensor.shape[0])[held_rows(tensor)]

    def read(self, contents: FolderContents, set_name: str) -> dict[str, Tensor]:
        """Read these rows of a set of these tensors. Raises CheckpointError, naming a tensor that does not fit."""
        shapes = {name: record.whole_shape for name, record in contents.tensor_records(set_name).items()}
        _check_fits(f"{contents.folder}/{set_name}", shapes, self.tensors)
        return contents.read_slices(set_name, self.rows)


def _check_fits(path: str, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError that names a tensor that does not fit the design."""
    for name in sorted(shapes.keys() | parameters.keys()):
        if name not in shapes or name not in parameters:
            fault = "is missing" if name in parameters else "belongs to no part of the design"
            raise CheckpointError(f"{path}: tensor '{name}' {fault}; the folder's config and weights do not fit")
        if shapes[name] != parameters[name].shape:
            difference = f"has shape {list(shapes[name])}, the design needs {list(parameters[name].shape)}"
            raise CheckpointError(f"{path}: tensor '{name}' {difference}; the folder's config and weights do not fit")


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
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    _check_fits(f"{contents.folder}/{WEIGHTS_FILE}", shapes, expected)
    for name, parameter in expected.items():
        module_path, _, parameter_name = name.rpartition(".")
        tensor = tensors.pop(name)
        tensor = tensor.to(tensor.dtype if dtype is None else storage_dtype(parameter, dtype))
        setattr(model.get_submodule(module_path), parameter_name, nn.Parameter(tensor, parameter.requires_grad))
    model.tie()
    model.imported_config = read_imported_config(contents)
    return model
