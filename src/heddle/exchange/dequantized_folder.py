"""Read a transformers folder with quantized weights, dequantizing them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.config_reader import short_repr
from heddle.exchange.safetensors_folder import CONFIG_FILE, SafetensorsFolder
from heddle.progress import format_amount, print_status

# Quantized weights as they are published: which stored tensors make one weight, and the numbers that they stand for.
#
# fp8      DeepSeek-V3's blocks: each block of the matrix has one factor, `weight_scale_inv`
# mxfp4    OCP Microscaling, as gpt-oss stores it: 32 numbers of 4 bits (E2M1) share one power of two (E8M0)
# gptq     Frantar et al. 2023: integers, eight of 4 bits in a word along the inputs; a factor and a zero for each group
# awq      Lin et al. 2024: the same with the words along the outputs, in the order of its kernels
# nf4, fp4 Dettmers et al. 2023, as bitsandbytes stores them: numbers of 4 bits name an entry of a table, and each block
#          of the flat weight has one factor. With double quantization the factors are stored likewise, in 8 bits
#
# All products are in float32.


Fields = Mapping[str, Any]  # quantization_config
TensorsBySuffix = Mapping[str, Tensor]  # the stored tensors of one weight, by their suffix
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # with the sign as the fourth bit
EXPONENT_BIAS = 127
BLOCK = 128  # DeepSeek's, if the config does not give it
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place within a word of each of eight outputs


class Packing(NamedTuple):
    """How one weight is stored as several tensors.

    marker: the suffix of the tensor that every such weight has. suffixes: of its other tensors; the `optional` ones may
    be missing. result: the suffix of the weight. unpack: returns the weight in float32.
    shape_in_marker: whether the marker's bytes hold the shape; in other formats it follows from the tensors' shapes.
    """

    marker: str
    suffixes: tuple[str, ...]
    result: str
    unpack: Callable[[TensorsBySuffix, Fields], Tensor]
    optional: tuple[str, ...] = ()
    shape_in_marker: bool = False


def unpack_fp8(tensors: TensorsBySuffix, fields: Fields) -> Tensor:
    """float8 [..., rows, columns] times a factor for each block; the last blocks of a matrix may be cut."""
    rows, columns = fields.get("weight_block_size") or (BLOCK, BLOCK)
    weight, scales = tensors[""].float(), tensors["_scale_inv"].float()
    if scales.dim() < 2:
        return weight * scales
    scales = scales.repeat_interleave(rows, -2)[..., : weight.shape[-2], :]
    return weight * scales.repeat_interleave(columns, -1)[..., : weight.shape[-1]]


def unpack_mxfp4(tensors: TensorsBySuffix, fields: Fields) -> Tensor:
    """uint8 blocks [experts, outputs, groups, 16], the lower four bits first -> [experts, inputs, outputs]."""
    blocks, exponents = tensors["_blocks"], tensors["_scales"].to(torch.int32) - EXPONENT_BIAS
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=blocks.device)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    return torch.ldexp(values[numbers], exponents[..., None]).flatten(-2).mT.contiguous()


def unpack_gptq(tensors: TensorsBySuffix, fields: Fields) -> Tensor:
    """Words [inputs · bits / 32, outputs] -> [outputs, inputs]. Version 1 of the format stores zero points minus 1."""
    bits = _bits(fields)
    integers = _split_words(tensors[".qweight"].mT, bits).mT  # [inputs, outputs]
    zeros = _split_words(tensors[".qzeros"], bits)
    if fields.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    scales, inputs = tensors[".scales"].float(), len(integers)
    groups = tensors.get(".g_idx")
    if groups is None:
        size = fields.get("group_size", -1)
        groups = torch.arange(inputs, device=scales.device) // (inputs if size < 1 else size)
    groups = groups.long()
    return ((integers - zeros[groups]) * scales[groups]).mT.contiguous()


def unpack_awq(tensors: TensorsBySuffix, fields: Fields) -> Tensor:
    """Words [inputs, outputs · 4 / 32] -> [outputs, inputs]."""
    if _bits(fields) != 4:
        raise ConfigError(f"quantization_config: bits is {fields.get('bits')}, awq has 4; import another file")
    integers, zeros = (_in_order(_split_words(tensors[name], 4)) for name in (".qweight", ".qzeros"))
    scales, inputs = tensors[".scales"].float(), len(integers)
    size = inputs // len(scales)
    zeros, scales = zeros.repeat_interleave(size, 0), scales.repeat_interleave(size, 0)
    return ((integers - zeros) * scales).mT.contiguous()


def unpack_bitsandbytes(tensors: TensorsBySuffix, fields: Fields) -> Tensor:
    """uint8 [numbers / 2, 1], the upper four bits first, and a description in JSON -> the weight in its own shape.

    Raises ValueError for a description that does not fit the tensors.
    """
    kind = fields.get("bnb_4bit_quant_type", "fp4")
    description = _parse_description(bytes(tensors[f"{DESCRIPTION}{kind}"].tolist()))
    packed, shape = tensors[""].flatten(), description["shape"]
    entries = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: math.prod(shape)]
    factors = tensors[".absmax"]
    if tensors.keys() & set(NESTED):
        if not tensors.keys() >= set(NESTED):
            raise ValueError("one of the tensors of double quantization is missing")
        outer = _block_factors(tensors[".nested_absmax"], description["nested_blocksize"], len(factors))
        factors = tensors[".nested_quant_map"][factors.long()] * outer + description["nested_offset"]
    values = tensors[".quant_map"].float()[entries.long()]
    return (values * _block_factors(factors.float(), description["blocksize"], len(values))).reshape(shape)


def _parse_description(raw: bytes) -> dict[str, Any]:
    """The fields of a weight that bitsandbytes packed. Raises ValueError for one that is missing or of another type."""
    description = json.loads(raw.decode("utf-8"))
    if not isinstance(description, dict):
        raise ValueError("the description is not a table")
    fields = {"nested_blocksize": 0, "nested_offset": 0.0} | description
    shape, sizes = fields.get("shape"), [fields.get("blocksize"), fields["nested_blocksize"]]
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape + sizes):
        raise ValueError("the description lacks the shape or the size of the blocks")
    if not isinstance(fields["nested_offset"], int | float):
        raise ValueError("the description has no number as its offset")
    return fields


def _block_factors(factors: Tensor, size: int, count: int) -> Tensor:
    """One factor for each of `count` numbers. Raises ValueError if there is not one factor for each block."""
    if size < 1 or len(factors) != -(-count // size):
        raise ValueError("there is not one factor for each block")
    return factors.repeat_interleave(size)[:count]


def _bits(fields: Fields) -> int:
    bits = fields.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ConfigError(f"quantization_config: bits is {bits}, heddle unpacks 2, 4 and 8; import another file")
    return int(bits)


def _split_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> the unsigned integers in each word, the lowest bits first, [..., n · 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    integers: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return integers.flatten(-2)


def _in_order(integers: Tensor) -> Tensor:
    words: Tensor = integers.unflatten(-1, (-1, 8))
    return words[..., list(AWQ_ORDER)].flatten(-2)


def packing_of(fields: Fields) -> Packing | None:
    """How the weights of a `quantization_config` are packed, or None if heddle does not unpack them."""
    method = fields.get("quant_method")
    if method == BITSANDBYTES:
        is_4bit = fields.get("load_in_4bit") or fields.get("_load_in_4bit")
        kind = fields.get("bnb_4bit_quant_type", "fp4")
        marker, suffixes = f"{DESCRIPTION}{kind}", ("", ".absmax", ".quant_map", *NESTED)
        packing = Packing(marker, suffixes, "", unpack_bitsandbytes, optional=NESTED, shape_in_marker=True)
        return packing if is_4bit and kind in ("nf4", "fp4") else None
    return PACKING_METHODS.get(method) if isinstance(method, str) else None


DESCRIPTION = ".quant_state.bitsandbytes__"
BITSANDBYTES = "bitsandbytes"
NESTED = (".nested_absmax", ".nested_quant_map")
GROUPED = (".qzeros", ".scales", ".g_idx")
PACKING_METHODS = {
    "fp8": Packing("_scale_inv", ("",), "", unpack_fp8),
    "mxfp4": Packing("_blocks", ("_scales",), "", unpack_mxfp4),
    "gptq": Packing(".qweight", GROUPED, ".weight", unpack_gptq, optional=(".g_idx",)),
    "awq": Packing(".qweight", GROUPED[:2], ".weight", unpack_awq),
}


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
            raise ConfigError(
                f"{source}: has no '{QUANTIZATION}', so there is nothing to dequantize; leave dequantize out"
            )
        self.method, self.fields = fields.get("quant_method"), fields
        packing = packing_of(fields)
        if packing is None:
            methods = f"{', '.join(PACKING_METHODS)} and 4 bits of {BITSANDBYTES} (nf4, fp4)"
            reason = f"quant_method {short_repr(self.method)} is not supported; heddle unpacks {methods}"
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
        """As in `SafetensorsFolder`; a weight is yielded once the last of its tensors is read."""
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
        """One tensor, in its own memory, after `tensor_specs` named it."""
        if name not in self._groups:
            return super().tensor(file, name)
        base = name.removesuffix(self.packing.result)
        group = self._groups[name].items()
        return self._unpack(
            name, {suffix: super(DequantizedFolder, self).tensor(spec[0], base + suffix) for suffix, spec in group}
        )
