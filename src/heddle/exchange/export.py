"""Write a model as a folder that transformers reads: as a family that matches the design exactly, or heddle's own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heddle.exchange.family import Family, WeightMap
from heddle.exchange.family_match import FamilyMatch, best_match, chosen_match, differences, exported_design
from heddle.exchange.imported_checkpoint import LENGTH_FIELDS, ImportedModel
from heddle.exchange.load import build_weight_map
from heddle.exchange.safetensors_folder import CONFIG_FILE, SINGLE_FILE, to_json
from heddle.exchange.tokenizer_files import write_tokenizer_files
from heddle.model.decoder import Decoder
from heddle.model.lora import merge_lora
from heddle.storage.folder import write_folder
from heddle.storage.tensor_file import MAX_SHARD_BYTES
from heddle.tokenization.tokenizer import Tokenizer

DESIGN_KEY = "heddle"
# Written as null, because transformers would fill in the family's default ids for absent fields.
NULL_TOKEN_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def export(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    imported: ImportedModel | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    family: str | None = None,
) -> FamilyMatch:
    """Write `folder` atomically. Returns the family that it was written as.

    family: the model_type to write; None: the imported one if it fits, else the first that fits, else heddle's own.

    What an import stored in the model (family, lengths, token ids) is written back where it still applies, as are the
    tokenizer files of `imported`. LoRA adapters are merged. Tensors are split into files of at most `max_shard_bytes`.
    Raises CheckpointError if the folder holds something else, ConfigError if the family does not fit, MachineError if
    the folder cannot be written.
    """
    preserved = dict((model if imported is None else imported.model).imported_config)
    model = merge_lora(model)
    imported_type = preserved.pop("model_type", None)
    match = best_match(model.config, imported_type) if family is None else chosen_match(model.config, family)
    if match.family.model_type != imported_type:
        preserved = {name: value for name, value in NULL_TOKEN_IDS.items() if name not in match.config} | preserved
    tensors = HFTensors(match.family, model)
    text_files, token_ids = write_tokenizer_files(tokenizer, imported)
    config = _full_config(match, model, _with_family_length(match, model, preserved) | token_ids)
    documents = text_files | dict(match.family.documents) | {CONFIG_FILE: to_json(config)}
    write_folder(
        Path(folder),
        tensors={SINGLE_FILE: tensors},
        documents=documents,
        kind="export",
        max_shard_bytes=max_shard_bytes,
    )
    return match


class HFTensors(Mapping[str, Tensor]):
    """The tensors of a model by their names in a family. Each is made when it is looked up."""

    def __init__(self, family: Family, model: Decoder) -> None:
        self.weight_map: WeightMap = build_weight_map(family, model)
        unmapped = self.weight_map.unmapped_parameters()
        assert not unmapped, f"{family.model_type}: no rule for {unmapped}"
        self.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.names = [*self.weight_map.rules, *self.weight_map.copies]

    def __getitem__(self, name: str) -> Tensor:
        """Make one tensor."""
        if name in self.weight_map.copies:
            return self.parameters[self.weight_map.copies[name]]
        rule = self.weight_map.rules[name]
        parameters = [
            self.parameters[ref] if isinstance(ref, str) else self.parameters[ref[0]][ref[1]] for ref in rule.parameters
        ]
        return rule.transform.join(parameters)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self.names)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.names)


def _with_family_length(match: FamilyMatch, model: Decoder, preserved: dict[str, Any]) -> dict[str, Any]:
    """The preserved fields, with the length under the family's name for it.

    The length is left out if it would change the design there (some kinds of RoPE scaling depend on it).
    """
    names = (*LENGTH_FIELDS, *match.config.keys() & {"model_max_length"})  # a tokenizer's, in other families
    fields = {name: value for name, value in preserved.items() if name not in names}
    length = next((preserved[name] for name in names if preserved.get(name) is not None), None)
    if length is None:
        return fields
    length_field = {next((name for name in names if name in match.config), names[0]): length}
    exported = exported_design(model.config, match.config | length_field, match.family)
    return fields if differences(model.config, exported) else fields | length_field


def _full_config(match: FamilyMatch, model: Decoder, preserved: dict[str, Any]) -> dict[str, Any]:
    """config.json. It also stores the design itself, so that a later import gets it back exactly."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    header = {"architectures": [match.architecture], "model_type": match.family.model_type}
    design = {"design": model.config.dump()}
    stored = design if "design" in match.config else {DESIGN_KEY: design}
    own = {name: value for name, value in preserved.items() if value is not None or name not in match.config}
    return dict(sorted((header | {"dtype": dtype, "torch_dtype": dtype} | match.config | own | stored).items()))
