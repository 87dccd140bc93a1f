"""Draws and fingerprints never change, and neither do the results of small runs."""

import json
import os
import subprocess
import sys
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


PATTERNED = ("rwkv7", "rwkv7-value-residual", "mamba", "mamba2", "rg-lru", "retention-learned-decays", "kda")
DRAWS = """
import json
from tests.cases import case
from tests.golden_runs import outputs
print(json.dumps({name: outputs(case(name))["draws"] for name in NAMES}))
"""


def test_draws_are_those_of_every_cpu() -> None:
    """First weights that follow a pattern use powers, exponentials and logarithms, which vector instructions round."""
    process = subprocess.run(
        [sys.executable, "-c", DRAWS.replace("NAMES", repr(PATTERNED))],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(process.stdout) == {name: EXPECTED["designs"][name]["draws"] for name in PATTERNED}


def test_trainings(tmp_path: Path) -> None:
    actual, expected = runs(tmp_path), EXPECTED["runs"]
    assert actual.pop("corpus") == expected.pop("corpus")
    assert list(actual) == list(expected)
    for name, bits in actual.items():
        assert bits == pytest.approx(expected[name], rel=1e-4), name
