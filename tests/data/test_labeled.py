"""Labeled rows: each comes once per epoch, test rows are never trained on, and bad shapes are refused."""

from typing import Any

import numpy as np
import pytest

from heddle.data.labeled import LabeledDataset, LabeledRows
from heddle.errors import DataError


def random_rows(count: int, length: int = 3, with_coordinates: bool = True, seed: int = 0) -> LabeledRows:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1000, (count, length))
    labels = np.where(np.arange(length) == 1, tokens.sum(1, keepdims=True) % 5, -1)
    return LabeledRows(tokens, labels, random.normal(size=(count, length, 2)) if with_coordinates else None)


def test_every_row_comes_once_an_epoch_and_each_epoch_in_another_order() -> None:
    data = LabeledDataset(random_rows(10), random_rows(4, seed=1))
    batches = [data.batch(3, first, 4) for first in range(0, 20, 4)]
    seen = np.concatenate([batch.tokens[:, :-1] for batch in batches])
    for epoch in (seen[:10], seen[10:]):
        assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, data.train.tokens.tolist()))
    assert seen[:10].tolist() != seen[10:].tolist()
    assert seen[:4].tolist() != data.batch(4, 0, 4).tokens[:, :-1].tolist()
    assert [batch.sample_indices.tolist() for batch in batches[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_labels_and_coordinates_stay_with_their_row() -> None:
    data = LabeledDataset(random_rows(10), random_rows(4, seed=1))
    assert data.train.coordinates is not None
    batch = data.batch(0, 5, 9)
    assert batch.coordinates is not None
    for tokens, labels, coordinates in zip(batch.tokens[:, :-1], batch.targets, batch.coordinates, strict=True):
        (row,) = np.flatnonzero((data.train.tokens == tokens).all(1) & (data.train.labels == labels).all(1))
        np.testing.assert_allclose(coordinates, data.train.coordinates[row], rtol=1e-6)
    assert batch.doc_lengths == ((3,),) * 9


def test_test_rows_come_in_order_and_at_most_once() -> None:
    data = LabeledDataset(random_rows(10), random_rows(5, seed=1))
    for num_rows, sizes in ((3, [2, 1]), (5, [2, 2, 1]), (99, [2, 2, 1])):
        batches = list(data.validation_batches(num_rows, 2))
        assert [len(batch.tokens) for batch in batches] == sizes
        tokens = np.concatenate([batch.tokens[:, :-1] for batch in batches])
        assert tokens.tolist() == data.test.tokens[: len(tokens)].tolist()


def test_the_hash_changes_with_any_number() -> None:
    data = LabeledDataset(random_rows(10), random_rows(5, seed=1))
    same = LabeledDataset(random_rows(10), random_rows(5, seed=1))
    assert data.describe() == same.describe()
    assert data.train.coordinates is not None
    shifted = LabeledRows(data.train.tokens, data.train.labels, data.train.coordinates + 1)
    relabeled = LabeledRows(
        data.train.tokens, np.where(data.train.labels == 0, 1, data.train.labels), data.train.coordinates
    )
    for train in (shifted, relabeled, random_rows(10, seed=2), LabeledRows(data.train.tokens, data.train.labels)):
        assert train.hash != data.train.hash
    assert data.vocab_size == 1 + max(data.train.tokens.max(), data.test.tokens.max())
    assert data.length == 3


@pytest.mark.parametrize(
    ("tokens", "labels", "coordinates", "message"),
    [
        ([1, 2], [1, 2], None, r"tokens.*\[2\]"),
        ([[]], [[]], None, r"tokens.*\[1, 0\]"),
        ([[1, 2]], [[1]], None, r"labels.*\[1, 1\].*\[1, 2\]"),
        ([[1, -2]], [[1, 2]], None, r"tokens.*0"),
        ([[1.0, 2.0]], [[1, 2]], None, "tokens"),
        ([[1, 2]], [[1, -2]], None, r"labels.*-1"),
        ([[1, 2]], [[-1, -1]], None, "label is −1"),
        ([[1, 2]], [[1, 2]], [[0, 0]], r"coordinates.*\[1, 2\].*\[1, 2, 2\]"),
        ([[1, 2]], [[1, 2]], [[[0, 0], [0, float("nan")]]], "coordinates"),
    ],
)
def test_what_does_not_fit_is_refused(
    tokens: list[Any], labels: list[Any], coordinates: list[Any] | None, message: str
) -> None:
    with pytest.raises(DataError, match=f"^labeled rows: .*{message}"):
        LabeledRows(np.array(tokens), np.array(labels), None if coordinates is None else np.array(coordinates))


def test_train_and_test_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="4 tokens"):
        LabeledDataset(random_rows(2), random_rows(2, length=4))
    with pytest.raises(DataError, match="coordinates"):
        LabeledDataset(random_rows(2), random_rows(2, with_coordinates=False))
