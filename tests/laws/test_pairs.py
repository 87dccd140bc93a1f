"""Every law on designs with every option; in the night, on those that combine every two choices of different factors.

Pairs that are refused are listed.
"""

import os
import re
from itertools import chain

import pytest

from heddle.config import kinds
from heddle.model.config import ModelConfig
from heddle.numerics.attention.sliding_window import Band
from heddle.parts.build import BuildContext
from tests.covering import (
    GOLDEN,
    IN_LAYERS,
    all_pairs,
    covering,
    designs_with_every_option,
    options_of,
    random_designs,
    refused_lines,
)
from tests.laws.planting import result
from tests.laws.violations import OF_ONE_PART, OF_PAIRS, OPTIONS, OTHERS, violations_of
from tests.pairs import MODEL, RATES, Draft, Pair, catalogue, layer_choices, model_choices, with_rate
from tests.source import slots

SHARES, FEW_SHARES = 16, 4  # the designs are unknown at collection, so each test takes every 16th, or 4th
SAMPLE = int(os.environ.get("HEDDLE_SOAK_DESIGNS", "400"))  # about a quarter of an hour of one core
SENTENCE = re.compile(r"[a-z][\w.\[\]]*: [^\n]{10,400}")


@pytest.mark.parametrize("share", range(SHARES))
def test_every_option_satisfies_the_laws(share: int) -> None:
    """On a few designs that have, together, every option of the cases; test_laws.py has the rest."""
    for config in designs_with_every_option()[share::SHARES]:
        assert "\n".join(violations_of(config, OTHERS)) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("share", range(SHARES))
def test_every_pair_satisfies_the_laws(share: int) -> None:
    for config, _ in covering().designs[share::SHARES]:
        assert "\n".join(violations_of(config, OF_PAIRS)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_every_pair_satisfies_the_laws_of_one_part(share: int) -> None:
    designs = covering().designs[share::SHARES]
    assert "\n".join(chain.from_iterable(violations_of(config, OF_ONE_PART) for config, _ in designs)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("share", range(FEW_SHARES))
def test_every_option_has_an_effect(share: int) -> None:
    designs = designs_with_every_option()[share::FEW_SHARES]
    assert "\n".join(chain.from_iterable(violations_of(config, [OPTIONS]) for config in designs)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_every_option_has_an_effect_beside_every_other_choice(share: int) -> None:
    designs = covering().designs[share::SHARES]
    assert "\n".join(chain.from_iterable(violations_of(config, [OPTIONS]) for config, _ in designs)) == ""


def pairs_of(config: ModelConfig) -> set[Pair]:
    """The pairs of choices in a design, read from its config."""
    context, bare = BuildContext(config.width, config.norm), with_rate(config, 0.0)
    labels = {(MODEL, factor): label for factor, label, _ in model_choices(bare)}
    labels[MODEL, RATES] = "off" if bare == config else "on"
    for index, (_, layer) in enumerate(bare.expand()):
        labels |= {(index, factor): label for factor, label, _ in layer_choices(layer, context)}
    return Draft({site: label for site, label in labels.items() if site[1] in catalogue()}).pairs()


@pytest.mark.nightly
def test_every_pair_is_covered_or_refused() -> None:
    covered = set(chain.from_iterable(pairs_of(config) for config, _ in covering().designs))
    refused = covering().refused.keys()
    assert [pair for pair in all_pairs() if (pair in covered) == (pair in refused)] == []


def test_every_kind_is_in_the_catalogue() -> None:
    words = {word for labels in catalogue().values() for label in labels for word in label.split()}
    assert [kind for slot in slots() for kind in kinds(slot) if kind not in words] == []
    assert set(IN_LAYERS) < set(catalogue())


@pytest.mark.nightly
def test_refusals_are_sentences() -> None:
    assert [message for message in covering().refused.values() if not SENTENCE.fullmatch(message)] == []


@pytest.mark.nightly
def test_refused_pairs_equal_the_golden_file() -> None:
    assert GOLDEN.read_text(encoding="utf-8").splitlines() == refused_lines(), "run: python -m tests.covering"


def test_a_planted_bug_is_caught_in_a_covering_design(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = [each for each in designs_with_every_option() if "attention.window: a number" in options_of(each)]
    assert [violation for config in windowed for violation in violations_of(config, ["causality"])] == []
    result(Band.keys_after, lambda keys: keys + 1)(monkeypatch)
    found = [violation for config in windowed for violation in violations_of(config, ["causality"])]
    assert any(violation.startswith("causality: ") for violation in found)


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_random_designs_satisfy_the_laws(share: int) -> None:
    violations = []
    for config in random_designs(SAMPLE // SHARES, seed=share):
        if isinstance(config, str):
            assert SENTENCE.fullmatch(config), config
        else:
            violations += violations_of(config)
    assert "\n".join(violations) == ""
