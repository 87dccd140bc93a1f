"""K-quants by llama.cpp's own quantizer, called in its library, which bindings for Python and Node.js bring.

The library's parameters begin with the number of threads and of the kind; the others keep llama.cpp's defaults.
"""

import ctypes
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from heddle.errors import ConfigError, MachineError
from heddle.exchange.gguf.architectures import GGUFTensor

K_QUANTS = {"q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}  # llama.cpp's numbers of them, of a whole file
K_BLOCK = 256  # numbers of a block, which lie in one row
PACKAGES = {"llama_cpp": "lib", "llama_cpp_py_sync": "."}  # and the folder of the library in each
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
    """llama.cpp's library: the file, or that of a Python binding. Raises ConfigError if there is none."""
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
        f"or install a package that brings it ({', '.join(PACKAGES)}), or choose q8_0"
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
        reason = messages[-1] if messages else "it says no reason"
        raise MachineError(f"{name}: llama.cpp could not quantize it ({reason}); choose q8_0, or free some space")
