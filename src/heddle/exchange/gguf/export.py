"""Write a model atomically as one GGUF file. A design that llama.cpp cannot run is refused.

Weights keep their values, except for rounding to the requested dtype, and Gemma's norms, to which 1 is added.
"""

import ctypes
import errno
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from heddle.errors import CheckpointError, ConfigError, MachineError, pip_install
from heddle.exchange import design_parts
from heddle.exchange.export import HFTensors
from heddle.exchange.families._common import DEFAULT_MAX_POSITIONS
from heddle.exchange.family_match import FamilyMatch
from heddle.exchange.gguf.architectures import Architecture, GGUFTensor, gguf_tensors
from heddle.exchange.gguf.file import HASH_KEY, NO_DIGITS, seal
from heddle.exchange.gguf.match import match_architecture, ropes_of
from heddle.exchange.gguf.tokenizer import tokenizer_keys
from heddle.exchange.imported_checkpoint import ImportedModel
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig
from heddle.progress import progress_bar
from heddle.storage import file_io
from heddle.storage.lock import lock_output
from heddle.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROPE_FACTORS = "rope_freqs.weight"
# dtype -> its number in a tensor's entry, and its number in `general.file_type`.
GGML_TYPES = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}
Q8_0, Q8_0_FILE_TYPE = 8, 7  # blocks of 32 signed bytes with one scale, float16
Q8_0_BLOCK, Q8_0_BYTES = 32, 34


def export_gguf(
    model: Decoder,
    file: str | Path,
    tokenizer: Tokenizer | None = None,
    imported: ImportedModel | None = None,
    dtype: torch.dtype | None = None,
    q8_0: bool = False,
    k_quant: str | None = None,
    library: Path | None = None,
) -> tuple[FamilyMatch, str]:
    """Write `file`. Returns the family that the design matches, and the name of llama.cpp's graph for it.

    imported: the import whose lengths are written, if not the model's own. dtype: of matrices, float32, float16 or
    bfloat16; None is the model's own. q8_0: quantize matrices whose rows are multiples of 32 long to blocks of 8 bits,
    as llama.cpp does; other matrices are float16. k_quant: a name of K_QUANTS, by which llama.cpp's library quantizes
    matrices, some of them to more bits. library: its file; None: a Python binding's.
    Raises ConfigError for an unsupported design or dtype or a missing package, DataError for a tokenizer that llama.cpp
    does not know, CheckpointError if `file` exists and is not a GGUF, MachineError if it cannot be written.
    """
    file = Path(file)
    llama = None if k_quant is None else open_library(library)
    dtype = torch.float32 if q8_0 or k_quant else _matrix_dtype(model, dtype)
    imported_config = (model if imported is None else imported.model).imported_config
    match, graph = match_architecture(model.config, imported_config.get("model_type"))
    check_package()
    tensors = HFTensors(graph.stored(match.family), model)
    keys = {HASH_KEY: NO_DIGITS} | _model_keys(match.config, model, graph, imported_config)
    keys |= {"general.name": file.stem, "general.file_type": Q8_0_FILE_TYPE if q8_0 else GGML_TYPES[dtype][1]}
    rows = model.config.vocab_size or 0
    keys |= {"tokenizer.ggml.model": "none"} if tokenizer is None else tokenizer_keys(tokenizer, rows)
    if graph.encoder:
        keys |= {"tokenizer.ggml.token_type_count": match.config["type_vocab_size"]}
    plan = [_StoredTensor.of(spec, q8_0) for spec in gguf_tensors(tensors, match.config, graph, dtype)]
    quantize = None
    if k_quant is not None and llama is not None:
        check_rows([stored.spec for stored in plan], k_quant)
        quantize = partial(quantize_file, kind=k_quant, llama=llama, name=file)
    _write(file, graph.name, keys, plan, tensors, _rope_factors(model), quantize)
    return match, graph.name


def _matrix_dtype(model: Decoder, dtype: torch.dtype | None) -> torch.dtype:
    model_dtype = next(model.parameters()).dtype
    dtype = dtype or (torch.float32 if model_dtype == torch.float64 else model_dtype)
    if dtype not in GGML_TYPES:
        names = ", ".join(str(supported).removeprefix("torch.") for supported in GGML_TYPES)
        raise ConfigError(f"dtype {dtype}: heddle writes a GGUF in {names}; give one of these")
    return dtype


def check_package() -> None:
    """Raises ConfigError if the package gguf is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"a GGUF is read and written with the package gguf, which is missing: {pip_install('gguf')}"
        ) from None


def _model_keys(
    config: dict[str, Any], model: Decoder, graph: Architecture, preserved: dict[str, Any]
) -> dict[str, Any]:
    """The GGUF keys of a model, without its tokenizer's."""
    design = model.config
    mixer = design_parts.first_attention(design.resolved())
    head_dim = mixer.head_dim or design.width // mixer.heads
    lengths = [
        values.get(name) for values in (preserved, config) for name in ("max_position_embeddings", "n_positions")
    ]
    keys = {
        "context_length": next((length for length in lengths if length), DEFAULT_MAX_POSITIONS),
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
        **_rope_keys(model.config, head_dim, graph.yarn_log),
        **({} if graph.gating is None else {"expert_gating_func": graph.gating}),
        **graph.extra_keys(config),
    }
    return {"general.type": "model"} | {f"{graph.name}.{name}": value for name, value in keys.items()}


def _rope_keys(design: ModelConfig, head_dim: int, yarn_log: float | None) -> dict[str, Any]:
    if not any(design_parts.has_rope(mixer) for mixer in design_parts.mixers(design.resolved())):
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
        if rope.scaling.mscale_all_dim is not None and yarn_log is not None:
            keys["rope.scaling.yarn_log_multiplier"] = yarn_log * rope.scaling.mscale_all_dim
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


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor as the file stores it. ggml_type: the number of its type."""

    spec: GGUFTensor
    ggml_type: int

    @classmethod
    def of(cls, spec: GGUFTensor, q8_0: bool) -> "_StoredTensor":
        if not q8_0 or not spec.may_quantize:
            return cls(spec, GGML_TYPES[spec.dtype][0])
        return cls(spec, GGML_TYPES[torch.float16][0] if spec.shape[-1] % Q8_0_BLOCK else Q8_0)

    @property
    def numpy_dtype(self) -> Any:
        import numpy as np

        return np.dtype({0: np.float32, Q8_0: np.uint8}.get(self.ggml_type, np.int16))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array that is written; quantized rows are counted in bytes."""
        *rows, columns = self.spec.shape
        return (*rows, columns // Q8_0_BLOCK * Q8_0_BYTES if self.ggml_type == Q8_0 else columns)

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.stored_shape) * int(self.numpy_dtype.itemsize)

    def build(self, tensors: HFTensors) -> Any:
        """The array that is written; bfloat16, which numpy lacks, is written as 16-bit integers."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        tensor = self.spec.build(tensors)
        assert tensor.shape == self.spec.shape, f"{self.spec.name}: {tensor.shape} is not {self.spec.shape}"
        if self.ggml_type == Q8_0:
            return quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
        if self.numpy_dtype.itemsize == 2 and tensor.itemsize == 4:
            tensor = tensor.to(torch.float16)
        return (tensor.view(torch.int16) if tensor.itemsize == 2 else tensor).numpy()


def _write(
    file: Path,
    graph_name: str,
    keys: dict[str, Any],
    plan: list[_StoredTensor],
    tensors: HFTensors,
    extra_tensors: dict[str, torch.Tensor],
    quantize: Callable[[Path, Path], None] | None,
) -> None:
    """Write the file atomically. quantize: makes the file from one in full precision."""
    _check_target(file)
    from gguf import GGUFWriter

    with lock_output(file), file_io.replace_file(file) as temporary, ExitStack() as stack:
        written = temporary
        if quantize is not None:
            written = file_io.leftover_path(file, "tmp")
            stack.callback(written.unlink, missing_ok=True)
        writer = GGUFWriter(written, graph_name)
        try:
            _write_contents(writer, keys, plan, tensors, extra_tensors)
        except OSError as error:
            if error.errno is None:  # numpy reports a short write without a number
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
        finally:
            writer.close()
        if quantize is not None:
            quantize(written, temporary)
        seal(temporary)


def _check_target(file: Path) -> None:
    if file.suffix != ".gguf":
        raise CheckpointError(f"{file}: should be the name of a file that ends in .gguf")
    if file.is_dir():
        raise CheckpointError(f"{file}: is a folder; name a file")
    if file.is_file():  # the replacement refuses anything else
        with file_io.open_regular_file(file) as (descriptor, size):
            start = bytearray(min(size, len(file_io.GGUF_MAGIC)))
            file_io.read_exactly(descriptor, memoryview(start), file)
        if start != file_io.GGUF_MAGIC:
            raise CheckpointError(f"{file}: exists and is not a GGUF; choose another name")


def _write_contents(
    writer: "GGUFWriter",
    keys: dict[str, Any],
    plan: list[_StoredTensor],
    tensors: HFTensors,
    extra_tensors: dict[str, torch.Tensor],
) -> None:
    from gguf import GGMLQuantizationType

    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, tensor in extra_tensors.items():
        array = tensor.numpy()
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for stored in plan:
        ggml_type = GGMLQuantizationType(stored.ggml_type)
        writer.add_tensor_info(stored.spec.name, stored.stored_shape, stored.numpy_dtype, stored.bytes, ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in extra_tensors.values():
        writer.write_tensor_data(tensor.numpy())
    with progress_bar("writing", sum(stored.bytes for stored in plan), "bytes") as progress:
        for stored in plan:
            writer.write_tensor_data(stored.build(tensors))
            progress.advance(stored.bytes)


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


# K-quants by llama.cpp's own quantizer, called in its library, which bindings for Python and Node.js bring. The
# library's parameters begin with the number of threads and of the kind; the others keep llama.cpp's defaults.


K_QUANTS = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}  # llama.cpp's numbers of them, of a whole file
K_BLOCK = 256  # numbers of a block, which lie in one row
PACKAGES = {"llama_cpp": "lib", "llama_cpp_py_sync": "."}  # bindings, and the folder of the library in each
LIBRARIES = ("libllama.so", "libllama.dylib", "llama.dll")
# The field that a tensor's rows are as long as; others are as long as the width.
ROW_FIELDS = {
    "ffn_down": "layers.*.feedforward.hidden",
    "attn_output": "layers.*.mixer.head_dim",
    "attn_q_b": "layers.*.mixer.query_rank",
    "attn_k_b": "layers.*.mixer.nope_dim",
    "attn_v_b": "layers.*.mixer.kv_rank",
    "ssm_out": "layers.*.mixer.head_dim",
}


class _Parameters(ctypes.Structure):
    """llama_model_quantize_params; `rest` is longer than any version's."""

    _fields_ = (("threads", ctypes.c_int32), ("kind", ctypes.c_int32), ("rest", ctypes.c_byte * 1016))


def check_rows(tensors: Iterable[GGUFTensor], kind: str) -> None:
    """Raises ConfigError, naming the field, for a matrix whose rows are not whole blocks."""
    for tensor in tensors:
        if tensor.may_quantize and tensor.shape[-1] % K_BLOCK:
            role = tensor.name.removesuffix(".weight").rpartition(".")[2]
            field = next((field for start, field in ROW_FIELDS.items() if role.startswith(start)), "width")
            raise ConfigError(
                f"{field}: rows of {tensor.name} are {tensor.shape[-1]} numbers long, and {kind} has blocks of"
                f" {K_BLOCK}; choose q8_0, or a multiple of {K_BLOCK}"
            )


def open_library(file: Path | None = None) -> ctypes.CDLL:
    """llama.cpp's library: the file, or a Python binding's. Raises ConfigError if there is none."""
    file = file or _library_of_a_binding()
    try:
        library = ctypes.CDLL(str(file.resolve()))
        library.llama_model_quantize, library.llama_model_quantize_default_params, library.llama_log_set  # noqa: B018
    except (AttributeError, OSError) as error:
        raise ConfigError(f"{file}: is not llama.cpp's library ({error}); give another with --library") from error
    return library


def _library_of_a_binding() -> Path:
    for package, folder in PACKAGES.items():
        spec = find_spec(package)
        for place in [] if spec is None else spec.submodule_search_locations or []:
            for name in LIBRARIES:
                if (Path(place) / folder / name).is_file():
                    return Path(place) / folder / name
    raise ConfigError(
        "K-quants are made by llama.cpp's library, which is missing; give its file with --library, "
        "or `pip install llama-cpp-python`, or choose q8_0"
    )


def quantize_file(source: Path, target: Path, kind: str, llama: ctypes.CDLL, name: Path) -> None:
    """Write `target`, `source` with matrices of a kind of K_QUANTS.

    name: of the file in errors. Raises MachineError if llama.cpp fails.
    """
    messages: list[str] = []

    def log(level: int, text: bytes, _: object) -> None:
        messages.append(text.decode("utf-8", "replace").strip())

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(log)
    llama.llama_log_set(callback, None)
    llama.llama_model_quantize_default_params.restype = _Parameters
    parameters = llama.llama_model_quantize_default_params()
    parameters.threads, parameters.kind = 1, K_QUANTS[kind]
    llama.llama_model_quantize.restype = ctypes.c_uint32
    failed = llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    llama.llama_log_set(None, None)
    if failed:
        reason = messages[-1] if messages else "it gives no reason"
        raise MachineError(f"{name}: llama.cpp could not quantize it ({reason}); choose q8_0, or free some space")
