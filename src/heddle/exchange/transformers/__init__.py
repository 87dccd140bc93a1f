"""heddle in transformers: importing this package registers its classes, so that the Auto classes read its folders."""

from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from heddle.exchange import export as _export
from heddle.exchange import load as _load
from heddle.exchange.fit import Fit
from heddle.exchange.transformers.cache import HeddleCache
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.modeling import HeddleForCausalLM, HeddleModel
from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer

__all__ = ["HeddleCache", "HeddleConfig", "HeddleForCausalLM", "HeddleModel", "export", "load"]

AutoConfig.register(HeddleConfig.model_type, HeddleConfig)
AutoModel.register(HeddleConfig, HeddleModel)
AutoModelForCausalLM.register(HeddleConfig, HeddleForCausalLM)
# Servers look the class of a folder up by its name.
for _class in (HeddleConfig, HeddleModel, HeddleForCausalLM):
    setattr(transformers, _class.__name__, _class)


def load(folder: str | Path) -> tuple[Decoder, Tokenizer | None]:
    """A folder of any family that heddle reads -> the model and its tokenizer. Raises as `heddle.exchange.load`."""
    found = _load.load(folder)
    return found.model, found.tokenizer


def export(model: Decoder | HeddleForCausalLM, folder: str | Path, tokenizer: Tokenizer | None = None) -> Fit:
    """Write a folder that transformers reads, as a known family where one fits, and say which."""
    return _export.export(model if isinstance(model, Decoder) else model.of_heddle, folder, tokenizer)
