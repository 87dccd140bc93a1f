"""Plans of comparisons: names never clash, all designs share one vocabulary, and warnings are given where due."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.lab.compare.plan import ComparisonPlan, DesignEntry, load_entries, plan_warnings, shared_vocab_size
from tests import small


def entries(*designs: tuple[str, dict[str, Any]]) -> tuple[DesignEntry, ...]:
    return tuple(DesignEntry(name, name, small.config(data)) for name, data in designs)


def plan(*designs: DesignEntry, **changes: Any) -> ComparisonPlan:
    base = ComparisonPlan(
        entries=designs,
        data=("text",),
        budget_kind="tokens",
        budget_value=1000.0,
        seeds=(0, 1),
        batch_size=4,
        sequence_length=16,
        learning_rate=1e-3,
        optimizer="adamw",
        schedule="wsd",
        warmup=None,
        lr_scale=(),
        precision="fp32",
        vocab_size=300,
        tokenizer=None,
        device="cpu",
        threads=1,
        part_files=(),
        speed_contexts=(32,),
        recall_probes=("mqar",),
        max_length_multiple=8,
    )
    return dataclasses.replace(base, **changes)


def test_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = [
        small.design_file(tmp_path / name)
        for name in ("a#2.yaml", "a.yaml", "sub/a.yaml", "with space.yaml", "v1.0.yaml", "a=b.yaml")
    ]
    sources = [*map(str, files), "preset:gqa-tiny", "preset:gqa-tiny", "preset:gqa-tiny"]
    named = [entry.name for entry in load_entries(sources, [])]
    assert named == ["a#2", "a", "a#3", "with space", "v1.0", "a=b", "gqa-tiny", "gqa-tiny#2", "gqa-tiny#3"]
    assert [entry.source for entry in load_entries(sources, [])] == sources


def test_a_folder_is_named_by_its_whole_name(tmp_path: Path) -> None:
    folder = tmp_path / "model.v2"
    folder.mkdir()
    (folder / "config.json").write_text('{"width": 16, "layers": [{"mixer": {"kind": "attention", "heads": 2}}]}')
    assert load_entries([f"{folder}/"], [])[0].name == "model.v2"


def test_overrides_reach_all_and_mistakes_name_the_design(tmp_path: Path) -> None:
    good = str(small.design_file(tmp_path / "good.yaml"))
    assert [e.config.width for e in load_entries([good, "preset:mha-tiny"], ["width=32"])] == [32, 32]
    with pytest.raises(ConfigError, match=r"good\.yaml\.layers\[0\]\.mixer\.heads:"):
        load_entries([good], ["layers.0.mixer.heads=0"])
    with pytest.raises(ConfigError, match="no designs given"):
        load_entries([], [])


def test_a_design_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    design = small.design(layers=[{"mixer": {"kind": "attention", "heads": 2, "causal": False}}])
    with pytest.raises(ConfigError, match=r"both\.yaml:"):
        load_entries([str(small.design_file(tmp_path / "both.yaml", design))], [])


def test_the_largest_vocabulary_that_all_can_take() -> None:
    sizes: dict[str, Any] = {"s": 300, "l": 500, "f": None}
    designs = entries(*((name, small.design(vocab_size=size)) for name, size in sizes.items()))
    assert shared_vocab_size(designs, None, 4096) == 300
    assert shared_vocab_size(designs[1:], None, 4096) == 500
    assert shared_vocab_size(designs[2:], None, 4096) == 4096
    assert shared_vocab_size(designs, 280, 4096) == 280
    with pytest.raises(ConfigError, match=r"vocab_size 400:.*vocab_size = 300"):
        shared_vocab_size(designs, 400, 4096)


def test_the_identity_changes_with_everything_that_matters() -> None:
    designs = entries(("a", small.design()))
    identity = plan(*designs).identity()
    assert plan(*designs).identity() == identity
    changes = ({"budget_value": 2.0}, {"seeds": (0,)}, {"sequence_length": 8}, {"budget_kind": "flops"})
    for change in (*changes, {"data": ("other",)}, {"max_length_multiple": 4}):
        assert plan(*designs, **change).identity() != identity
    assert plan(*entries(("a", small.design(width=32)))).identity() != identity


def windowed(window: int) -> dict[str, Any]:
    data = small.design()
    data["layers"][0]["mixer"]["window"] = window
    return data


def test_warnings() -> None:
    wide, narrow = entries(("wide", windowed(16)), ("narrow", windowed(15)))
    quiet = plan_warnings(plan(wide, narrow), {"wide": 10, "narrow": 10}, {"wide": 200, "narrow": 200}, 1000)
    assert len(quiet) == 1
    assert quiet[0].startswith("wide: its window of 16 covers the whole training sequence of 16 tokens")
    two_designs = plan(*entries(("a", small.design()), ("b", small.design())))
    assert plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 2000, "b": 2000}, 10**4) == []
    few = plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 50, "b": 50}, 10**4)
    assert few[0].startswith("Short training: 0.5 tokens per parameter")
    sizes = plan_warnings(two_designs, {"a": 100, "b": 120}, {"a": 2000, "b": 2000}, 10**4)
    assert sizes == ["The designs differ in size: b has 20% more parameters than a."]
    again = plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 2000, "b": 2000}, 1999)
    assert again == ["The text was read more than once: it has 1,999 training tokens."]
    uneven = plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 2000, "b": 2500}, 10**4)
    assert uneven[0].startswith("The designs saw different amounts of text")


def test_a_run_that_failed_raises_no_warning_of_its_own() -> None:
    two_designs = plan(*entries(("a", small.design()), ("b", small.design())))
    assert plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 2000, "b": 0}, 10**4) == []
    assert plan_warnings(two_designs, {"a": 100, "b": 100}, {"a": 0, "b": 0}, 10**4) == []
