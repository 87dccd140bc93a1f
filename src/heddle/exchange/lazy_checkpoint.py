"""A Hugging Face folder whose parameters are read one at a time, by their names in heddle."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.errors import CheckpointError
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.family import family_of
from heddle.exchange.load import build_weight_map, original_design
from heddle.exchange.safetensors_folder import CONFIG_FILE, SafetensorsFolder
from heddle.exchange.tokenizer_files import read_tokenizer_files
from heddle.exchange.weight_map import TensorRule, parameter_name
from heddle.model.decoder import build
from heddle.tokenization.tokenizer import Tokenizer


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
