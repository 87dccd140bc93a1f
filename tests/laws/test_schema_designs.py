"""Every law on random designs drawn from the published JSON Schema, with layouts made from tensors."""

import json
import os

import pytest

from tests.laws.planting import plant
from tests.schema_designs import COUNTS, violations

SAMPLE = int(os.environ.get("HEDDLE_SOAK_DESIGNS", "2000"))
SHARES = 16
FEW = (2, 3)  # numbers of designs of several kinds


@pytest.mark.parametrize("number", FEW)
def test_a_few_designs_satisfy_the_laws(number: int) -> None:
    assert violations(number) == []


def test_a_misread_layout_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations(0, laws=()) == []
    plant(monkeypatch, "parts.context.layout:Layout.of", "None if ids is None else ids.to(target, copy=True)", "None")
    assert any("by tensors: token " in violation for violation in violations(0, laws=()))


def test_the_counts_are_of_designs_without_a_violation() -> None:
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    assert counts["designs with a violation"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("share", range(SHARES))
def test_random_designs_satisfy_the_laws(share: int) -> None:
    broken = {number: violations(number) for number in range(share, SAMPLE, SHARES)}
    assert {number: messages for number, messages in broken.items() if messages} == {}
