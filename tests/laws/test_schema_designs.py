"""The laws on random designs drawn from the published JSON Schema, with layouts made from tensors."""

import json
import os
import random
from dataclasses import replace
from typing import Any

import pytest

from heddle.laws import run
from heddle.model.embedding import Head
from heddle.model.load_config import load_config
from heddle.parts.layout import Layout
from tests.cases import case
from tests.laws.planting import calls, result
from tests.schema_designs import COUNTS, fields_without_effect, violations

SAMPLE = int(os.environ.get("HEDDLE_SOAK_DESIGNS", "2000"))
SHARES = 16
FEW = (3, pytest.param(2, marks=pytest.mark.nightly))  # numbers of designs of several kinds


@pytest.mark.parametrize("number", FEW)
def test_a_few_designs_satisfy_the_laws(number: int) -> None:
    assert violations(number) == []


AXIAL = {"kind": "axial_rope"}
RELU = {"kind": "linear_attention", "heads": 1, "feature_map": "relu"}
ALONE = {"kind": "differential_attention", "heads": 3, "head_dim": 8, "window": 1, "position": AXIAL}
PAIR = {"kind": "pair", "first": ALONE, "second": {"kind": "retention", "heads": 3}}


@pytest.mark.parametrize(
    ("law", "width", "mixers"),
    [
        ("receptive_field", 12, [RELU]),
        ("rotary_invariants", 36, [{"kind": "cross_attention", "heads": 3}, RELU | {"position": AXIAL}]),
        ("coordinate_shift_invariance", 36, [PAIR]),
    ],
)
def test_a_law_holds_where_features_are_zero_or_a_window_holds_one_token(
    law: str, width: int, mixers: list[dict[str, Any]]
) -> None:
    layers = [{"mixer": mixer} for mixer in mixers]
    config = load_config({"vocab_size": 37, "width": width, "layers": layers})
    assert [result.message for result in run(config, [law])] == [""]


def test_a_misread_layout_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [violations(number, laws=()) for number in range(4)] == [[]] * 4
    result(Layout.of, lambda layout: replace(layout, segment_ids=None))(monkeypatch)
    # New kinds change what is drawn, so the first design that shows it is looked for.
    broken = (message for number in range(40) for message in violations(number, laws=()))
    assert any("by tensors: token " in message for message in broken)


def test_a_field_without_effect_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    config = case("layers-feedforward-only")
    assert fields_without_effect(config, random.Random(0), 100) == []
    calls(Head.forward, "scale_and_cap", lambda change, logits, scale, cap: change(logits, scale, None))(monkeypatch)
    assert fields_without_effect(config, random.Random(0), 100) == ["head.softcap: no other value has an effect"]


def test_the_counts_are_of_designs_without_a_violation() -> None:
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    assert counts["designs with a violation"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_random_designs_satisfy_the_laws(share: int) -> None:
    broken = {number: violations(number) for number in range(share, SAMPLE, SHARES)}
    assert {number: messages for number, messages in broken.items() if messages} == {}
