"""Read and write GGUF, the single-file format of llama.cpp and programs built on it: config, tokenizer and weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heddle.exchange.gguf.export import export_gguf as export_gguf
    from heddle.exchange.gguf.read import load_gguf as load_gguf

__all__ = ["export_gguf", "load_gguf"]
_HOMES = {"export_gguf": "export", "load_gguf": "read"}


def __getattr__(name: str) -> Any:  # so that importing one module of the folder imports no other
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
