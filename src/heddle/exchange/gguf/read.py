"""Read a GGUF of llama.cpp as a heddle model: of the families that heddle writes, with weights of any type of ggml.

Quantized weights are unpacked by the package `gguf`. Its names of tensors are those of `export`, and so are the orders
of rows, which are undone.
"""

from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import HFTensors
from heddle.exchange.family import Family, families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.gguf.architectures import ARCHITECTURES, Architecture
from heddle.exchange.gguf.export import ROPE_FACTORS, check_package
from heddle.exchange.gguf.gguf_tensors import gguf_tensors
from heddle.exchange.gguf.keys import Keys, config_from_keys
from heddle.exchange.gguf.tokenizer import read_tokenizer
from heddle.exchange.imported_model import ImportedModel
from heddle.exchange.load import load_weights
from heddle.model.decoder import Decoder, build
from heddle.progress import format_amount, print_status, progress_bar

if TYPE_CHECKING:
    from gguf import ReaderTensor

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(file: str | Path, dequantize: torch.dtype | None = None, allow_non_finite: bool = False) -> ImportedModel:
    """Read a GGUF. All weights have one dtype: that of its embedding, or `dequantize`, which quantized ones need.

    Raises CheckpointError and ConfigError with one sentence that names the key or tensor that is missing, altered or
    not supported.
    """
    check_package()
    source = GGUFFile(Path(file), dequantize)
    family = families()[source.config.pop("model_type")]
    model = build(design_from_config(source.config, family, str(file)), device="meta")
    source.plan(family, model)
    load_weights(model, family, source, None, allow_non_finite)
    tokenizer = read_tokenizer(source.keys, model.embed.weight.shape[0], str(file))
    lengths = {"max_position_embeddings": source.config["max_position_embeddings"]}
    model.imported_config = lengths | {"model_type": family.model_type}
    return ImportedModel(model.eval(), tokenizer)


class GGUFFile:
    """The tensors of a GGUF by their names in a family."""

    def __init__(self, file: Path, dequantize: torch.dtype | None) -> None:
        self.folder, self.file, self.dequantize = file.parent, file, dequantize
        self.ignored_tensors: tuple[str, ...] = (ROPE_FACTORS,)
        self._read()
        self.graph_name = self.keys.require("general.architecture", str)
        self.config = config_from_keys(self.keys, _shapes(self.tensors_by_name))

    def _read(self) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(self.file)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CheckpointError(f"{self.file}: cannot be read as a GGUF ({reason}); download it again") from error
        self.keys = Keys(fields, str(self.file))
        self.tensors_by_name: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if ROPE_FACTORS in self.tensors_by_name:
            self.keys.rope_factors = [float(x) for x in self.tensors_by_name[ROPE_FACTORS].data]

    @cached_property
    def dtype(self) -> torch.dtype:
        """That of all weights. Raises ConfigError if some are quantized and it was not asked for."""
        types = {tensor.tensor_type.name for tensor in self.tensors_by_name.values()}
        packed = sorted(types - FLOAT_DTYPES.keys())
        if self.dequantize is None and packed:
            raise ConfigError(f"{self.file}: holds quantized weights ({', '.join(packed)}); ask for them dequantized")
        embedding = self.tensors_by_name.get("token_embd.weight")
        return self.dequantize or FLOAT_DTYPES["F32" if embedding is None else embedding.tensor_type.name]

    def plan(self, family: Family, model: Decoder) -> None:
        """Find which tensors of the file make which of the family."""
        graph: Architecture = ARCHITECTURES[family.model_type]
        tensors = HFTensors(family, model)
        self._plan = {spec.name: spec for spec in gguf_tensors(tensors, self.config, graph, self.dtype)}

    def tensor_specs(self) -> Container[str]:
        """The names of the family's tensors that the file holds."""
        return {name for spec in self._plan.values() for name in spec.hf_names}

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, the family's name, tensor) for every tensor; one that belongs to nothing has its own name."""
        stored = sum(int(tensor.n_bytes) for tensor in self.tensors_by_name.values())
        numbers, packed = 0, set[str]()
        with progress_bar("reading", stored, "bytes") as progress:
            for name, tensor in self.tensors_by_name.items():
                values = self._values(tensor)
                numbers += values.numel()
                packed |= {tensor.tensor_type.name} - FLOAT_DTYPES.keys()
                spec = self._plan.get(name)
                if spec is None:
                    yield self.file.name, name, values
                    continue
                parts = list(values) if len(spec.hf_names) > 1 or values.dim() == 3 else [values]
                for hf_name, part in zip(spec.hf_names, parts, strict=False):
                    has_shape = part.shape == spec.shape[len(spec.shape) - part.dim() :]
                    whole = spec.restore(part) if has_shape else part
                    yield self.file.name, hf_name, whole.to(self.dtype).contiguous()
                progress.advance(int(tensor.n_bytes))
        if packed:
            sizes = [format_amount(size, "bytes") for size in (stored, numbers * self.dtype.itemsize)]
            dtype = str(self.dtype).removeprefix("torch.")
            print_status(f"dequantized: {', '.join(sorted(packed))}, {sizes[0]}, to {dtype}, {sizes[1]}")

    def _values(self, tensor: "ReaderTensor") -> Tensor:
        """The numbers of a tensor, float32."""
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        except (RuntimeError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(f"{self.file}: tensor '{tensor.name}' of type {kind} cannot be unpacked") from error


def _shapes(tensors: Mapping[str, "ReaderTensor"]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
