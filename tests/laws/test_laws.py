"""Every law on every case."""

import pytest

from heddle.config import kinds
from heddle.laws import LAWS
from heddle.laws.chunking import all_chunkings
from tests.cases import CASES, case, parts_of
from tests.source import slots


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, name: str) -> None:
    LAWS[law].check(case(name))


@pytest.mark.parametrize("name", ["attention-gqa", "attention-window-mixed", "layers-nested"])
def test_all_256_chunkings_of_nine_tokens(name: str) -> None:
    all_chunkings(case(name), length=9)


def test_every_kind_has_a_case() -> None:
    all_parts = {(slot, kind) for slot in slots() for kind in kinds(slot)}
    covered = {part for name in CASES for part in parts_of(case(name))}
    assert all_parts == covered
