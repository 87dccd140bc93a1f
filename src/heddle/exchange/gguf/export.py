"""A model -> one GGUF file, whole or not at all; what llama.cpp cannot run is refused by name.

Numbers are moved, and rounded only where another type is asked for (Gemma's norms have 1 added to their weights).
"""

import errno
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange.export import Tensors
from heddle.exchange.fit import Fit
from heddle.exchange.gguf.architectures import Architecture, rotations, runs_as
from heddle.exchange.gguf.tensors import Piece, pieces
from heddle.exchange.gguf.vocabulary import vocabulary
from heddle.exchange.imported import Imported
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig
from heddle.progress import bar
from heddle.storage import atomic as disk
from heddle.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

MAGIC = b"GGUF"
FACTORS = "rope_freqs.weight"
# Type of the weights -> its number in a tensor's entry, and in `general.file_type`.
TYPES = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}


def export_gguf(
    model: Decoder,
    file: str | Path,
    tokenizer: Tokenizer | None = None,
    source: Imported | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Fit, str]:
    """Write `file`; returns the family that the design fits, and llama.cpp's name of the graph that runs it.

    source: what an import brought along. dtype: float32, float16 or bfloat16, of matrices; None is the model's own.
    Raises ConfigError for a design, type or missing package, DataError for a tokenizer that llama.cpp does not know,
    CheckpointError where `file` is something else than a GGUF, MachineError where it cannot be written.
    """
    file = Path(file)
    kind = _dtype(model, dtype)
    found, graph = runs_as(model.config)
    _check_package()
    tensors = Tensors(found.family, model)
    told = _keys(found.config, model, graph, {} if source is None else source.carried)
    told |= {"general.name": file.stem, "general.file_type": TYPES[kind][1]}
    words = {"model": "none"} if tokenizer is None else vocabulary(tokenizer, model.config.vocab_size or 0)
    told |= {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    extra = _factors(model)
    _write(file, graph.name, told, list(pieces(tensors, found.config, graph, kind)), tensors, extra)
    return found, graph.name


def _dtype(model: Decoder, wanted: torch.dtype | None) -> torch.dtype:
    own = next(model.parameters()).dtype
    kind = wanted or (torch.float32 if own == torch.float64 else own)
    if kind not in TYPES:
        names = ", ".join(str(one).removeprefix("torch.") for one in TYPES)
        raise ConfigError(f"dtype {kind}: a GGUF of heddle holds {names}; give one of these")
    return kind


def _check_package() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a GGUF is written with the package gguf, which is missing: pip install 'heddle-lm[gguf]'"
        ) from None


def _keys(config: dict[str, Any], model: Decoder, graph: Architecture, carried: dict[str, Any]) -> dict[str, Any]:
    """What a GGUF tells of a model, but for its tokenizer."""
    dim = config["head_dim"]
    told = {
        "context_length": carried.get("max_position_embeddings") or config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
        **_rotation(model.config, dim),
        **graph.keys(config),
    }
    return {"general.type": "model"} | {f"{graph.name}.{name}": value for name, value in told.items()}


def _rotation(design: ModelConfig, dim: int) -> dict[str, Any]:
    rope, local = rotations(design)
    told: dict[str, Any] = {"rope.dimension_count": dim, "rope.freq_base": float(rope.base)}
    if local is not None:
        told["rope.freq_base_swa"] = float(local.base)
    if isinstance(rope.scaling, LinearConfig):
        told |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.scaling.factor)}
    if isinstance(rope.scaling, YarnConfig):
        told |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.scaling.factor),
            "rope.scaling.original_context_length": rope.scaling.original_length,
        }
    return told


def _factors(model: Decoder) -> dict[str, torch.Tensor]:
    """Llama 3's scaling: how many times slower each pair turns."""
    rope, _ = rotations(model.config)
    if not isinstance(rope.scaling, Llama3Config):
        return {}
    dim = rope.dim or 0
    before, after = (one.build(dim).turns(1).thetas for one in (rope.replace(scaling=None), rope))
    return {FACTORS: torch.tensor([fast / slow for fast, slow in zip(before, after, strict=True)])}


def _write(
    file: Path,
    graph: str,
    told: dict[str, Any],
    plan: list[Piece],
    tensors: Tensors,
    extra: dict[str, torch.Tensor],
) -> None:
    """Into a folder beside the file's place, and from there by one rename."""
    _check_place(file)
    from gguf import GGUFWriter

    try:
        disk.make_folder(file.parent)
        disk.sweep(file.parent, file.name)
        staged = disk.leftover_name(file, "tmp")
        writer = GGUFWriter(staged / file.name, graph)
        try:
            disk.system.mkdir(staged)
            _fill(writer, told, plan, tensors, extra)
            writer.close()
            _sync(staged / file.name)
            disk.system.rename(staged / file.name, file)
            disk.sync_folder(file.parent)
        finally:
            writer.close()
            disk.remove_folder(staged)
    except OSError as error:
        full = OSError(errno.ENOSPC, str(error))  # numpy tells a short write, and no number
        raise disk.unwritable(file, error if error.errno else full) from error


def _check_place(file: Path) -> None:
    if file.suffix != ".gguf":
        raise CheckpointError(f"{file}: should be the name of a file that ends in .gguf")
    if file.is_dir():
        raise CheckpointError(f"{file}: is a folder; name a file")
    if file.exists():
        with disk.opened(file) as (descriptor, size):
            start = bytearray(min(size, len(MAGIC)))
            disk.read_exactly(descriptor, memoryview(start), file)
        if start != MAGIC:
            raise CheckpointError(f"{file}: is no GGUF and is left as it is; choose another name")


def _fill(
    writer: "GGUFWriter",
    told: dict[str, Any],
    plan: list[Piece],
    tensors: Tensors,
    extra: dict[str, torch.Tensor],
) -> None:
    from gguf import GGMLQuantizationType

    for key, value in told.items():
        _add(writer, key, value)
    for name, tensor in extra.items():
        array = tensor.numpy()
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for piece in plan:
        size = math.prod(piece.shape) * piece.dtype.itemsize
        raw = GGMLQuantizationType(TYPES[piece.dtype][0])
        writer.add_tensor_info(piece.name, piece.shape, _bits(piece.dtype), size, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in extra.values():
        writer.write_tensor_data(tensor.numpy())
    with bar("writing", sum(math.prod(one.shape) * one.dtype.itemsize for one in plan), "bytes") as shown:
        for piece in plan:
            made = piece.make(tensors)
            assert made.shape == piece.shape, f"{piece.name}: {made.shape} is not {piece.shape}"
            writer.write_tensor_data(made.view(torch.int16).numpy() if made.itemsize == 2 else made.numpy())
            shown.advance(made.numel() * made.itemsize)


def _bits(dtype: torch.dtype) -> Any:
    import numpy as np

    return np.dtype(np.float32 if dtype.itemsize == 4 else np.int16)


def _add(writer: "GGUFWriter", key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _sync(path: Path) -> None:
    descriptor = disk.system.open(path, disk.READ)
    try:
        disk.system.fsync(descriptor)
    finally:
        disk.system.close(descriptor)
