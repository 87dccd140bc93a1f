"""Models of transformers to compare with: of a design, with equal weights, or of a folder."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging

from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.model.config import ModelConfig
from heddle.model.decoder import build


def transformers_model(config: ModelConfig) -> Any:
    """The model with the weights of `heddle.build`, float32 on the CPU. The design fits a family of transformers."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="heddle-") as folder:
        export(build(config), Path(folder, "model"))
        return AutoModelForCausalLM.from_pretrained(Path(folder, "model"))


def opened(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """The model of a folder by the class that its config.json names. attention: such as `eager` or `sdpa`.

    Raises ConfigError, saying why, if this release has no such class or cannot build the model.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}")
    options = {"dtype": dtype, "attn_implementation": attention, "experts_implementation": "eager"}
    try:
        return cls.from_pretrained(folder, **options).eval()
    except (ValueError, ImportError, StrictDataclassError) as error:
        raise ConfigError(" ".join(str(error).split())[:200]) from error


def static_cache(model: Any, length: int) -> Any:
    """A cache of a fixed length. Raises ConfigError if the model's class does not say that it takes one."""
    if not model._can_compile_fullgraph:
        raise ConfigError(f"{type(model).__name__} does not declare that it supports a static cache")
    return StaticCache(config=model.config, max_cache_len=length)
