"""Load a Hugging Face folder as a heddle model: read config.json field by field, then place the tensors one by one."""

import hashlib
from collections.abc import Container, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heddle.config import parse_config
from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import ConfigReader, list_fields
from heddle.exchange.dequantized_folder import DequantizedFolder
from heddle.exchange.family import Family, TensorRule, WeightMap, family_of, parameter_name
from heddle.exchange.family_match import design_from_config, differences
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.safetensors_folder import CONFIG_FILE, SafetensorsFolder
from heddle.exchange.tokenizer_files import read_tokenizer_files
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.initialization import storage_dtype
from heddle.progress import print_status
from heddle.tokenization.tokenizer import Tokenizer

HEAD_WEIGHT = "head.weight"
HF_HEAD_WEIGHTS = (
    "lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight", "lm_head.decoder.weight", "decoder.weight",
)  # fmt: skip
IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)  # buffers that older files of any family hold


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    dequantize: torch.dtype | None = None,
    allow_non_finite: bool = False,
) -> ImportedModel:
    """Read a folder that transformers or `heddle export` wrote. dtype None keeps the dtype of each tensor.

    dequantize: the dtype of weights that are stored quantized, in a way of `dequantized_folder.py`; None: such a
    folder is refused. allow_non_finite: whether weights may hold infinite numbers and NaN.
    Peak memory is the model plus one tensor. Raises CheckpointError and ConfigError with one sentence that names the
    file, tensor or field that is missing, altered, unknown or not supported.
    """
    path = Path(folder)
    checkpoint = SafetensorsFolder(path) if dequantize is None else DequantizedFolder(path, dequantize)
    source = str(checkpoint.folder / CONFIG_FILE)
    family = family_of(checkpoint.config, source)
    noted: list[str] = []
    design = original_design(checkpoint.config, family, source, noted)
    _print_notes(noted, family, source)
    try:
        model = build(design, device="meta")
    except (RuntimeError, OverflowError) as error:  # torch counts bytes in 63 bits
        raise ConfigError(f"{source}: asks for tensors larger than any machine holds; restore the file") from error
    load_weights(model, family, checkpoint, dtype, allow_non_finite)
    tokenizer, text_files = read_tokenizer_files(checkpoint, model.embed.weight.shape[0])
    model.imported_config = ConfigReader(checkpoint.config).preserved() | {"model_type": family.model_type}
    return ImportedModel(model.eval(), tokenizer, text_files)


def _print_notes(noted: list[str], family: Family, source: str) -> None:
    """Say which fields of a config.json were read and change nothing."""
    others = [name for name in noted if name != "auto_map"]
    if len(others) < len(noted):
        print_status(f"noted: {source}: the code that 'auto_map' names is never run; read as {family.model_type}")
    if others:
        print_status(f"noted: {source}: {list_fields(others)} change nothing that the model computes")


def original_design(
    config: Mapping[str, Any], family: Family, source: str, noted: list[str] | None = None
) -> ModelConfig:
    """The design that an export stored in config.json if it still agrees with the fields, else the one they give.

    noted: as in `design_from_config`.
    """
    design = design_from_config(dict(config), family, source, noted)
    heddle_fields = config.get("heddle")
    if isinstance(heddle_fields, dict) and isinstance(heddle_fields.get("design"), dict):
        stored = parse_config(ModelConfig, heddle_fields["design"])
        if not differences(stored, design):
            return stored
        print_status(f"warning: {source}: was changed after the export, so the design stored in it is not used")
    return design


def build_weight_map(family: Family, model: Decoder) -> WeightMap:
    """The rules between a model's parameters and a family's tensors."""
    weight_map = WeightMap({name: parameter.shape for name, parameter in model.named_parameters()})
    family.map_weights(model.config, weight_map)
    return weight_map


class WeightSource(Protocol):
    """The tensors of a family's model, by their names in the family. folder, ignored_tensors: as of a folder."""

    folder: Path
    ignored_tensors: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, name, tensor in memory of its own) for every tensor."""

    def tensor_specs(self) -> Container[str]:
        """The names of the tensors."""


def load_weights(
    model: Decoder, family: Family, source: WeightSource, dtype: torch.dtype | None, allow_non_finite: bool
) -> None:
    """Fill a model on the meta device. dtype None keeps that of each tensor. Raises CheckpointError and ConfigError."""
    _WeightLoader(model, family, source, allow_non_finite).load(dtype)


class _WeightLoader:
    """Fills a model on the meta device with the tensors of a checkpoint, in the order in which they are read."""

    def __init__(self, model: Decoder, family: Family, checkpoint: WeightSource, allow_non_finite: bool) -> None:
        self.model, self.family, self.checkpoint = model, family, checkpoint
        self.allow_non_finite = allow_non_finite
        self.weight_map = build_weight_map(family, model)
        if self.weight_map.alternatives:
            self.weight_map.use_alternatives(checkpoint.tensor_specs())
        self.missing = dict(self.weight_map.rules)
        self.parameters = dict(model.named_parameters())
        self.loaded: dict[str, Tensor] = {}

    def load(self, dtype: torch.dtype | None) -> None:
        """Read every tensor. Raises CheckpointError naming one that is missing or unknown, or of a wrong shape."""
        ignored: set[str] = set()
        for file, name, tensor in self.checkpoint.tensors():
            source = f"{self.checkpoint.folder / file}: tensor '{name}'"
            rule = self.missing.pop(name, None) or self.missing.pop(self.family.optional_prefix + name, None)
            if rule is not None:
                self._check_tensor(rule, tensor, source)
                first = self.parameters[parameter_name(rule.parameters[0])]
                self._copy_into(rule, tensor if dtype is None else tensor.to(storage_dtype(first, dtype)))
            elif (prefix := self._ignored_prefix(name)) is not None:
                ignored.add(prefix)
            elif self.model.config.head.tied and name in HF_HEAD_WEIGHTS:
                self.loaded[HEAD_WEIGHT] = tensor
            else:
                raise CheckpointError(f"{source} belongs to no part of a {self.family.architecture} of this config")
        for name in self.missing:
            raise CheckpointError(f"{self.checkpoint.folder}: tensor '{name}' is missing; download the weights again")
        self._check_tied_head()
        for prefix in sorted(ignored):
            print_status(f"ignored: tensors {prefix}…, which heddle does not build")
        for name, tensor in self.loaded.items():
            owner, _, attribute = name.rpartition(".")
            parameter = nn.Parameter(tensor, self.parameters[name].requires_grad)
            setattr(self.model.get_submodule(owner), attribute, parameter)
        self.model.tie()

    def _ignored_prefix(self, name: str) -> str | None:
        """The prefix of tensors to ignore that matches a name, or None."""
        patterns = IGNORED_TENSORS + self.family.ignored_tensors + self.checkpoint.ignored_tensors
        prefixes = [pattern.format(depth=self.model.config.depth) for pattern in patterns]
        return next((prefix for prefix in prefixes if fnmatchcase(name, prefix + "*")), None)

    def _check_tensor(self, rule: TensorRule, tensor: Tensor, source: str) -> None:
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise CheckpointError(f"{source} is of type {tensor.dtype}; heddle reads unquantized floating point")
        if tensor.shape != (shape := self.weight_map.hf_shape(rule)):
            raise CheckpointError(f"{source} has shape {list(tensor.shape)}, the config needs {list(shape)}")
        if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
            if not self.allow_non_finite:
                remedy = "download the weights again, or allow such values"
                raise CheckpointError(f"{source} holds values that are not finite; {remedy}")
            print_status(f"warning: {source} holds values that are not finite; the model may write nothing sensible")

    def _check_tied_head(self) -> None:
        """Raises ConfigError if the head is tied, but the file holds a head that differs from the embedding."""
        head = self.loaded.pop(HEAD_WEIGHT, None) if self.model.config.head.tied else None
        if head is None:
            return
        embedding = self.loaded["embed.weight"]
        if not torch.equal(head.to(embedding.dtype), embedding):
            raise ConfigError(
                f"{self.checkpoint.folder / CONFIG_FILE}: field 'tie_word_embeddings' says that the head is the "
                "embedding, but the weights hold another; set it to false"
            )

    def _copy_into(self, rule: TensorRule, tensor: Tensor) -> None:
        """Split a Hugging Face tensor into the parameters, or slices of parameters, that it holds."""
        shapes = self.weight_map.parameter_shapes(rule)
        for ref, part in zip(rule.parameters, rule.transform.split(tensor, shapes), strict=True):
            if isinstance(ref, str):
                self.loaded[ref] = part.contiguous() if len(shapes) == 1 else part.clone().contiguous()
            else:
                name, index = ref
                if name not in self.loaded:
                    self.loaded[name] = torch.empty(self.weight_map.shapes[name], dtype=part.dtype)
                self.loaded[name][index] = part


# A Hugging Face folder whose parameters are read one at a time, by their names in heddle.


class LazyCheckpoint:
    """A folder of transformers. Headers are checked when it is opened, values are read when they are looked up.

    Raises CheckpointError and ConfigError, naming the file, tensor or field that is missing or not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.checkpoint = SafetensorsFolder(folder)
        source = str(folder / CONFIG_FILE)
        self.family = family_of(self.checkpoint.config, source)
        self.design = original_design(self.checkpoint.config, self.family, source)
        self._model = build(self.design, device="meta")
        self._weight_map = build_weight_map(self.family, self._model)
        self._stored = self.checkpoint.tensor_specs()
        self._weight_map.use_alternatives(self._stored)
        self._rules: dict[str, list[TensorRule]] = {}  # of each parameter
        for rule in self._weight_map.rules.values():
            self._check(rule)
            for name in {parameter_name(ref) for ref in rule.parameters}:
                self._rules.setdefault(name, []).append(rule)

    def _stored_name(self, rule: TensorRule) -> str:
        if rule.hf_name in self._stored:
            return rule.hf_name
        return rule.hf_name.removeprefix(self.family.optional_prefix)

    def _check(self, rule: TensorRule) -> None:
        name = self._stored_name(rule)
        if name not in self._stored:
            raise CheckpointError(f"{self.checkpoint.folder}: tensor '{name}' is missing; download the weights again")
        file, dtype, shape = self._stored[name]
        source = f"{self.checkpoint.folder / file}: tensor '{name}'"
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise CheckpointError(f"{source} is of type {dtype}; heddle reads unquantized floating point")
        if shape != tuple(expected := self._weight_map.hf_shape(rule)):
            raise CheckpointError(f"{source} has shape {list(shape)}, the config needs {list(expected)}")

    @cached_property
    def specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of every parameter, by its name in heddle."""
        return {
            name: (self._stored[self._stored_name(self._rules[name][0])][1], tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
        }

    def tensor(self, name: str) -> Tensor:
        """Read one parameter."""
        dtype, shape = self.specs[name]
        whole: Tensor | None = None
        for rule in self._rules[name]:
            stored_name = self._stored_name(rule)
            value = self.checkpoint.tensor(self._stored[stored_name][0], stored_name)
            parts = rule.transform.split(value, self._weight_map.parameter_shapes(rule))
            for ref, part in zip(rule.parameters, parts, strict=True):
                if ref == name:
                    return part.clone().contiguous()
                if not isinstance(ref, str) and ref[0] == name:
                    whole = torch.empty(shape, dtype=dtype) if whole is None else whole
                    whole[ref[1]] = part
        assert whole is not None
        return whole

    def weights_sha256(self) -> str:
        """The SHA-256 over the bytes of all tensor files, one block in memory."""
        digest = hashlib.sha256()
        for file in self.checkpoint.tensor_files:
            with open(self.checkpoint.folder / file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def imported_config(self) -> dict[str, Any]:
        """The fields of config.json that an export writes again."""
        return ConfigReader(self.checkpoint.config).preserved() | {"model_type": self.family.model_type}

    def read_tokenizer(self) -> tuple[Tokenizer | None, dict[str, str]]:
        """The tokenizer, or None, and the text of its other files."""
        return read_tokenizer_files(self.checkpoint, self._model.embed.weight.shape[0])
