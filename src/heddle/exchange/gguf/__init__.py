"""Write GGUF, the single-file format of llama.cpp and programs built on it: config, tokenizer and weights."""

from heddle.exchange.gguf.export import export_gguf

__all__ = ["export_gguf"]
