"""Variants of a design: values are split as in YAML, names are short and never clash, errors are one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.lab.compare.plan import (
    MAX_NAME_LENGTH,
    choose_baseline,
    enumerate_variants,
    load_entries,
    parse_varied_fields,
    short_titles,
)
from heddle.model.load_config import parse_values, parse_yaml
from tests import small

SCALARS = st.one_of(
    st.integers(-1000, 1000),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.sampled_from(" ,'\"{}[]:#"), max_size=12),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "hidden", "a b"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def written(value: Any) -> str:
    """A value as it stands within a YAML list on one line."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1]


@given(st.lists(VALUES, min_size=1, max_size=5))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_values_are_split_as_a_yaml_list_is(values: list[Any]) -> None:
    texts = [written(value) for value in values]
    # what these texts mean to the reader of designs, whose numbers are those of YAML 1.2
    meant = [parse_yaml(text, "alone") for text in texts]
    parsed = parse_values(",".join(texts), "together")
    assert [value for _, value in parsed] == meant
    assert [parse_yaml(piece, "again") for piece, _ in parsed] == meant


@pytest.mark.parametrize("text", ["", "  ", ",", "a,", ",a", "a,,b", "a, ,b", "1],[2", "{a: 1", "'a", "a #b", "*a,b"])
def test_an_empty_or_broken_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^vary x=.*:") as caught:
        parse_varied_fields([f"x={text}"])
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["x"], "vary x:"),
        (["=1"], "vary =1:"),
        (["x=1,2", "y=1", "x=3"], "vary x=3:"),
        (["x=1,2,1"], "vary x=1,2,1: 1"),
        (["x={a: 1, b: 2},{b: 2, a: 1}"], "is given twice"),
    ],
)
def test_mistakes_are_one_sentence(asked: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_varied_fields(asked)
    assert says in str(caught.value)


def names(*asked: str) -> list[str]:
    return [variant.name for variant in enumerate_variants(parse_varied_fields(asked), 1)]


def test_names_are_short_and_tell_variants_apart() -> None:
    assert names("layers.*.mixer.kv_heads=1,2,null") == ["kv_heads=1", "kv_heads=2", "kv_heads=null"]
    assert names("residual.kind=pre_norm,parallel") == ["pre_norm", "parallel"]
    assert names("norm={kind: rms},{kind: layer}") == ["rms", "layer"]
    tables = "layers.*.feedforward={kind: gated, hidden: 8},{kind: mlp, hidden: 8},{kind: mlp, hidden: 16}"
    assert names(tables) == ["gated", "mlp hidden=8", "mlp hidden=16"]
    assert names("embedding={scale: true},{scale: false}") == ["scale=true", "scale=false"]
    assert names("x=1,1.0,true") == ["x=1", "x=1.0", "x=true"]
    assert names("x=1,'1'") == ["x=1#1", "x=1#2"]
    both = names("residual.kind=pre_norm,parallel", "layers.*.mixer.window=4,8")
    assert both == ["pre_norm window=4", "pre_norm window=8", "parallel window=4", "parallel window=8"]
    layers = names("layers.0.mixer.kind=attention,retention", "layers.1.mixer.kind=attention,pair")
    assert layers[:2] == ["0.mixer=attention 1.mixer=attention", "0.mixer=attention pair"]
    assert names("layers.0.mixer.window=4", "layers.1.mixer.window=8") == ["0.mixer.window=4 1.mixer.window=8"]
    assert names() == [""]


def test_names_are_names_of_files() -> None:
    assert names(r"x='a/b\c'") == ["x=a_b_c"]
    many = names(
        "decay=[0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999, 1.0],[0.9]", *(f"a{i}={'b' * 40}" for i in range(5))
    )
    assert len(set(many)) == 2
    assert all(len(name) <= MAX_NAME_LENGTH for name in many)


def test_titles() -> None:
    assert short_titles(["a.b", "c.b", "c.kind", "b"]) == {"a.b": "a.b", "c.b": "c.b", "c.kind": "c", "b": "b"}
    assert short_titles(["norm", "norm.kind"]) == {"norm": "norm", "norm.kind": "norm.kind"}


def test_too_many_variants_are_refused_with_their_number() -> None:
    axes = parse_varied_fields(["x=1,2,3,4", "y=1,2,3,4", "z=1,2,3,4"])
    assert len(enumerate_variants(axes, 1)) == 64
    with pytest.raises(ConfigError, match=r"vary: 2.*128 variants.*most 64"):
        enumerate_variants(axes, 2)


@pytest.fixture
def good(tmp_path: Path) -> str:
    return str(small.design_file(tmp_path / "good.yaml"))


def test_the_product_of_two_fields(good: str) -> None:
    axes = parse_varied_fields(["layers.*.mixer.kv_heads=1,2", "residual.kind=pre_norm,parallel"])
    entries = load_entries([good], ["width=32"], varied_fields=axes)
    assert [entry.name for entry in entries] == [
        "kv_heads=1 pre_norm", "kv_heads=1 parallel", "kv_heads=2 pre_norm", "kv_heads=2 parallel"
    ]  # fmt: skip
    assert [entry.config.residual.kind for entry in entries] == ["pre_norm", "parallel"] * 2
    assert [entry.config.layers[0].dump()["mixer"]["kv_heads"] for entry in entries] == [1, 1, 2, 2]
    assert {entry.config.width for entry in entries} == {32}
    assert entries[1].varied_fields == (("layers.*.mixer.kv_heads", "1"), ("residual.kind", "parallel"))
    assert entries[1].source == f"{good} 'layers.*.mixer.kv_heads=1' residual.kind=parallel"
    assert [entry.is_unmodified for entry in entries] == [True, False, False, False]


def test_of_several_designs_the_design_is_a_field_too(good: str) -> None:
    entries = load_entries(
        [good, "preset:gqa-tiny", good], [], varied_fields=parse_varied_fields(["residual.kind=parallel,pre_norm"])
    )
    assert [entry.name for entry in entries] == [
        f"{name} {kind}" for name in ("good", "gqa-tiny", "good#2") for kind in ("parallel", "pre_norm")
    ]
    assert entries[4].varied_fields == (("design", "good#2"), ("residual.kind", "parallel"))


def test_a_new_kind_leaves_behind_what_it_does_not_know(good: str) -> None:
    entries = load_entries(
        [good], [], varied_fields=parse_varied_fields(["layers.*.mixer.kind=attention,retention,linear_attention"])
    )
    assert [entry.name for entry in entries] == ["attention", "retention", "linear_attention"]
    assert [entry.config.layers[0].dump()["mixer"]["heads"] for entry in entries] == [2, 2, 2]


def test_the_baseline(good: str) -> None:
    kinds = load_entries([good], [], varied_fields=parse_varied_fields(["residual.kind=parallel,pre_norm"]))
    assert choose_baseline(kinds, None) == "pre_norm"  # the design as it was given
    assert choose_baseline(kinds, "parallel") == "parallel"
    others = load_entries([good], [], varied_fields=parse_varied_fields(["width=32,64"]))
    assert choose_baseline(others, None) == "width=32"
    assert choose_baseline(load_entries([good, "preset:gqa-tiny"], []), None) == "good"
    with pytest.raises(ConfigError, match=r"baseline paralel:.*'parallel'"):
        choose_baseline(kinds, "paralel")


def test_a_design_may_leave_out_what_is_varied(tmp_path: Path) -> None:
    data = {name: value for name, value in small.design().items() if name != "width"}
    file = str(small.design_file(tmp_path / "open.yaml", data))
    entries = load_entries([file], [], varied_fields=parse_varied_fields(["width=16,32"]))
    assert [entry.config.width for entry in entries] == [16, 32]
    assert choose_baseline(entries, None) == "width=16"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["residul.kind=a,b"], r"good.yaml \(a\):.*'residul'.*'residual'"),
        (
            ["residual.kind=pre_norm,paralel"],
            r"good.yaml \(paralel\)\.residual:.*'paralel'.*'parallel'",
        ),
        (["layers.*.mixer.kv_heads=1,0"], r"good.yaml \(kv_heads=0\)\.layers\[0\]\.mixer\.kv_heads:"),
        (["layers.7.mixer.heads=1,2"], r"override 'layers.7.mixer.heads=1':"),
        (
            ["layers.*.mixer.kind=attention,swa"],
            r"good.yaml \(swa\)\.layers\[0\]\.mixer\.window:.*swa",
        ),
        (["layers.*.mixer.causal=true,false"], r"good.yaml \(causal=false\):"),
        (["layers.*.mixer.dropout=0,0.0"], r"vary: dropout=0.*dropout=0.0"),
    ],
)
def test_variants_that_cannot_be_built_name_variant_and_field(asked: list[str], says: str, good: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_entries([good], [], varied_fields=parse_varied_fields(asked))
    assert str(caught.value).count("\n") == 0
