"""No document on both sides, no side empty, and samples that are even and nested."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.data.sources import Survey, Tally, open_source
from heddle.data.split import TRAIN, VALIDATION, Split, split
from heddle.errors import DataError


def survey(texts: list[str]) -> Survey:
    tally = Tally()
    for text in texts:
        tally.add(text)
    return Survey("made", tally.state.hexdigest(), tally, 1, 0, 0, (), lambda: iter(texts))


def check_split(divide: Callable[[Survey], Split], texts: list[str]) -> Split:
    made = divide(survey(texts))
    train, held = list(made.documents(TRAIN)), list(made.documents(VALIDATION))
    assert train
    assert held
    assert all(train)
    assert all(held)
    assert sum(map(len, train)) + sum(map(len, held)) == sum(map(len, texts))
    if made.kind == "hash":
        assert not set(train) & set(held)
        assert sorted(train + held) == sorted(texts)
    else:
        assert "".join(train + held) == "".join(texts)
    return made


@given(st.lists(st.text(min_size=1), min_size=1, max_size=50).filter(lambda texts: sum(map(len, texts)) > 1))
def test_no_side_is_ever_empty(texts: list[str]) -> None:
    check_split(split, texts)


def test_many_documents_are_split_by_hash_and_stay_where_they_are() -> None:
    texts = [f"document {number}" for number in range(2000)] * 2
    made = check_split(split, texts)
    assert made.kind == "hash"
    held = set(made.documents(VALIDATION))
    assert 0.03 < len(held) / 2000 < 0.07
    # One document more moves none of the others.
    assert held <= set(split(survey(["new", *texts])).documents(VALIDATION))
    for side in (TRAIN, VALIDATION):
        assert made.size(side).documents == len(list(made.documents(side)))
        assert made.size(side).bytes == sum(len(text.encode()) for text in made.documents(side))


def test_the_check_catches_an_empty_side_and_a_split_by_place() -> None:
    with pytest.raises(AssertionError):
        check_split(lambda found: Split(found, "hash", 0), ["alone"])

    class ByPlace(Split):
        def documents(self, side: str) -> Iterator[str]:
            texts = list(self.survey.read())
            return iter(texts[:-1] if side == TRAIN else texts[-1:])

    with pytest.raises(AssertionError):
        check_split(lambda found: ByPlace(found, "hash", 0), ["same", "same"])


def test_one_document_gives_its_last_twentieth() -> None:
    made = split(survey(["日" * 1000]))
    assert (made.kind, made.edge) == ("tail", 950)
    assert list(made.documents(VALIDATION)) == ["日" * 50]
    assert (made.size(TRAIN).bytes, made.size(VALIDATION).bytes) == (2850, 150)


def test_a_crumb_does_not_count_as_a_side() -> None:
    crumb = next(
        t for t in map(str, range(1000)) if split(survey([t] * 2 + ["x" * 9])).survey.tally.held_documents == 2
    )
    assert split(survey([crumb, "y" * 10_000])).kind == "tail"


def test_one_character_is_refused() -> None:
    with pytest.raises(DataError, match="single character"):
        split(survey(["a"]))


def test_samples_are_even_nested_and_never_empty() -> None:
    texts = [f"document {number}" for number in range(4000)]
    made = split(survey(texts))
    whole = list(made.documents(TRAIN))
    assert list(made.sample(TRAIN, 1.0)) == whole
    smaller: set[str] = set()
    for share in (0.01, 0.1, 0.5, 0.9):
        part = list(made.sample(TRAIN, share))
        assert abs(len(part) / len(whole) - share) < 0.05
        assert smaller <= set(part)
        smaller = set(part)
        halves = sum(text in set(whole[: len(whole) // 2]) for text in part)
        assert abs(halves / len(part) - 0.5) < 0.2  # not the beginning alone
    assert list(made.sample(TRAIN, 0.0)) == whole[:1]


def test_a_real_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n\n" * 40_000)
    source, _ = open_source(str(tmp_path))
    found = source.survey(lambda n: None)
    assert found.tally.documents == 4
    check_split(split, list(found.read()))
