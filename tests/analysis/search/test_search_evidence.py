"""The programs that measure searches: regret, and the command of Gemma's search."""

from pathlib import Path

import numpy as np
import pytest

from evidence import search_gemma
from evidence.search_regret import difference, regret


def test_regret_is_a_share_of_the_way_to_the_median() -> None:
    kl = np.array([[0.1, 0.3], [0.5, 0.7], [0.3, 0.5], [9.0, 9.0]])
    allowed = [0, 1, 2]
    assert [regret(kl, allowed, number)["regret"] for number in allowed] == [0.0, 2.0, 1.0]
    assert [regret(kl, allowed, number)["rank"] for number in allowed] == [1, 3, 2]
    found = regret(np.array([[0.1, 0.41], [0.3, 0.22], [0.9, 0.9]]), allowed, 0)  # each is the best of one sequence
    assert found["low"] == 0.0 < found["high"]
    assert difference(kl[0], kl[1]) == {"difference": -0.4, "half": 0.0}


def test_the_search_of_gemma_takes_options_and_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(search_gemma, "run", lambda *words: ran.append(words))

    def words(*given: str) -> tuple[str, ...]:
        ran.clear()
        monkeypatch.setattr("sys.argv", ["x", "--work", str(tmp_path), *given])
        search_gemma.main()
        return ran[-1]

    first = words()
    assert [each[:2] for each in ran] == [("-m", "pip"), ("-c", ran[1][1]), ("-m", "heddle"), ("-m", "heddle")]
    assert first[:6] == ("-m", "heddle", "convert", f"{tmp_path}/gemma", f"{tmp_path}/searched", "--search")
    assert (first[6], first[first.index("--budget") + 1]) == ("state@8k=50%", "8h")
    assert (tmp_path / "text" / "convert-healing.txt").is_file()
    other = words("--model", "smol", "--search", "state@8k=25%", "--dry-run", "--budget", "2h")
    assert len(ran) == 1
    assert (other[3], other.count("--search"), other.count("--budget"), other[-1]) == ("smol", 1, 1, "2h")
