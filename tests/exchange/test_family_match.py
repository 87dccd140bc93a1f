"""Which family a design fits, why not, and with which overrides it would: these are then taken, and it does."""

import pytest

import heddle
from heddle.exchange.family import families
from heddle.exchange.family_match import best_match, match_family, match_report, rank_families
from tests.cases import CASES, case

LLAMA = "preset:gqa-tiny"


def loaded(*overrides: str, preset: str = LLAMA) -> "heddle.model.config.ModelConfig":
    return heddle.load_config(preset, ["vocab_size=97", *overrides])


def test_a_design_that_fits() -> None:
    report = match_report(loaded())
    assert report.lines() == ["exports as: LlamaForCausalLM"]
    assert best_match(loaded()).family.model_type == "llama"


@pytest.mark.parametrize(
    "override", ["residual.kind=residual_dual", "layers.*.mixer.scale=0.7", "embedding.scale=true"]
)
def test_what_is_in_the_way_and_that_the_change_removes_it(override: str) -> None:
    report = match_report(loaded(override))
    assert report.architecture == "HeddleForCausalLM"
    path, _, value = override.partition("=")
    assert f"{path} is {value}" in report.reasons
    assert report.nearest is not None
    assert match_report(loaded(override, *report.changes)).architecture == report.nearest


def test_entries_of_a_design_are_named_as_its_file_has_them() -> None:
    design = loaded(preset="preset:local_global-tiny")
    mismatches = match_family(design, families()["llama"]).mismatches
    assert [mismatch.path for mismatch in mismatches] == ["layers.0.layers.0.mixer.window"]
    assert str(mismatches[0]) == "layers.0.layers.0.mixer.window=null"


def test_what_only_training_asks_for_is_no_obstacle() -> None:
    training = ["residual.dropout=0.1", "layers.*.mixer.dropout=0.2", "initialization.std=0.1"]
    assert match_report(loaded(*training)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", CASES)
def test_any_design_is_compared_with_every_family(name: str) -> None:
    """`write` may not fail; what it cannot say must show."""
    for match in rank_families(case(name)):
        if not match.mismatches:
            assert match.family.model_type != "heddle"
    own = match_family(case(name), families()["heddle"])
    assert own.mismatches == ()
