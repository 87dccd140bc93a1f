"""heddle's models for transformers. Importing this package registers them, so that the Auto classes load them."""

import importlib
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from heddle.exchange import export as _export
from heddle.exchange import load as _load
from heddle.exchange.family_match import FamilyMatch
from heddle.exchange.transformers.cache import HeddleCache
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.modeling import HeddleForCausalLM, HeddleModel
from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer

__all__ = ["HeddleCache", "HeddleConfig", "HeddleForCausalLM", "HeddleModel", "export", "load"]

AutoConfig.register(HeddleConfig.model_type, HeddleConfig)
AutoModel.register(HeddleConfig, HeddleModel)
AutoModelForCausalLM.register(HeddleConfig, HeddleForCausalLM)
# `transformers serve` looks up the class of a folder by its name in the module transformers. That module is replaced in
# sys.modules when processing_utils is first imported, which PEFT and Trainer do: both have the names.
importlib.import_module("transformers.processing_utils")
for _module in (transformers, sys.modules["transformers"]):
    for _class in (HeddleConfig, HeddleModel, HeddleForCausalLM):
        setattr(_module, _class.__name__, _class)


def load(folder: str | Path) -> tuple[Decoder, Tokenizer | None]:
    """Load model and tokenizer from a folder of any family that heddle reads. Raises as `heddle.exchange.load`."""
    imported = _load.load(folder)
    return imported.model, imported.tokenizer


def export(model: Decoder | HeddleForCausalLM, folder: str | Path, tokenizer: Tokenizer | None = None) -> FamilyMatch:
    """Write a folder that transformers reads, as a known family if one matches. Returns the family."""
    return _export.export(model if isinstance(model, Decoder) else model.heddle_decoder, folder, tokenizer)
