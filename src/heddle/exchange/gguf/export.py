"""Write a model as one GGUF file, completely or not at all. A design that llama.cpp cannot run is refused.

Weights keep their values, except for rounding to the dtype asked for, and Gemma's norms, to which 1 is added.
"""

import errno
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heddle.errors import CheckpointError, ConfigError
from heddle.exchange import design_parts
from heddle.exchange.export import HFTensors
from heddle.exchange.family_match import FamilyMatch
from heddle.exchange.gguf.architectures import Architecture
from heddle.exchange.gguf.gguf_tensors import GGUFTensor, gguf_tensors
from heddle.exchange.gguf.graph_match import match_architecture, ropes_of
from heddle.exchange.gguf.tokenizer import tokenizer_keys
from heddle.exchange.imported_model import ImportedModel
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.positions.learned import LearnedConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig
from heddle.progress import progress_bar
from heddle.storage import atomic, file_io
from heddle.storage.lock import lock_output
from heddle.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

MAGIC = b"GGUF"
ROPE_FACTORS = "rope_freqs.weight"
# dtype -> its number in a tensor's entry, and its number in `general.file_type`.
GGML_TYPES = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}


def export_gguf(
    model: Decoder,
    file: str | Path,
    tokenizer: Tokenizer | None = None,
    imported: ImportedModel | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[FamilyMatch, str]:
    """Write `file`. Returns the family that the design matches, and the name of llama.cpp's graph for it.

    imported: the import whose lengths are written, if not the model's own. dtype: of matrices, float32, float16 or
    bfloat16; None is the model's own.
    Raises ConfigError for an unsupported design or dtype or a missing package, DataError for a tokenizer that llama.cpp
    does not know, CheckpointError if `file` exists and is not a GGUF, MachineError if it cannot be written.
    """
    file = Path(file)
    dtype = _matrix_dtype(model, dtype)
    match, graph = match_architecture(model.config)
    check_package()
    tensors = HFTensors(match.family, model)
    keys = _model_keys(match.config, model, graph, (model if imported is None else imported.model).imported_config)
    keys |= {"general.name": file.stem, "general.file_type": GGML_TYPES[dtype][1]}
    tokenizer_fields = (
        {"model": "none"} if tokenizer is None else tokenizer_keys(tokenizer, model.config.vocab_size or 0)
    )
    keys |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer_fields.items()}
    gguf_plan = list(gguf_tensors(tensors, match.config, graph, dtype))
    _write(file, graph.name, keys, gguf_plan, tensors, _rope_factors(model))
    return match, graph.name


def _matrix_dtype(model: Decoder, dtype: torch.dtype | None) -> torch.dtype:
    model_dtype = next(model.parameters()).dtype
    dtype = dtype or (torch.float32 if model_dtype == torch.float64 else model_dtype)
    if dtype not in GGML_TYPES:
        names = ", ".join(str(supported).removeprefix("torch.") for supported in GGML_TYPES)
        raise ConfigError(f"dtype {dtype}: a GGUF of heddle holds {names}; give one of these")
    return dtype


def check_package() -> None:
    """Raises ConfigError if the package gguf is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "a GGUF is read and written with the package gguf, which is missing: pip install 'heddle-lm[gguf]'"
        ) from None


def _model_keys(
    config: dict[str, Any], model: Decoder, graph: Architecture, preserved: dict[str, Any]
) -> dict[str, Any]:
    """The GGUF keys of a model, without those of its tokenizer."""
    design = model.config
    mixer = design_parts.first_attention(design.resolved())
    head_dim = mixer.head_dim or design.width // mixer.heads
    lengths = [
        values.get(name) for values in (preserved, config) for name in ("max_position_embeddings", "n_positions")
    ]
    keys = {
        "context_length": next(length for length in lengths if length),
        "embedding_length": design.width,
        "block_count": design.depth,
        "feed_forward_length": config.get("intermediate_size") or design_parts.first_mlp(design).hidden,
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads or mixer.heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon" if "rms_norm_eps" in config else "attention.layer_norm_epsilon": float(
            design_parts.norm_eps(design)
        ),
        "vocab_size": design.vocab_size,
        **_rope_keys(model.config, head_dim),
        **graph.extra_keys(config),
    }
    return {"general.type": "model"} | {f"{graph.name}.{name}": value for name, value in keys.items()}


def _rope_keys(design: ModelConfig, head_dim: int) -> dict[str, Any]:
    if isinstance(design.embedding.position, LearnedConfig):
        return {}
    rope, sliding = ropes_of(design)
    keys: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim or head_dim,
        "rope.freq_base": float(rope.base),
    }
    if sliding is not None:
        keys["rope.freq_base_swa"] = float(sliding.base)
    if isinstance(rope.scaling, LinearConfig):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.scaling.factor)}
    if isinstance(rope.scaling, YarnConfig):
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.scaling.factor),
            "rope.scaling.original_context_length": rope.scaling.original_length,
        }
    return keys


def _rope_factors(model: Decoder) -> dict[str, torch.Tensor]:
    """Llama 3's RoPE scaling as a tensor: unscaled / scaled frequency of each pair of dims."""
    rope, _ = ropes_of(model.config)
    if not isinstance(rope.scaling, Llama3Config):
        return {}
    dim = rope.rotary_dim or 0
    unscaled_inv_freq, scaled_inv_freq = (
        config.build(dim).scaled_frequencies(1).inv_freq for config in (rope.replace(scaling=None), rope)
    )
    return {
        ROPE_FACTORS: torch.tensor(
            [unscaled / scaled for unscaled, scaled in zip(unscaled_inv_freq, scaled_inv_freq, strict=True)]
        )
    }


def _write(
    file: Path,
    graph_name: str,
    keys: dict[str, Any],
    gguf_plan: list[GGUFTensor],
    tensors: HFTensors,
    extra_tensors: dict[str, torch.Tensor],
) -> None:
    """Write the file completely or not at all."""
    _check_target(file)
    from gguf import GGUFWriter

    with lock_output(file), atomic.replace_file(file) as temporary:
        writer = GGUFWriter(temporary, graph_name)
        try:
            _write_contents(writer, keys, gguf_plan, tensors, extra_tensors)
        except OSError as error:
            if error.errno is None:  # numpy reports a short write without a number
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
        finally:
            writer.close()


def _check_target(file: Path) -> None:
    if file.suffix != ".gguf":
        raise CheckpointError(f"{file}: should be the name of a file that ends in .gguf")
    if file.is_dir():
        raise CheckpointError(f"{file}: is a folder; name a file")
    if file.is_file():  # anything else is refused when the file is replaced
        with file_io.open_regular_file(file) as (descriptor, size):
            start = bytearray(min(size, len(MAGIC)))
            file_io.read_exactly(descriptor, memoryview(start), file)
        if start != MAGIC:
            raise CheckpointError(f"{file}: is no GGUF and is left as it is; choose another name")


def _write_contents(
    writer: "GGUFWriter",
    keys: dict[str, Any],
    gguf_plan: list[GGUFTensor],
    tensors: HFTensors,
    extra_tensors: dict[str, torch.Tensor],
) -> None:
    from gguf import GGMLQuantizationType

    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, tensor in extra_tensors.items():
        array = tensor.numpy()
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for spec in gguf_plan:
        size = math.prod(spec.shape) * spec.dtype.itemsize
        ggml_type = GGMLQuantizationType(GGML_TYPES[spec.dtype][0])
        writer.add_tensor_info(spec.name, spec.shape, _numpy_dtype(spec.dtype), size, ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in extra_tensors.values():
        writer.write_tensor_data(tensor.numpy())
    with progress_bar(
        "writing", sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in gguf_plan), "bytes"
    ) as progress:
        for spec in gguf_plan:
            tensor_data = spec.build(tensors)
            assert tensor_data.shape == spec.shape, f"{spec.name}: {tensor_data.shape} is not {spec.shape}"
            bits = tensor_data.view(torch.int16) if tensor_data.itemsize == 2 else tensor_data  # numpy has no bfloat16
            writer.write_tensor_data(bits.numpy())
            progress.advance(bits.numel() * bits.itemsize)


def _numpy_dtype(dtype: torch.dtype) -> Any:
    import numpy as np

    return np.dtype(np.float32 if dtype.itemsize == 4 else np.int16)


def _add_key(writer: "GGUFWriter", key: str, value: Any) -> None:
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
