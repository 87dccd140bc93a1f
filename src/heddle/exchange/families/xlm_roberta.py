"""XLM-RoBERTa (Conneau et al. 2019): RoBERTa with the vocabulary of a hundred languages, under names of its own."""

from dataclasses import replace
from functools import partial

from heddle.exchange.families import roberta

BASE = "XLMRobertaModel"  # without a language head

FAMILY = replace(
    roberta.FAMILY,
    model_type="xlm-roberta",
    architecture="XLMRobertaForMaskedLM",
    read_config=partial(roberta.read_config, base=BASE),
    write_config=partial(roberta.write_config, base=BASE),
)
