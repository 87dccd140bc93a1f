"""A foreign folder -> a model: its config read field by field, its tensors placed one at a time as they are read."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heddle.config import decode
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.family import Family, family_of
from heddle.exchange.fields import Fields
from heddle.exchange.fit import differences, read
from heddle.exchange.imported import Imported
from heddle.exchange.rules import Rule, Rules
from heddle.exchange.shards import CONFIG, Foreign
from heddle.exchange.texts import read_texts
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build, held_in
from heddle.progress import say

HEAD, HEADS = "head.weight", ("lm_head.weight", "embed_out.weight")
TABLES = ("*.rotary_emb.inv_freq",)  # of angles, which older files of any family keep


def load(folder: str | Path, dtype: torch.dtype | None = None) -> Imported:
    """Read a folder that transformers wrote, or one exported by us; dtype None keeps each tensor's own.

    Memory: the model's own and that of one tensor. Raises CheckpointError and ConfigError of one sentence, naming
    file, tensor or field, for whatever is missing, altered, unknown or not supported.
    """
    foreign = Foreign(Path(folder))
    place = str(foreign.folder / CONFIG)
    family = family_of(foreign.config, place)
    design = read_design(foreign.config, family, place)
    try:
        model = build(design, device="meta")
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 63 bits
        raise ConfigError(f"{place}: asks for tensors larger than any machine holds; restore the file") from error
    _Filling(model, family, foreign).run(dtype)
    tokenizer, documents = read_texts(foreign, model.embed.weight.shape[0])
    carried = Fields(foreign.config).carried() | {"model_type": family.model_type}
    return Imported(model.eval(), tokenizer, carried, documents)


def read_design(config: Mapping[str, Any], family: Family, place: str) -> ModelConfig:
    """The design of a config; that which an export of ours noted beside it, as long as both say the same."""
    design = read(dict(config), family, place)
    noted = config.get("heddle")
    if isinstance(noted, dict) and isinstance(noted.get("design"), dict):
        own = decode(ModelConfig, noted["design"])
        if not differences(own, design):
            return own
        say(f"warning: {place}: was changed after the export, so the design noted beside it is not taken")
    return design


def rules_of(family: Family, model: Decoder) -> Rules:
    """The rules between a model's parameters and a family's tensors."""
    to = Rules({name: parameter.shape for name, parameter in model.named_parameters()})
    family.rules(model.config, to)
    return to


class _Filling:
    """Places tensors as they come; at the end nothing may be missing."""

    def __init__(self, model: Decoder, family: Family, foreign: Foreign) -> None:
        self.model, self.family, self.foreign = model, family, foreign
        self.rules = rules_of(family, model)
        self.waiting = dict(self.rules.found)
        self.parameters = dict(model.named_parameters())
        self.made: dict[str, Tensor] = {}

    def run(self, dtype: torch.dtype | None) -> None:
        """Read every tensor. Raises CheckpointError naming one that is missing, too many, or of a wrong shape."""
        known = TABLES + self.family.left_out
        left_out: set[str] = set()
        beginnings = [one.format(depth=self.model.config.depth) for one in known]
        for file, name, tensor in self.foreign.tensors():
            place = f"{self.foreign.folder / file}: tensor '{name}'"
            rule = self.waiting.pop(name, None) or self.waiting.pop(self.family.prefix + name, None)
            if rule is None:
                begun = next((one for one in beginnings if fnmatchcase(name, one + "*")), None)
                if begun is not None:
                    left_out.add(begun)
                elif self.model.config.head.tied and name in HEADS:
                    self.made[HEAD] = tensor
                else:
                    raise CheckpointError(f"{place} belongs to no part of a {self.family.architecture} of this config")
                continue
            if not tensor.is_floating_point() or tensor.element_size() == 1:
                raise CheckpointError(f"{place} is of type {tensor.dtype}; heddle reads unquantised floating point")
            if tensor.shape != (shape := self.rules.shape(rule)):
                raise CheckpointError(f"{place} has shape {list(tensor.shape)}, the config needs {list(shape)}")
            if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
                say(f"warning: {place} holds values that are not finite; the model may write nothing sensible")
            self._place(rule, tensor if dtype is None else tensor.to(held_in(self._first(rule), dtype)))
        for name in self.waiting:
            raise CheckpointError(f"{self.foreign.folder}: tensor '{name}' is missing; download the weights again")
        self._check_head()
        for begun in sorted(left_out):
            say(f"left out: tensors {begun}…, which heddle does not build")
        for name, tensor in self.made.items():
            owner, _, last = name.rpartition(".")
            learned = self.parameters[name].requires_grad
            setattr(self.model.get_submodule(owner), last, nn.Parameter(tensor, learned))
        self.model.tie()

    def _check_head(self) -> None:
        """Raises ConfigError for a tied head that was written beside the embedding and is another."""
        head = self.made.pop(HEAD, None) if self.model.config.head.tied else None
        if head is not None and not torch.equal(head.to(self.made["embed.weight"].dtype), self.made["embed.weight"]):
            raise ConfigError(
                f"{self.foreign.folder / CONFIG}: field 'tie_word_embeddings' says that the head is the embedding, but "
                "the weights hold another; set it to false"
            )

    def _first(self, rule: Rule) -> nn.Parameter:
        """The first parameter of a rule."""
        first = rule.ours[0]
        return self.parameters[first if isinstance(first, str) else first[0]]

    def _place(self, rule: Rule, tensor: Tensor) -> None:
        shapes = self.rules.pieces(rule)
        for one, part in zip(rule.ours, rule.form.split(tensor, shapes), strict=True):
            if isinstance(one, str):
                self.made[one] = part.contiguous() if len(shapes) == 1 else part.clone().contiguous()
            else:
                name, index = one
                if name not in self.made:
                    self.made[name] = torch.empty(self.rules.shapes[name], dtype=part.dtype)
                self.made[name][index] = part
