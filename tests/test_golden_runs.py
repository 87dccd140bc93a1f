"""Draws and fingerprints never change, and neither do the results of small runs."""

import json
from pathlib import Path

import pytest

from tests.cases import CASES, case
from tests.golden_runs import GOLDEN, outputs, runs

EXPECTED = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_initial_weights_and_outputs(name: str) -> None:
    actual, expected = outputs(case(name)), EXPECTED["designs"][name]
    assert actual["draws"] == expected["draws"]
    assert actual["fingerprint"] == expected["fingerprint"]
    assert actual["logits"] == pytest.approx(expected["logits"], rel=1e-10)


def test_trainings(tmp_path: Path) -> None:
    actual, expected = runs(tmp_path), EXPECTED["runs"]
    assert actual.pop("corpus") == expected.pop("corpus")
    assert list(actual) == list(expected)
    for name, bits in actual.items():
        assert bits == pytest.approx(expected[name], rel=1e-4), name
