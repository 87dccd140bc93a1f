"""Every law on designs in which every two choices of different factors meet; what designs refuse to join is listed."""

import os
import re
from itertools import chain

import pytest

from heddle.config import PARTS, kinds
from heddle.laws import run
from heddle.model.config import ModelConfig
from heddle.parts.context.build import BuildContext
from tests.covering import GOLDEN, IN_LAYERS, all_pairs, covering, random_designs, refused_lines
from tests.laws.planting import plant
from tests.pairs import MODEL, RATES, Draft, Pair, catalogue, layer_choices, model_choices, with_rate

SHARES = 16  # the designs are known only once they are made, so tests take every 16th each
SAMPLE = int(os.environ.get("HEDDLE_SOAK_DESIGNS", "400"))  # about a quarter of an hour of one core
SENTENCE = re.compile(r"[a-z][\w.\[\]]*: [^\n]{10,400}")


def broken(config: ModelConfig) -> list[str]:
    """The laws that a design does not keep, each with its sentence and the design."""
    return [f"{one.name}: {one.message}\n  {config.dump()}" for one in run(config) if not one.passed]


@pytest.mark.parametrize("share", range(SHARES))
def test_every_pair_keeps_the_laws(share: int) -> None:
    designs = covering().designs[share::SHARES]
    assert "\n".join(chain.from_iterable(broken(config) for config, _ in designs)) == ""


def pairs_of(config: ModelConfig) -> set[Pair]:
    """The choices that meet in a design, read off its config."""
    place, bare = BuildContext(config.width, config.norm), with_rate(config, 0.0)
    labels = {(MODEL, factor): label for factor, label, _ in model_choices(bare)}
    labels[MODEL, RATES] = "off" if bare == config else "on"
    for index, (_, layer) in enumerate(bare.expand()):
        labels |= {(index, factor): label for factor, label, _ in layer_choices(layer, place)}
    return Draft({site: label for site, label in labels.items() if site[1] in catalogue()}).pairs()


def test_every_pair_is_in_a_design_or_refused() -> None:
    met = set(chain.from_iterable(pairs_of(config) for config, _ in covering().designs))
    refused = covering().refused.keys()
    assert [pair for pair in all_pairs() if (pair in met) == (pair in refused)] == []


def test_every_kind_is_a_choice() -> None:
    words = {word for labels in catalogue().values() for label in labels for word in label.split()}
    slots = [folder.name for folder in PARTS.iterdir() if (folder / "__init__.py").is_file()]
    assert [kind for slot in slots for kind in kinds(slot) if kind not in words] == []
    assert set(IN_LAYERS) < set(catalogue())


def test_refusals_are_sentences() -> None:
    assert [told for told in covering().refused.values() if not SENTENCE.fullmatch(told)] == []


def test_refused_pairs_are_the_known_ones() -> None:
    assert GOLDEN.read_text(encoding="utf-8").splitlines() == refused_lines(), "run: python -m tests.covering"


def test_a_bug_in_a_part_is_seen_in_a_design_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = next(
        pair for pair in covering().designs if {"attention with a window", "parallel"} <= set(pair[1].labels.values())
    )
    assert broken(config) == []
    plant(monkeypatch, "numerics.attention.sliding_window:Band.keys_after", "0 if self.causal", "1 if self.causal")
    assert any(told.startswith("causality: ") for told in broken(config))


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_random_designs_keep_the_laws(share: int) -> None:
    told = []
    for made in random_designs(SAMPLE // SHARES, seed=share):
        if isinstance(made, str):
            assert SENTENCE.fullmatch(made), made
        else:
            told += broken(made)
    assert "\n".join(told) == ""
