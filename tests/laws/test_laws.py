"""Every law on every option of the cases; in the soak, on every case.

The designs of test_pairs.py have nearly every option of the cases, and every law runs on them. Here they run on the few
cases that have an option of their own. That every field has an effect, tests/model/test_options.py shows by
day, and the law on these cases in the night.
"""

import re
from itertools import chain

import pytest

from heddle.config import kinds
from heddle.laws.states import all_chunkings
from tests.cases import CASES, case, parts_of
from tests.covering import designs_with_every_option, options_of, options_of_cases, uncovered_cases
from tests.laws.test_planted import BUGS
from tests.laws.violations import OPTIONS, OTHERS, violations_of
from tests.source import ROOT, slots

SHARES = 4  # the cases are unknown at collection, so each test takes every 4th


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("laws", [OTHERS, pytest.param([OPTIONS], marks=pytest.mark.nightly)], ids=["laws", "options"])
def test_cases_with_an_option_of_their_own_satisfy_the_laws(share: int, laws: list[str]) -> None:
    names = uncovered_cases()[share::SHARES]
    assert "\n".join(chain.from_iterable(violations_of(case(name), laws) for name in names)) == ""


def test_every_option_of_every_case_is_under_every_law() -> None:
    checked = [*designs_with_every_option(), *map(case, uncovered_cases())]
    assert options_of_cases() - set().union(*map(options_of, checked)) == set()
    assert len(uncovered_cases()) < 10, "test_every_option_satisfies_the_laws has nearly every option"


def test_options_are_fields_with_their_choices_and_whether_a_number_is_zero_or_one() -> None:
    options = options_of(case("alibi-bidirectional-window"))
    assert {"attention.causal: False", "attention.kv_heads: 1", "attention.window: a number"} <= options
    assert "attention.position: alibi" in options
    assert "attention.position: rope" not in options


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_case_satisfies_the_laws(name: str) -> None:
    assert "\n".join(violations_of(case(name))) == ""


@pytest.mark.parametrize("name", ["attention-gqa", "attention-window-mixed", "layers-nested"])
def test_all_128_chunkings_of_eight_tokens(name: str) -> None:
    all_chunkings(case(name), length=8)


def test_every_kind_has_a_case() -> None:
    all_parts = {(slot, kind) for slot in slots() for kind in kinds(slot)}
    covered = {part for name in CASES for part in parts_of(case(name))}
    assert all_parts == covered


def without_oracle(slot: str, kind: str, tests: list[str]) -> str:
    """What a kind lacks: a test of its own that compares it with an oracle, or a fault that is planted in it."""
    own = [text for text in tests if re.search(rf'heddle\.parts\.{slot}\.{kind}\b|"{kind}"', text)]
    if not own:
        return "no test in tests/parts or tests/parity names it"
    planted = any("tests.laws.planting" in text for text in own)
    planted = planted or any((slot, kind) in parts_of(case(bug.case)) for bug in BUGS)
    return "" if planted else "no fault is planted in it"


def test_every_kind_has_an_oracle_and_a_planted_fault() -> None:
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("par[ti]*/test_*.py")]
    every = [(slot, kind) for slot in slots() for kind in kinds(slot)]
    assert {part: lack for part in every if (lack := without_oracle(*part, tests))} == {}
    assert without_oracle("mixers", "ema", tests) == "no test in tests/parts or tests/parity names it"
    assert without_oracle("mixers", "ema", ['"ema"']) == "no fault is planted in it"
