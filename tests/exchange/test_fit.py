"""Which family a design fits, why not, and with which overrides it would: these are then taken, and it does."""

import pytest

import heddle
from heddle.exchange.family import families
from heddle.exchange.fit import best, fit, fits, service
from tests.cases import CASES, case

LLAMA = "preset:gqa-tiny"


def loaded(*overrides: str, preset: str = LLAMA) -> "heddle.model.config.ModelConfig":
    return heddle.load_config(preset, ["vocab_size=97", *overrides])


def test_a_design_that_fits() -> None:
    told = service(loaded())
    assert told.lines() == ["serves as: LlamaForCausalLM"]
    assert best(loaded()).family.model_type == "llama"


@pytest.mark.parametrize(
    "override", ["residual.kind=residual_dual", "layers.*.mixer.scale=0.7", "embedding.scale=true"]
)
def test_what_is_in_the_way_and_that_the_change_removes_it(override: str) -> None:
    told = service(loaded(override))
    assert told.architecture == "HeddleForCausalLM"
    path, _, value = override.partition("=")
    assert f"{path} is {value}" in told.reasons
    assert told.nearest is not None
    assert service(loaded(override, *told.changes)).architecture == told.nearest


def test_entries_of_a_design_are_named_as_its_file_has_them() -> None:
    design = loaded(preset="preset:local_global-tiny")
    told = fit(design, families()["llama"]).obstacles
    assert [one.path for one in told] == ["layers.0.layers.0.mixer.window"]
    assert str(told[0]) == "layers.0.layers.0.mixer.window=null"


def test_what_only_training_asks_for_is_no_obstacle() -> None:
    training = ["residual.dropout=0.1", "layers.*.mixer.dropout=0.2", "initialisation.std=0.1"]
    assert service(loaded(*training)).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("name", CASES)
def test_any_design_is_compared_with_every_family(name: str) -> None:
    """`write` may not fail; what it cannot say must show."""
    for found in fits(case(name)):
        if not found.obstacles:
            assert found.family.model_type != "heddle"
    own = fit(case(name), families()["heddle"])
    assert own.obstacles == ()
