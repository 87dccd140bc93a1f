"""Save LoRA adapters (Hu et al. 2021) as a folder and load them again.

`adapter.safetensors` holds A and B of each projection. `adapter.json` holds rank, alpha, the paths of the projections,
the design's fingerprint and the SHA-256 of the base weights.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError, HeddleError
from heddle.model.decoder import Decoder
from heddle.model.lora import LoraLinear, adapters, add_lora, lora_tensors
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.manifest import parse_json_object

FOLDER_KIND = "adapter"
METADATA_FILE = "adapter.json"
TENSORS_FILE = "adapter.safetensors"


def save_lora(model: Decoder, folder: str | Path) -> None:
    """Write only the adapters of a model to a folder, whole or not at all.

    Raises ConfigError if the model has no adapters, CheckpointError or MachineError if the folder cannot be written.
    """
    adapters_by_path = adapters(model)
    if not adapters_by_path:
        raise ConfigError("lora: the model has no adapters to save; add some, or save the model")
    first_adapter = next(iter(adapters_by_path.values()))
    metadata = {
        "alpha": first_adapter.alpha,
        "base_weights_sha256": base_weights_sha256(model),
        "design": model.fingerprint,
        "rank": first_adapter.rank,
        "target_modules": list(adapters_by_path),
    }
    tensors, documents = {TENSORS_FILE: lora_tensors(model)}, {METADATA_FILE: json.dumps(metadata, indent=1) + "\n"}
    write_folder(Path(folder), tensors=tensors, documents=documents, kind=FOLDER_KIND)


class LoraFolder(NamedTuple):
    """The contents of a folder of adapters, not yet compared with a model.

    design: the fingerprint of the model's. tensors: A and B by name, `layers.0.mixer.q.a`.
    """

    folder: Path
    design: str
    base_weights_sha256: str
    paths: Sequence[str]
    rank: int
    alpha: float
    tensors: dict[str, Tensor]

    def check_base(self, weights_sha256: str) -> None:
        """Raises CheckpointError if the adapters belong to other weights."""
        if self.base_weights_sha256 != weights_sha256:
            raise CheckpointError(
                f"{self.folder}: were trained on other weights of this design, or on these in another dtype; load those"
            )

    def check_tensors(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raises CheckpointError unless A and B have these names and shapes."""
        for name in shapes.keys() | self.tensors.keys():
            if name not in shapes or name not in self.tensors or list(shapes[name]) != list(self.tensors[name].shape):
                path = self.folder / TENSORS_FILE
                raise CheckpointError(f"{path}: tensor '{name}' does not fit {METADATA_FILE}; save them again")


def read_lora(folder: str | Path, device: torch.device | str = "cpu") -> LoraFolder:
    """Read a folder of adapters. Raises CheckpointError if it is damaged."""
    contents = read_folder(Path(folder), FOLDER_KIND)
    metadata_path = contents.folder / METADATA_FILE
    keys = ("design", "base_weights_sha256", "target_modules", "rank", "alpha")
    try:
        metadata = parse_json_object(contents.documents.get(METADATA_FILE, "").encode())
        design, base_sha256, paths, rank, alpha = (metadata[key] for key in keys)
        if type(rank) is not int or type(alpha) is not float or not all(isinstance(path, str) for path in paths):
            raise ValueError("rank, alpha or target_modules have the wrong type")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{metadata_path}: does not describe adapters ({error}); save them again") from error
    tensors = contents.tensors(TENSORS_FILE, torch.device(device))
    return LoraFolder(contents.folder, design, base_sha256, paths, rank, alpha, tensors)


def load_lora(model: Decoder, folder: str | Path) -> Decoder:
    """Return a model with the saved adapters, bit for bit. It shares the base weights of the given model.

    Raises CheckpointError if the adapters are damaged, or belong to another design, other base weights, or the same
    base weights in another dtype.
    """
    saved = read_lora(folder, model.embed.weight.device)
    if saved.design != model.fingerprint:
        raise CheckpointError(f"{folder}: are adapters of another design; load the model that they were trained on")
    saved.check_base(base_weights_sha256(model))
    adapted_model = with_lora_folder(model, saved)
    for name, parameter in lora_tensors(adapted_model).items():
        parameter.copy_(saved.tensors[name])
    return adapted_model


def with_lora_folder(model: Decoder, lora_folder: LoraFolder) -> Decoder:
    """Return a model with new adapters of the saved ones' shapes. Raises CheckpointError if these do not fit it."""
    try:
        adapted_model = add_lora(model, lora_folder.paths, lora_folder.rank, lora_folder.alpha)
    except HeddleError as error:
        metadata_path = lora_folder.folder / METADATA_FILE
        raise CheckpointError(f"{metadata_path}: does not fit the model ({error}); save the adapters again") from error
    lora_folder.check_tensors({name: parameter.shape for name, parameter in lora_tensors(adapted_model).items()})
    return adapted_model


def base_weights_sha256(model: Decoder) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of a model's weights, without those of adapters."""
    return digest_tensors(sorted(_base_parameters(model).items()))


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, which must come in alphabetical order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _base_parameters(model: Decoder) -> dict[str, Tensor]:
    """Return a model's parameters, without adapters, under the names of the plain model."""
    parameters: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, LoraLinear):
                parameters[f"{path}.{name}"] = parameter
            elif name not in module.matrix_parameters:
                parameters[f"{path}.{'weight' if name == 'frozen' else name}"] = parameter
    if model.config.head.tied:
        del parameters["head.weight"]
    return parameters
