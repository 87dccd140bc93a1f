"""A model -> a folder that transformers reads: as a family that fits the design exactly, or else as our own."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heddle.exchange.family import Family
from heddle.exchange.fit import Fit, best, differences, read
from heddle.exchange.imported import Imported
from heddle.exchange.load import rules_of
from heddle.exchange.rules import Rules
from heddle.exchange.shards import CONFIG, INDEX, SINGLE, to_json
from heddle.exchange.texts import write_texts
from heddle.model.decoder import Decoder
from heddle.model.lora import merge_lora
from heddle.storage.folder import write_folder
from heddle.tokenization.tokenizer import Tokenizer

SHARD = 5 * 10**9  # bytes of a file, as transformers cuts them
NOTE = "heddle"
UNTOLD = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # null, or the family's own would be taken
LENGTHS = ("max_position_embeddings", "n_positions")  # of the texts a model was trained for


def export(
    model: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    source: Imported | None = None,
    shard: int = SHARD,
) -> Fit:
    """Write `folder`, whole or not at all; returns the family it was written as.

    source: what an import brought along (its family, the lengths and tokens it named, its texts), written again where
    it still fits. Adapters (LoRA) are merged. Files of more than `shard` bytes are cut. Raises CheckpointError for a
    folder that holds something else, MachineError where it cannot be written.
    """
    carried = {} if source is None else dict(source.carried)
    model = merge_lora(model)
    kind = carried.pop("model_type", None)
    found = best(model.config, kind)
    if found.family.model_type != kind:
        carried = UNTOLD | carried
    tensors = Tensors(found.family, model)
    texts, told = write_texts(tokenizer, source)
    config = _config(found, model, _carried(found, model, carried) | told)
    files = _files(tensors, shard)
    documents = texts | {CONFIG: to_json(config)}
    if len(files) > 1:
        total = sum(tensors.bytes(name) for name in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": {n: f for f, names in files.items() for n in names}}
        documents[INDEX] = to_json(index)
    written = {file: tensors.only(names) for file, names in files.items()}
    write_folder(Path(folder), tensors=written, documents=documents, kind="export")
    return found


class Tensors(Mapping[str, Tensor]):
    """A family's tensors of a model, each made of ours when it is asked for."""

    def __init__(self, family: Family, model: Decoder) -> None:
        self.rules: Rules = rules_of(family, model)
        assert not self.rules.uncovered(), f"{family.model_type}: no rule for {self.rules.uncovered()}"
        self.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.names = list(self.rules.found)

    def only(self, names: list[str]) -> "Tensors":
        """Some of them."""
        chosen = object.__new__(Tensors)
        chosen.rules, chosen.parameters, chosen.names = self.rules, self.parameters, names
        return chosen

    def bytes(self, name: str) -> int:
        """Of one, without making it."""
        rule = self.rules.found[name]
        first = rule.ours[0] if isinstance(rule.ours[0], str) else rule.ours[0][0]
        return math.prod(self.rules.shape(rule)) * self.parameters[first].element_size()

    def __getitem__(self, name: str) -> Tensor:
        """One of theirs."""
        rule = self.rules.found[name]
        ours = [self.parameters[one] if isinstance(one, str) else self.parameters[one[0]][one[1]] for one in rule.ours]
        return rule.form.join(ours)

    def __iter__(self) -> Iterator[str]:
        """Their names."""
        return iter(self.names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.names)


def _carried(found: Fit, model: Decoder, carried: dict[str, Any]) -> dict[str, Any]:
    """What an import brought along; its length as the family calls it, unless there it would mean another design."""
    kept = {name: value for name, value in carried.items() if name not in LENGTHS}
    length = next((carried[name] for name in LENGTHS if carried.get(name) is not None), None)
    if length is None:
        return kept
    told = {next((name for name in LENGTHS if name in found.config), LENGTHS[0]): length}
    return kept | ({} if differences(model.config, read(found.config | told, found.family)) else told)


def _config(found: Fit, model: Decoder, carried: dict[str, Any]) -> dict[str, Any]:
    """config.json, with the design noted for the way back."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    head = {"architectures": [found.family.architecture], "model_type": found.family.model_type}
    own = {"design": model.config.dump()}
    note = own if "design" in found.config else {NOTE: own}
    return dict(sorted((head | {"dtype": dtype, "torch_dtype": dtype} | found.config | carried | note).items()))


def _files(tensors: Tensors, shard: int) -> dict[str, list[str]]:
    """File -> names, in order, each file of at most `shard` bytes (or of one tensor)."""
    cuts: list[list[str]] = [[]]
    size = 0
    for name in tensors:
        more = tensors.bytes(name)
        if cuts[-1] and size + more > shard:
            cuts.append([])
            size = 0
        cuts[-1].append(name)
        size += more
    if len(cuts) == 1:
        return {SINGLE: cuts[0]}
    return {f"model-{i:05d}-of-{len(cuts):05d}.safetensors": names for i, names in enumerate(cuts, start=1)}
