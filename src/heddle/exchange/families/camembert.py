"""CamemBERT (Martin et al. 2020): RoBERTa with a French vocabulary, under names of its own."""

from dataclasses import replace
from functools import partial

from heddle.exchange.families import roberta

BASE = "CamembertModel"  # without a language head

FAMILY = replace(
    roberta.FAMILY,
    model_type="camembert",
    architecture="CamembertForMaskedLM",
    read_config=partial(roberta.read_config, base=BASE),
    write_config=partial(roberta.write_config, base=BASE),
)
