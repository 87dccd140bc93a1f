"""Which family a design fits, why not, and with which overrides it would: these are then taken, and it does."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.exchange.export import export
from heddle.exchange.family import families
from heddle.exchange.family_match import (
    best_match,
    differences,
    exported_design,
    family_lines,
    family_losses,
    match_family,
    match_report,
)
from heddle.exchange.load import load
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from tools.family_facts import about

LAYER: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 2, "position": {"kind": "rope"}},
    "feedforward": {"kind": "gated", "hidden": 24},
}
LLAMA = "preset:gqa-tiny"


def loaded(*overrides: str, preset: str = LLAMA) -> ModelConfig:
    return heddle.load_config(preset, ["vocab_size=97", *overrides])


def test_each_family_of_a_file_says_what_it_is() -> None:
    texts = [about(family) for family in families().values()]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_a_design_that_fits() -> None:
    report = match_report(loaded())
    assert report.lines() == ["exports as: LlamaForCausalLM"]
    assert best_match(loaded()).family.model_type == "llama"


def test_differences_come_in_the_order_of_fields() -> None:
    other = loaded("norm.eps=0.5", "embedding.scale=true", "head.softcap=30.0", "multi_token.depth=1", "head.bias=true")
    names = [mismatch.path.partition(".")[0] for mismatch in differences(loaded(), other)]
    assert list(dict.fromkeys(names)) == [name for name in ModelConfig.model_fields if name in names]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    "override", ["residual.kind=residual_dual", "layers.*.mixer.softcap=30.0", "embedding.scale=true"]
)
def test_what_is_in_the_way_and_that_the_change_removes_it(override: str) -> None:
    report = match_report(loaded(override))
    assert report.architecture == "HeddleForCausalLM"
    path, _, value = override.partition("=")
    assert f"{path} is {value}" in report.reasons
    assert report.nearest is not None
    assert match_report(loaded(override, *report.changes)).architecture == report.nearest


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "mamba", "bert", "gpt2"])
def test_plain_data_leaves_out_only_families_that_differ(name: str) -> None:
    nearest = match_family(loaded(), families()[name])
    design = exported_design(loaded(), nearest.config, nearest.family)
    matches = {other: match_family(design, family, other == name) for other, family in families().items()}
    fitting = [other for other, match in matches.items() if not match.mismatches]
    assert set(family_losses(design, name)) == set(fitting)


def test_an_entry_of_several_layers_is_named_with_their_numbers() -> None:
    layers = [{"repeat": 2, **layer} for layer in (LAYER, LAYER | {"mixer": LAYER["mixer"] | {"softcap": 30.0}})]
    design = {"vocab_size": 97, "width": 16, "layers": layers}
    report = match_report(load_config(design))
    assert "layers.1.mixer.softcap (entry 1, layers 2–3) is 30.0" in report.reasons
    assert match_report(load_config(design, report.changes)).nearest is None


def test_every_family_that_fits_is_listed_with_what_it_loses() -> None:
    design = loaded("residual.dropout=0.1", "layers.*.mixer.dropout=0.2", "initialization.std=0.1")
    fitting = family_losses(design)
    assert next(iter(fitting)) == "llama"
    assert list(fitting)[-1] == "heddle"
    assert {"mistral", "smollm3", "phi3"} <= set(fitting)
    assert fitting["llama"] == ("residual.dropout=0.1",)
    assert fitting["phi3"] == fitting["heddle"] == ()  # phi3 has a field for it
    exact = ", ".join(model_type for model_type, lost in fitting.items() if not lost)
    assert family_lines(design)[:3] == [
        "exports as: LlamaForCausalLM",
        f"  --family: {exact}",
        "  llama: LlamaForCausalLM, without residual.dropout=0.1",
    ]
    assert next(iter(family_losses(design, "smollm3"))) == "smollm3"
    assert (
        family_lines(loaded("residual.kind=residual_dual"))
        == match_report(loaded("residual.kind=residual_dual")).lines()
    )


def test_a_chosen_family_is_written_and_another_is_refused(tmp_path: Path) -> None:
    model = heddle.build(loaded(), seed=0)
    for family in ("mistral", "heddle"):
        assert export(model, tmp_path / family, family=family).family.model_type == family
        again = load(tmp_path / family).model
        assert again.config == model.config
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"family 'qwen2':.*mixer\.bias.*llama"):
        export(model, tmp_path / "qwen2", family="qwen2")
    with pytest.raises(ConfigError, match=r"family 'warp':.*llama"):
        export(model, tmp_path / "warp", family="warp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heddle", "mistral"]


def test_entries_of_a_design_are_named_as_its_file_has_them() -> None:
    design = loaded(preset="preset:local_global-tiny")
    mismatches = match_family(design, families()["llama"]).mismatches
    assert [mismatch.path for mismatch in mismatches] == ["layers.0.layers.0.mixer.window"]
    assert str(mismatches[0]) == "layers.0.layers.0.mixer.window=null"


def test_what_only_training_asks_for_is_no_obstacle() -> None:
    training = ["residual.dropout=0.1", "layers.*.mixer.dropout=0.2", "initialization.std=0.1"]
    training += ["residual.drop_path=0.1", "residual.drop_path_first=0.1"]
    assert match_report(loaded(*training)).architecture == "LlamaForCausalLM"


def test_a_field_that_dumps_leave_out_at_its_default_is_named_with_it() -> None:
    assert match_report(loaded("residual.final_norm=false")).changes == ("residual.final_norm=true",)
