"""Every causal type of transformers: a family reads it, or the refusal says why not."""

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from heddle.errors import ConfigError
from heddle.exchange.family import NOT_READ_FILE, families, family_of, missing_parts

README = Path(__file__).parents[2] / "README.md"
CAUSAL_TYPES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
OTHER_NAMES: dict[str, str] = json.loads(NOT_READ_FILE.read_text(encoding="utf-8"))["as"]


def test_every_causal_type_is_read_or_listed() -> None:
    known = families().keys() | OTHER_NAMES.keys() | missing_parts().keys()
    assert CAUSAL_TYPES - known == set(), "a new release of transformers has these: list them in not_read.json"


def test_nothing_is_listed_that_is_read_or_gone() -> None:
    listed = OTHER_NAMES.keys() | missing_parts().keys()
    assert listed & families().keys() == set()
    assert listed - set(CONFIG_MAPPING_NAMES) == set()
    assert set(OTHER_NAMES.values()) <= families().keys()


def test_the_readme_counts_the_families() -> None:
    of_transformers = families().keys() & CONFIG_MAPPING_NAMES.keys()
    assert f"{len(of_transformers)} of transformers, fla's RWKV-7, both ways" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("zamba2", "needs one block between several layers that reads the embedding too.*, which heddle lacks"),
        ("rwkv", "needs RWKV-4's mixer, which heddle lacks"),
        ("xmod", "needs adapters for each language, which heddle lacks"),
    ],
)
def test_the_refusal_says_why(model_type: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type '{model_type}' is not supported; .*{why}"):
        family_of({"model_type": model_type}, "config.json")
