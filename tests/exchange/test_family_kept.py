"""A model that came from a family goes back to it: from memory, from a model folder, from a run, and merged."""

from pathlib import Path

import pytest
import torch

import heddle
from heddle.exchange.export import export
from heddle.exchange.family_match import best_match, match_report
from heddle.exchange.imported_checkpoint import imported_family, open_checkpoint
from heddle.exchange.transformers import export as export_decoder
from heddle.exchange.transformers import load as load_decoder
from heddle.model.lora import add_lora, merge_lora
from heddle.storage.manifest import LogPosition
from heddle.training.checkpoint import CheckpointSaver, TrainingProgress, save_run
from heddle.training.init_checkpoint import open_init_checkpoint
from heddle.training.optimizer import build_optimizer
from tests.cases import in_turn
from tests.exchange.cases import CASES
from tests.exchange.hf_models import AutoConfig, imported, read_json, saved

# A variant of each family; of some, one that computes the same as a Llama or another family of lower priority.
LIKE_OTHERS = {"mistral": "no-window-tied", "phi3": "all-longer"}
VARIANTS = [(family, LIKE_OTHERS.get(family, next(iter(case.variants)))) for family, case in CASES.items()]


@pytest.mark.parametrize(("family", "variant"), in_turn(VARIANTS, turn=0))
def test_each_leaves_as_what_it_came(family: str, variant: str, tmp_path: Path) -> None:
    """In memory, and after `heddle.save` and `heddle.load`: the same config.json, with its lengths and token ids."""
    model = imported(family, variant).model
    assert export(model, tmp_path / "out").family.model_type == family
    heddle.save(model, tmp_path / "saved")
    assert imported_family(tmp_path / "saved") == family
    again, _ = heddle.load(tmp_path / "saved")
    assert match_report(again.config, family).architecture == best_match(model.config, family).family.architecture
    assert export(again, tmp_path / "again").family.model_type == family
    assert read_json(tmp_path / "again") == read_json(tmp_path / "out")
    theirs = AutoConfig.from_pretrained(tmp_path / "again")
    assert theirs.model_type == family
    first = AutoConfig.from_pretrained(saved(family, variant)[1])
    assert theirs.to_dict().get("max_position_embeddings") == first.to_dict().get("max_position_embeddings")


@pytest.mark.parametrize("family", LIKE_OTHERS)
def test_the_others_are_taken_where_nothing_is_remembered(family: str) -> None:
    assert best_match(imported(family, LIKE_OTHERS[family]).model.config).family.model_type != family


def test_through_the_package_for_transformers(tmp_path: Path) -> None:
    model, tokenizer = load_decoder(saved("phi3", "plain")[1])
    assert export_decoder(model, tmp_path / "out", tokenizer).family.model_type == "phi3"


def test_a_run_remembers_it_and_adapters_too(tmp_path: Path) -> None:
    heddle.save(imported("phi3", "plain").model, tmp_path / "saved")
    init = open_init_checkpoint(tmp_path / "saved")
    model = init.build_model(init.config, "cpu")
    optimizer = build_optimizer(model, 0.0)
    save_run(CheckpointSaver(tmp_path / "run"), model, optimizer, TrainingProgress(step=1), {}, LogPosition())
    assert imported_family(tmp_path / "run") == "phi3"
    checkpoint = open_checkpoint(tmp_path / "run")
    assert export(checkpoint.model, tmp_path / "out").family.model_type == "phi3"
    assert merge_lora(add_lora(checkpoint.model, ["layers.*.mixer.out"])).imported_config["model_type"] == "phi3"


def test_a_design_that_no_longer_fits_leaves_as_another(tmp_path: Path) -> None:
    """A model of heddle's own has no family, and one that was changed takes what fits."""
    assert imported_family(tmp_path) is None
    assert imported_family("preset:gqa-tiny") is None
    source = imported("phi3", "plain").model
    fresh = heddle.build(source.config)
    assert fresh.imported_config == {}
    assert export(fresh, tmp_path / "fresh").family.model_type == "llama"
    changed = heddle.build(heddle.load_config(source.config.dump(), ["layers.*.mixer.bias=true"]))
    changed.imported_config = dict(source.imported_config)
    assert export(changed, tmp_path / "changed").family.model_type == "llama"
    assert all(torch.isfinite(parameter).all() for parameter in changed.parameters())
