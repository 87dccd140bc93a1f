"""No document in both splits, no empty split, and samples that are even and nested."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.data.corpus import TRAIN, VALIDATION, SourceSplit, split_source
from heddle.data.sources import ContentCounts, ScannedSource, parse_source
from heddle.errors import DataError


def scanned(texts: list[str]) -> ScannedSource:
    tally = ContentCounts()
    for text in texts:
        tally.add(text)
    return ScannedSource("made", tally.hasher.hexdigest(), tally, 1, 0, 0, (), lambda: iter(texts))


def check_split(split: Callable[[ScannedSource], SourceSplit], texts: list[str]) -> SourceSplit:
    result = split(scanned(texts))
    train, validation = list(result.documents(TRAIN)), list(result.documents(VALIDATION))
    assert train
    assert validation
    assert all(train)
    assert all(validation)
    assert sum(map(len, train)) + sum(map(len, validation)) == sum(map(len, texts))
    if result.method == "hash":
        assert not set(train) & set(validation)
        assert sorted(train + validation) == sorted(texts)
    else:
        assert "".join(train + validation) == "".join(texts)
    return result


@given(st.lists(st.text(min_size=1), min_size=1, max_size=50).filter(lambda texts: sum(map(len, texts)) > 1))
def test_no_split_is_ever_empty(texts: list[str]) -> None:
    check_split(split_source, texts)


def test_many_documents_are_split_by_hash_and_stay_where_they_are() -> None:
    texts = [f"document {number}" for number in range(2000)] * 2
    result = check_split(split_source, texts)
    assert result.method == "hash"
    validation = set(result.documents(VALIDATION))
    assert 0.03 < len(validation) / 2000 < 0.07
    # One document more moves none of the others.
    assert validation <= set(split_source(scanned(["new", *texts])).documents(VALIDATION))
    for name in (TRAIN, VALIDATION):
        assert result.size(name).documents == len(list(result.documents(name)))
        assert result.size(name).bytes == sum(len(text.encode()) for text in result.documents(name))


def test_the_check_catches_an_empty_split_and_a_split_by_position() -> None:
    with pytest.raises(AssertionError):
        check_split(lambda source: SourceSplit(source, "hash", 0), ["alone"])

    class ByPosition(SourceSplit):
        def documents(self, split: str) -> Iterator[str]:
            texts = list(self.source.read())
            return iter(texts[:-1] if split == TRAIN else texts[-1:])

    with pytest.raises(AssertionError):
        check_split(lambda source: ByPosition(source, "hash", 0), ["same", "same"])


def test_one_document_gives_its_last_twentieth() -> None:
    result = split_source(scanned(["日" * 1000]))
    assert (result.method, result.train_characters) == ("tail", 950)
    assert list(result.documents(VALIDATION)) == ["日" * 50]
    assert (result.size(TRAIN).bytes, result.size(VALIDATION).bytes) == (2850, 150)


def test_a_tiny_validation_split_counts_as_empty() -> None:
    small_text = next(
        t
        for t in map(str, range(1000))
        if split_source(scanned([t] * 2 + ["x" * 9])).source.counts.validation_documents == 2
    )
    assert split_source(scanned([small_text, "y" * 10_000])).method == "tail"


def test_one_character_is_refused() -> None:
    with pytest.raises(DataError, match="single character"):
        split_source(scanned(["a"]))


def test_samples_are_even_nested_and_never_empty() -> None:
    texts = [f"document {number}" for number in range(4000)]
    result = split_source(scanned(texts))
    whole = list(result.documents(TRAIN))
    assert list(result.sample(TRAIN, 1.0)) == whole
    smaller: set[str] = set()
    for fraction in (0.01, 0.1, 0.5, 0.9):
        part = list(result.sample(TRAIN, fraction))
        assert abs(len(part) / len(whole) - fraction) < 0.05
        assert smaller <= set(part)
        smaller = set(part)
        halves = sum(text in set(whole[: len(whole) // 2]) for text in part)
        assert abs(halves / len(part) - 0.5) < 0.2  # not the beginning alone
    assert list(result.sample(TRAIN, 0.0)) == whole[:1]


def test_a_real_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n\n" * 40_000)
    source, _ = parse_source(str(tmp_path))
    source_scan = source.scan(lambda n: None)
    assert source_scan.counts.documents == 4
    check_split(split_source, list(source_scan.read()))
