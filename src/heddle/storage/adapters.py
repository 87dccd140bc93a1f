"""Adapters (LoRA, Hu et al. 2021) as a folder: A and B of each projection, beside the fingerprint of what they change.

`adapter.json` says rank, alpha and projections, the design, and the SHA-256 of the weights below.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError, HeddleError
from heddle.model.decoder import Decoder
from heddle.model.lora import LoraLinear, adapters, add_lora, lora_tensors
from heddle.storage.folder import read_folder, write_folder
from heddle.storage.manifest import parse_object

KIND = "adapter"
FACTS = "adapter.json"
TENSORS = "adapter.safetensors"


def save_lora(model: Decoder, folder: str | Path) -> None:
    """Write a model's adapters, and nothing else of it, so that the folder is at every instance whole.

    Raises ConfigError where it has none, CheckpointError or MachineError where they cannot be written.
    """
    held = adapters(model)
    if not held:
        raise ConfigError("lora: the model has no adapters to save; add some, or save the model")
    one = next(iter(held.values()))
    facts = {
        "alpha": one.alpha,
        "base": fingerprint(model),
        "design": model.fingerprint,
        "projections": list(held),
        "rank": one.rank,
    }
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    write_folder(Path(folder), tensors={TENSORS: lora_tensors(model)}, documents={FACTS: text}, kind=KIND)


def load_lora(model: Decoder, folder: str | Path) -> Decoder:
    """A twin of a model with the adapters that were saved, bit for bit; it shares the model's weights.

    Raises CheckpointError where they are damaged, or were trained on another design, on other weights, or on these in
    another dtype.
    """
    contents = read_folder(Path(folder), KIND)
    place = contents.folder / FACTS
    try:
        facts = parse_object(contents.documents.get(FACTS, "").encode())
        design, base, paths, rank, alpha = (facts[key] for key in ("design", "base", "projections", "rank", "alpha"))
        if type(rank) is not int or type(alpha) is not float or not all(isinstance(path, str) for path in paths):
            raise ValueError("rank, alpha or projections are of the wrong kind")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{place}: does not tell what the adapters are ({error}); save them again") from error
    if design != model.fingerprint:
        raise CheckpointError(f"{folder}: are adapters of another design; load the model that they were trained on")
    if base != fingerprint(model):
        raise CheckpointError(
            f"{folder}: were trained on other weights of this design, or on these in another dtype; load those"
        )
    try:
        twin = add_lora(model, paths, rank, alpha)
    except HeddleError as error:
        raise CheckpointError(f"{place}: does not fit the model ({error}); save the adapters again") from error
    own, held = lora_tensors(twin), contents.tensors(TENSORS, model.embed.weight.device)
    for name in own.keys() | held.keys():
        if name not in own or name not in held or own[name].shape != held[name].shape:
            raise CheckpointError(f"{contents.folder / TENSORS}: tensor '{name}' does not fit {FACTS}; save them again")
        own[name].copy_(held[name])
    return twin


def fingerprint(model: Decoder) -> str:
    """One SHA-256 over names, dtypes, shapes and bytes of a model's weights, those of adapters left out."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_base(model).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _base(model: Decoder) -> dict[str, Tensor]:
    """The parameters of a model under the names that they have without adapters."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(module, LoraLinear):
                found[f"{path}.{name}"] = parameter
            elif name not in module.maps:
                found[f"{path}.{'weight' if name == 'frozen' else name}"] = parameter
    if model.config.head.tied:
        del found["head.weight"]
    return found
