"""heddle's models for transformers. Importing this package registers them, so that the Auto classes load them.

A folder of such a model names them too (`auto_map`), for programs that do not import this package.
"""

from pathlib import Path

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from heddle.exchange import export as _export
from heddle.exchange import load as _load
from heddle.exchange.family_match import FamilyMatch
from heddle.exchange.transformers.cache import HeddleCache
from heddle.exchange.transformers.config import HeddleConfig
from heddle.exchange.transformers.modeling import (
    HeddleForCausalLM,
    HeddleForSequenceClassification,
    HeddleForTokenClassification,
    HeddleModel,
)
from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer

__all__ = [
    "HeddleCache",
    "HeddleConfig",
    "HeddleForCausalLM",
    "HeddleForSequenceClassification",
    "HeddleForTokenClassification",
    "HeddleModel",
    "export",
    "load",
]

AutoConfig.register(HeddleConfig.model_type, HeddleConfig)
AutoModel.register(HeddleConfig, HeddleModel)
AutoModelForCausalLM.register(HeddleConfig, HeddleForCausalLM)
AutoModelForSequenceClassification.register(HeddleConfig, HeddleForSequenceClassification)
AutoModelForTokenClassification.register(HeddleConfig, HeddleForTokenClassification)
# Pipelines and lm-eval ask these tables, which `register` leaves as they are, what a model gives.
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[HeddleConfig.model_type] = HeddleForCausalLM.__name__
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[HeddleConfig.model_type] = (
    HeddleForSequenceClassification.__name__
)
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[HeddleConfig.model_type] = (
    HeddleForTokenClassification.__name__
)
# `transformers serve` and TRL look up the class of a folder by its name in the module transformers. That module is
# replaced in sys.modules when processing_utils is first imported, which PEFT and Trainer do, and whoever imported it
# before has the old one. Attributes of the modules' class are found in all of them.
_CLASSIFIERS = (HeddleForSequenceClassification, HeddleForTokenClassification)
for _class in (HeddleConfig, HeddleModel, HeddleForCausalLM, *_CLASSIFIERS):
    setattr(type(transformers), _class.__name__, _class)


def load(folder: str | Path) -> tuple[Decoder, Tokenizer | None]:
    """Load model and tokenizer from a folder of any family that heddle reads. Raises as `heddle.exchange.load`."""
    imported = _load.load(folder)
    return imported.model, imported.tokenizer


def export(
    model: Decoder | HeddleForCausalLM,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    family: str | None = None,
) -> FamilyMatch:
    """Write a folder that transformers reads, as `family`, or as a known family if one matches. Returns the family.

    Raises ConfigError if the family that was chosen does not fit.
    """
    decoder = model if isinstance(model, Decoder) else model.heddle_decoder
    return _export.export(decoder, folder, tokenizer, family=family)
