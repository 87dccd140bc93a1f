"""The committed table of the laws of ranks: no law is broken, and a broken one is shown."""

import pytest

from tests.cases import CASES
from tests.distributed.steps import MESHES, WITHOUT_ENCODER
from tools import rank_laws


def test_every_committed_result_keeps_the_laws() -> None:
    results = rank_laws.read_results()
    assert [line for line in results if not rank_laws.holds(line)] == []
    assert {line["layout"] for line in results} == set(MESHES)
    assert {line["case"] for line in results} <= CASES.keys() - WITHOUT_ENCODER


@pytest.mark.parametrize(("law", "value"), [("checkpoint", False), ("weights", 1e-9)])
def test_a_planted_difference_is_shown(law: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    results = rank_laws.read_results()
    assert "Broken" not in rank_laws.page("")
    monkeypatch.setattr(rank_laws, "read_results", lambda: [results[0] | {law: value}, *results[1:]])
    assert not rank_laws.holds(rank_laws.read_results()[0])
    first = results[0]
    assert f"**Broken**: `{first['case']}` on {first['layout']}, {first['way']}" in rank_laws.page("")
