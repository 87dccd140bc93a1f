"""A folder of transformers with quantized weights, read as if they were not quantized."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import short_repr
from heddle.exchange.packed_weights import BITSANDBYTES, PACKING_METHODS, TensorsBySuffix, packing_of
from heddle.exchange.safetensors_folder import CONFIG_FILE, SafetensorsFolder
from heddle.progress import format_amount, print_status

QUANTIZATION = "quantization_config"
Spec = tuple[str, torch.dtype, tuple[int, ...]]


class DequantizedFolder(SafetensorsFolder):
    """The folder, with each quantized weight as one tensor of `dtype`. Other tensors keep their dtype.

    Raises ConfigError if the weights are not quantized, or in a way that heddle does not unpack, and CheckpointError
    for a quantized weight that lacks one of its tensors.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(folder)
        self.dtype, self.packed_bytes, self.unpacked_bytes = dtype, 0, 0
        self.config = dict(self.config)
        fields, source = self.config.pop(QUANTIZATION, None), folder / CONFIG_FILE
        if not isinstance(fields, dict):
            raise ConfigError(f"{source}: has no '{QUANTIZATION}', so nothing is to be dequantized; import it as it is")
        self.method, self.fields = fields.get("quant_method"), fields
        packing = packing_of(fields)
        if packing is None:
            methods = f"{', '.join(PACKING_METHODS)} and 4 bits of {BITSANDBYTES} (nf4, fp4)"
            reason = f"quant_method {short_repr(self.method)} is not unpacked; heddle unpacks {methods}"
            raise ConfigError(f"{source}: field '{QUANTIZATION}': {reason}")
        self.packing = packing

    @cached_property
    def _groups(self) -> Mapping[str, Mapping[str, Spec]]:
        """The stored tensors of each quantized weight, by its name and their suffix."""
        stored, groups = super().tensor_specs(), {}
        packing = self.packing
        for marked in stored:
            if not marked.endswith(packing.marker):
                continue
            base = marked.removesuffix(packing.marker)
            group = {suffix: stored.get(base + suffix) for suffix in (packing.marker, *packing.suffixes)}
            for suffix, spec in group.items():
                if spec is None and suffix not in packing.optional:
                    raise CheckpointError(f"{self.folder}: tensor '{base + suffix}' is missing beside '{marked}'")
            groups[base + packing.result] = {suffix: spec for suffix, spec in group.items() if spec is not None}
        return groups

    @cached_property
    def _owners(self) -> Mapping[str, tuple[str, str]]:
        """The weight and the suffix of each stored tensor of a quantized weight."""
        result = self.packing.result
        return {
            name.removesuffix(result) + suffix: (name, suffix)
            for name, group in self._groups.items()
            for suffix in group
        }

    def _unpack(self, name: str, stored: TensorsBySuffix) -> Tensor:
        try:
            return self.packing.unpack(stored, self.fields).to(self.dtype)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            shapes = ", ".join(f"{name.removesuffix(self.packing.result)}{suffix} {list(tensor.shape)}"
                               for suffix, tensor in stored.items())  # fmt: skip
            raise CheckpointError(
                f"{self.folder}: the tensors of '{name}' do not make a weight in {self.method} ({shapes}); "
                "download them again"
            ) from error

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """As of any folder; a weight comes when the last of its tensors was read."""
        pending: dict[str, dict[str, Tensor]] = {}
        for file, name, tensor in super().tensors():
            if name not in self._owners:
                yield file, name, tensor
                continue
            weight, suffix = self._owners[name]
            pending.setdefault(weight, {})[suffix] = tensor
            if len(pending[weight]) == len(self._groups[weight]):
                stored = pending.pop(weight)
                unpacked = self._unpack(weight, stored)
                self.packed_bytes += sum(part.numel() * part.element_size() for part in stored.values())
                self.unpacked_bytes += unpacked.numel() * unpacked.element_size()
                yield file, weight, unpacked
        self._print_sizes()

    def _print_sizes(self) -> None:
        packed, unpacked = (format_amount(size, "bytes") for size in (self.packed_bytes, self.unpacked_bytes))
        dtype = str(self.dtype).removeprefix("torch.")
        print_status(f"dequantized: {len(self._groups)} weights of {self.method}, {packed}, to {dtype}, {unpacked}")

    def tensor_specs(self) -> dict[str, Spec]:
        """The file, dtype and shape of every tensor, from the headers alone."""
        stored = super().tensor_specs()
        specs = {name: spec for name, spec in stored.items() if name not in self._owners}
        for name, group in self._groups.items():
            parts = {suffix: torch.empty(spec[2], dtype=spec[1], device="meta") for suffix, spec in group.items()}
            marker, file = self.packing.marker, group[self.packing.marker][0]
            if self.packing.shape_in_marker:
                base = name.removesuffix(self.packing.result)
                parts[marker] = super().tensor(file, base + marker)
            specs[name] = (file, self.dtype, tuple(self._unpack(name, parts).shape))
        return specs

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor, in memory of its own, after `tensor_specs` named it."""
        if name not in self._groups:
            return super().tensor(file, name)
        base = name.removesuffix(self.packing.result)
        group = self._groups[name].items()
        return self._unpack(
            name, {suffix: super(DequantizedFolder, self).tensor(spec[0], base + suffix) for suffix, spec in group}
        )
