"""Options that tie layers or tokens together in conversions, families and the explorer: kept exactly, or refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from heddle.config import parse_config
from heddle.conversion.convert import Conversion
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import ModelWeights
from heddle.errors import ConfigError
from heddle.exchange.family_match import chosen_match
from heddle.lab.explore.choices import explorer_design
from heddle.laws.harness import random_tokens
from heddle.model.config import ModelConfig
from tests.cases import Data, alone, attention, case, design, indexer, layer
from tests.conversion.exactness import converted_model, difference, source_model
from tests.parts.test_shared_keys import READERS, VALUE_READERS
from tests.parts.test_short_convolution import ALL as CONVOLVED

INDEXED = alone(kv_heads=2, indexer=indexer())
INDEX_IN_PAIR = design(layer({"kind": "pair", "first": attention(), "second": attention(indexer=indexer())}))
ATTENTION_ALONE = ("width=32", "head.tied=false", "fold_norms,final_norm=false")
CHANGED = ("kv_heads=1,groups=contiguous,merge=mean", "window,window=2", "rope_layout,layout=interleaved")


def parsed(data: Data) -> ModelConfig:
    return parse_config(ModelConfig, data)


@pytest.mark.parametrize("target", ATTENTION_ALONE)
@pytest.mark.parametrize(
    "config",
    [parsed(READERS), parsed(VALUE_READERS)]
    + [case(name) for name in ("attention-indexer", "latent-indexer", "latent-indexer-full-query")],
    ids=["shared keys", "value residual", "indexer", "latent indexer", "full query"],
)
def test_conversions_that_leave_attention_alone_keep_the_logits(config: ModelConfig, target: str) -> None:
    source = source_model(config)
    assert difference(source, converted_model(source, parse_rewrite(target))) < 1e-10


@pytest.mark.parametrize("target", ["vocab_size=70", "head.tied=false"])
def test_conversions_that_leave_convolved_layers_alone_keep_the_logits(target: str) -> None:
    source = source_model(parsed(CONVOLVED))
    converted, tokens = converted_model(source, parse_rewrite(target)), random_tokens(source.config, 2, 9)
    want, got = (model.head(model(tokens)[0])[..., :61] for model in (source, converted))
    assert float((got - want).detach().abs().max()) < 1e-10


REFUSED = [
    *((READERS, target, "layers.2.mixer.shared_kv .*: reads the keys and values of layer 0") for target in CHANGED),
    *((VALUE_READERS, target, "layers.3.mixer.value_residual .*: reads the values of layer 1") for target in CHANGED),
    *((INDEXED, target, "layers.0.mixer.indexer .*: selects the keys of each query") for target in CHANGED),
    (INDEX_IN_PAIR, "window,window=2", "layers.0.mixer.second.indexer"),
    *(
        (CONVOLVED, target, "^layers.0.mixer.short_convolution .*: is not supported by")
        for target in (CHANGED[0], "width=32", "fold_norms,final_norm=false", "depth=4", "experts=2")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "target", "message"), REFUSED)
def test_other_conversions_are_refused(data: Data, target: str, message: str) -> None:
    source: Any = SimpleNamespace(weights=ModelWeights(source_model(parsed(data))), tokenizer=None)
    with pytest.raises(ConfigError, match=message):
        Conversion(source, (parse_rewrite(target),)).plan()


GATED: Data = {"kind": "gated", "hidden": 20}
IN_NO_FAMILY: list[tuple[ModelConfig, str, str]] = [
    (case("attention-shared-keys-repeated"), "llama", "shared_kv is true"),
    (
        parsed(design(layer(attention(4), GATED), layer(attention(4, value_residual="learned"), GATED))),
        "llama", "layers.1.mixer.value_residual is learned",
    ),
    (parsed(design(layer(attention(4, value_embedding={}), GATED))), "llama", "layers.0.mixer.value_embedding"),
    (case("relative-bias-shared-bidirectional"), "mpnet", r"mixer\.position\.buckets is 8"),
    (case("attention-indexer"), "llama", "indexer"),
    (case("latent-indexer"), "deepseek_v3", "indexer"),
    (case("rwkv7"), "llama", "mixer.kind is rwkv7"),
    *(
        (case("short-convolution"), family, r"short_convolution is \{'of': \['input', 'q', 'k', 'v'\]")
        for family in ("llama", "mixtral", "gpt2", "lfm2")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "family", "message"), IN_NO_FAMILY)
def test_no_family_takes_them(config: ModelConfig, family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_match(config, family)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (case("latent-indexer"), r"layers\[0\].mixer.indexer: is not a field of the explorer"),
        (parsed(CONVOLVED), r"layers\[0\].mixer.short_convolution: is not known to the explorer"),
    ],
)
def test_the_explorer_shows_no_design_with_them(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explorer_design(config)
