"""Read a llama.cpp GGUF as a heddle model: the families that heddle writes, with weights of any ggml type.

Quantized weights are unpacked by the package `gguf`. Tensor names and row orders are as in `export`; the orders are
undone.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import HFTensors
from heddle.exchange.family import Family, families
from heddle.exchange.family_match import design_from_config
from heddle.exchange.gguf.architectures import ARCHITECTURES, Architecture, gguf_tensors
from heddle.exchange.gguf.config_from_keys import Keys, config_from_keys
from heddle.exchange.gguf.export import ROPE_FACTORS, check_package
from heddle.exchange.gguf.file import HASH_KEY, StoredTensor, check_seal, read_contents
from heddle.exchange.gguf.tokenizer import read_tokenizer
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.exchange.load import load_weights
from heddle.exchange.tokenizer_files import chosen_tokenizer
from heddle.model.decoder import Decoder, build
from heddle.progress import format_amount, print_status, print_warning, progress_bar

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(
    file: str | Path,
    dequantize: torch.dtype | None = None,
    allow_non_finite: bool = False,
    tokenizer_file: Path | None = None,
) -> ImportedModel:
    """Read a GGUF. All weights get one dtype: the embedding's, or `dequantize`, which quantized ones need.

    tokenizer_file: a tokenizer.json in place of the file's own tokenizer, read with the files beside it.

    Raises CheckpointError and ConfigError with one sentence that names the key or tensor that is missing, altered or
    not supported.
    """
    check_package()
    source = GGUFFile(Path(file), dequantize)
    family = families()[source.config.pop("model_type")]
    model = build(design_from_config(source.config, family, str(file)), device="meta")
    family = ARCHITECTURES[family.model_type].stored(family)
    source.plan(family, model)
    rows = model.embed.weight.shape[0]
    if tokenizer_file is None:
        tokenizer = read_tokenizer(source.keys, rows, str(file))
        text_files = {} if tokenizer is None else dict(tokenizer.companion_files)
    else:
        tokenizer, text_files = chosen_tokenizer(tokenizer_file, rows)
    load_weights(model, family, source, None, allow_non_finite)
    lengths = {"max_position_embeddings": source.config["max_position_embeddings"]}
    model.imported_config = lengths | {"model_type": family.model_type}
    return ImportedModel(model.eval(), tokenizer, text_files)


class GGUFFile:
    """The tensors of a GGUF."""

    def __init__(self, file: Path, dequantize: torch.dtype | None) -> None:
        self.folder, self.file, self.dequantize = file.parent, file, dequantize
        self.label, self.restore = str(file), "download it again"
        self._read()
        shapes = {name: tensor.shape for name, tensor in self.tensors_by_name.items()}
        self.config = config_from_keys(self.keys, shapes)
        further = ("blk.{depth}.",) if self.keys.of_graph("nextn_predict_layers", 0) else ()
        self.ignored_tensors: tuple[str, ...] = (ROPE_FACTORS, *further)

    def _read(self) -> None:
        contents = read_contents(self.file)
        self.keys, self.tensors_by_name = Keys(contents.keys, str(self.file)), contents.tensors
        if HASH_KEY in contents.keys:
            try:
                check_seal(self.file)
            except CheckpointError as error:  # or by a program that keeps all keys, such as llama-quantize
                print_warning(str(error))
        self._check_kind()
        if ROPE_FACTORS in self.tensors_by_name:
            self.keys.rope_factors = self._values(self.tensors_by_name[ROPE_FACTORS]).flatten().tolist()

    def _check_kind(self) -> None:
        """Raises ConfigError for a file that is not a whole model."""
        kind, parts = self.keys.get("general.type", "model"), self.keys.get("split.count", 1)
        if kind != "model":
            raise ConfigError(f"{self.file}: is {kind} ('general.type'), not a model; import the model's own GGUF")
        if parts > 1:
            part = self.keys.get("split.no", 0) + 1
            remedy = "merge the parts with `llama-gguf-split --merge`"
            raise ConfigError(f"{self.file}: is part {part} of {parts}; {remedy}")

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights. Raises ConfigError if some are quantized and `dequantize` is None."""
        packed = sorted({tensor.kind for tensor in self.tensors_by_name.values()} - FLOAT_DTYPES.keys())
        whole = [kind for kind in packed if re.fullmatch(r"I\d+", kind)]
        if whole:
            raise ConfigError(f"{self.file}: holds whole numbers ({', '.join(whole)}) as weights; {self.restore}")
        if self.dequantize is None and packed:
            remedy = "unpack them with `--dequantize bf16`"
            raise ConfigError(f"{self.file}: holds quantized weights ({', '.join(packed)}); {remedy}")
        embedding = self.tensors_by_name.get("token_embd.weight")
        return self.dequantize or FLOAT_DTYPES["F32" if embedding is None else embedding.kind]

    def plan(self, family: Family, model: Decoder) -> None:
        """Map the tensors of the file to the parameters. family: as the graph stores it."""
        graph: Architecture = ARCHITECTURES[family.model_type]
        tensors = HFTensors(family, model)
        self._plan = {spec.name: spec for spec in gguf_tensors(tensors, self.config, graph, self.dtype)}

    def tensor_specs(self) -> Iterable[str]:
        """The names of the model's tensors in the file."""
        return self._plan

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (file, name, tensor) for every tensor."""
        stored = sum(tensor.data.nbytes for tensor in self.tensors_by_name.values())
        numbers, packed = 0, set[str]()
        with progress_bar("reading", stored, "bytes") as progress:
            for name, tensor in self.tensors_by_name.items():
                values = self._values(tensor)
                numbers += values.numel()
                packed |= {tensor.kind} - FLOAT_DTYPES.keys()
                spec = self._plan.get(name)
                if spec is not None:
                    fits = _without_ones(values.shape) == _without_ones(spec.shape)
                    values = spec.restore(values.reshape(spec.shape)) if fits else values
                    values = values.to(self.dtype).contiguous()
                yield self.file.name, name, values
                progress.advance(tensor.data.nbytes)
        if packed:
            sizes = [format_amount(size, "bytes") for size in (stored, numbers * self.dtype.itemsize)]
            dtype = str(self.dtype).removeprefix("torch.")
            print_status(f"dequantized: {', '.join(sorted(packed))}, {sizes[0]}, to {dtype}, {sizes[1]}")

    def _values(self, tensor: StoredTensor) -> Tensor:
        """The numbers of a tensor, float32 or float64."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        if tensor.kind == "F64":
            return torch.from_numpy(tensor.data.copy())
        try:
            return torch.from_numpy(dequantize(tensor.data, GGMLQuantizationType[tensor.kind]).copy())
        except (RuntimeError, ValueError) as error:
            reason = f"tensor '{tensor.name}' of type {tensor.kind} cannot be unpacked"
            raise CheckpointError(
                f"{self.file}: {reason}; import the original folder, or another quantization"
            ) from error


def _without_ones(shape: torch.Size) -> list[int]:
    """A shape without dims of 1, which llama.cpp's converters leave out of some tensors."""
    return [size for size in shape if size != 1]
