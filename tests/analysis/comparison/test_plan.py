"""What a comparison is asked: names that never clash, one vocabulary, and warnings that matter."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from heddle.analysis.comparison.plan import Entry, Plan, read_entries, shared_vocabulary, warnings
from heddle.errors import ConfigError
from tests import small


def entries(*designs: tuple[str, dict[str, Any]]) -> tuple[Entry, ...]:
    return tuple(Entry(name, name, small.config(data)) for name, data in designs)


def plan(*designs: Entry, **changes: Any) -> Plan:
    made = Plan(
        entries=designs,
        data=("text",),
        budget="tokens",
        value=1000.0,
        seeds=(0, 1),
        batch_size=4,
        context=16,
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
        parts=(),
        contexts=(32,),
        recall=("mqar",),
        extrapolate=8,
    )
    return dataclasses.replace(made, **changes)


def test_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = [
        small.design_file(tmp_path / name)
        for name in ("a#2.yaml", "a.yaml", "sub/a.yaml", "with space.yaml", "v1.0.yaml", "a=b.yaml")
    ]
    sources = [*map(str, files), "preset:gqa-tiny", "preset:gqa-tiny", "preset:gqa-tiny"]
    named = [entry.name for entry in read_entries(sources, [])]
    assert named == ["a#2", "a", "a#3", "with space", "v1.0", "a=b", "gqa-tiny", "gqa-tiny#2", "gqa-tiny#3"]
    assert [entry.source for entry in read_entries(sources, [])] == sources


def test_a_folder_is_named_by_its_whole_name(tmp_path: Path) -> None:
    folder = tmp_path / "model.v2"
    folder.mkdir()
    (folder / "config.json").write_text('{"width": 16, "layers": [{"mixer": {"kind": "attention", "heads": 2}}]}')
    assert read_entries([f"{folder}/"], [])[0].name == "model.v2"


def test_overrides_reach_all_and_mistakes_name_the_design(tmp_path: Path) -> None:
    good = str(small.design_file(tmp_path / "good.yaml"))
    assert [e.config.width for e in read_entries([good, "preset:mha-tiny"], ["width=32"])] == [32, 32]
    with pytest.raises(ConfigError, match=r"good\.yaml\.layers\[0\]\.mixer\.heads: should be greater than 0"):
        read_entries([good], ["layers.0.mixer.heads=0"])
    with pytest.raises(ConfigError, match="names no design"):
        read_entries([], [])


def test_a_design_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    design = small.design(layers=[{"mixer": {"kind": "attention", "heads": 2, "causal": False}}])
    with pytest.raises(ConfigError, match=r"both\.yaml: a mixer sees later tokens"):
        read_entries([str(small.design_file(tmp_path / "both.yaml", design))], [])


def test_the_largest_vocabulary_that_all_can_take() -> None:
    sizes: dict[str, Any] = {"s": 300, "l": 500, "f": None}
    designs = entries(*((name, small.design(vocab_size=size)) for name, size in sizes.items()))
    assert shared_vocabulary(designs, None, 4096) == 300
    assert shared_vocabulary(designs[1:], None, 4096) == 500
    assert shared_vocabulary(designs[2:], None, 4096) == 4096
    assert shared_vocabulary(designs, 280, 4096) == 280
    with pytest.raises(ConfigError, match="--vocab-size 400: is above vocab_size = 300 of s; all designs share"):
        shared_vocabulary(designs, 400, 4096)


def test_the_identity_changes_with_everything_that_matters() -> None:
    one = entries(("a", small.design()))
    same = plan(*one).identity()
    assert plan(*one).identity() == same
    others = ({"value": 2.0}, {"seeds": (0,)}, {"context": 8}, {"budget": "flops"}, {"data": ("other",)})
    for change in (*others, {"extrapolate": 4}):
        assert plan(*one, **change).identity() != same
    assert plan(*entries(("a", small.design(width=32)))).identity() != same


def windowed(window: int) -> dict[str, Any]:
    data = small.design()
    data["layers"][0]["mixer"]["window"] = window
    return data


def test_warnings() -> None:
    wide, narrow = entries(("wide", windowed(16)), ("narrow", windowed(15)))
    quiet = warnings(plan(wide, narrow), {"wide": 10, "narrow": 10}, {"wide": 200, "narrow": 200}, 1000)
    assert len(quiet) == 1
    assert quiet[0].startswith("wide: its window of 16 covers the whole training context of 16 tokens")
    one = plan(*entries(("a", small.design()), ("b", small.design())))
    assert warnings(one, {"a": 100, "b": 100}, {"a": 2000, "b": 2000}, 10**4) == []
    few = warnings(one, {"a": 100, "b": 100}, {"a": 50, "b": 50}, 10**4)
    assert few[0].startswith("A short race: 0.5 training tokens for each parameter")
    sizes = warnings(one, {"a": 100, "b": 120}, {"a": 2000, "b": 2000}, 10**4)
    assert sizes == ["The designs differ in size: b has 20% more parameters than a."]
    again = warnings(one, {"a": 100, "b": 100}, {"a": 2000, "b": 2000}, 1999)
    assert again == ["The text was read more than once: it holds 1,999 training tokens."]
    uneven = warnings(one, {"a": 100, "b": 100}, {"a": 2000, "b": 2500}, 10**4)
    assert uneven[0].startswith("The designs saw different amounts of text")


def test_a_run_that_failed_raises_no_warning_of_its_own() -> None:
    one = plan(*entries(("a", small.design()), ("b", small.design())))
    assert warnings(one, {"a": 100, "b": 100}, {"a": 2000, "b": 0}, 10**4) == []
    assert warnings(one, {"a": 100, "b": 100}, {"a": 0, "b": 0}, 10**4) == []
