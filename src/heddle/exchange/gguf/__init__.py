"""GGUF, the single file that llama.cpp and what is built on it run: a design, its tokenizer and its weights."""

from heddle.exchange.gguf.export import export_gguf

__all__ = ["export_gguf"]
