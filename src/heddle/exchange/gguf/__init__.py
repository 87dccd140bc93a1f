"""Read and write GGUF, the single-file format of llama.cpp and programs built on it: config, tokenizer and weights."""

from heddle.exchange.gguf.export import export_gguf
from heddle.exchange.gguf.read import load_gguf

__all__ = ["export_gguf", "load_gguf"]
