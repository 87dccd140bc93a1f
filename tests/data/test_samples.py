"""The order of samples: each window once per epoch, each step on its own, weights respected by every prefix."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.data.samples import (
    Batch,
    CorpusLoader,
    check_token_count,
    epoch_shuffle,
    evaluation_windows,
    feistel_permute,
)
from heddle.data.token_file import TokenFile, write_token_file
from heddle.errors import DataError

SEQUENCE_LENGTH = 8
Permutation = Callable[[np.ndarray, int, tuple[int, int, int]], np.ndarray]


def token_file(path: Path, tokens: int, first: int = 1) -> TokenFile:
    """A file whose tokens are their own positions, except that documents of 5 tokens begin with 0."""
    with write_token_file(path, vocab_size=2**20, eod_id=0, tokenizer_hash="t") as writer:
        for start in range(0, tokens, 5):
            writer.add([[first + position for position in range(start + 1, min(start + 5, tokens))]], 4)
    return TokenFile(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[TokenFile, ...]:
    return tuple(token_file(tmp_path / f"{n}.bin", n, n * 1000) for n in (8 * 23 + 1, 8 * 7 + 4, 8 * 11 + 8))


def loader(
    files: tuple[TokenFile, ...], weights: tuple[float, ...], batch_size: int = 4, seed: int = 0
) -> CorpusLoader:
    return CorpusLoader(files, weights, SEQUENCE_LENGTH, batch_size, seed, 0)


def check_bijection(change: Permutation, size: int, key: tuple[int, int, int]) -> None:
    result = change(np.arange(size), size, key)
    assert result.dtype == np.int64
    assert sorted(result.tolist()) == list(range(size))


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 5), st.integers(0, 2**40)))
def test_every_epoch_is_a_bijection(size: int, key: tuple[int, int, int]) -> None:
    check_bijection(feistel_permute, size, key)


def test_a_large_epoch_is_a_bijection_and_each_position_is_independent() -> None:
    size = 1_000_003
    whole = feistel_permute(np.arange(size), size, (1, 2, 3))
    assert np.array_equal(np.sort(whole), np.arange(size))
    some = np.array([5, 999_999, 5, 0])
    assert np.array_equal(feistel_permute(some, size, (1, 2, 3)), whole[some])


def test_the_check_catches_random_draws() -> None:
    def draws(positions: np.ndarray, size: int, key: tuple[int, int, int]) -> np.ndarray:
        return np.random.default_rng(key).integers(0, size, len(positions))

    with pytest.raises(AssertionError):
        check_bijection(draws, 100, (0, 0, 0))


@pytest.mark.parametrize("size", [2, 3, 5, 10, 1000])
def test_orders_differ_and_spread_evenly(size: int) -> None:
    orders = np.array(
        [feistel_permute(np.arange(size), size, (seed, 0, epoch)) for seed in range(20) for epoch in range(20)]
    )
    # Each position gets each window about equally often: chi-squared per position stays near its mean, size - 1.
    expected = 400 / size
    for position in (0, size // 2, size - 1):
        counts = np.bincount(orders[:, position], minlength=size)
        squared = float(((counts - expected) ** 2 / expected).sum())
        assert squared < size - 1 + 6 * (2 * size) ** 0.5
    if size >= 10:  # there are few orders of fewer
        assert len({tuple(order) for order in orders.tolist()}) > 395
        neighbors = np.abs(np.diff(orders, axis=1)) == 1
        assert neighbors.mean() < 3 * 2 / size


def test_every_epoch_has_another_order() -> None:
    orders = epoch_shuffle(np.arange(3 * 50), 50, (0, 0)).reshape(3, 50)
    assert len({tuple(order) for order in orders.tolist()}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders.tolist())
    assert not np.array_equal(orders[0], epoch_shuffle(np.arange(50), 50, (0, 1)))


def test_the_order_never_changes() -> None:
    # Written down once: another order on another machine or release would break every resumed run.
    assert feistel_permute(np.arange(10), 10, (0, 0, 0)).tolist() == [5, 9, 4, 6, 2, 0, 7, 3, 8, 1]


def windows_of(batch: Batch, files: tuple[TokenFile, ...]) -> list[tuple[int, int]]:
    windows = []
    for row in batch.tokens.tolist():
        for number, file in enumerate(files):
            tokens = file.read(0, len(file)).tolist()
            starts = range(0, len(tokens) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
            windows += [
                (number, start // SEQUENCE_LENGTH)
                for start in starts
                if tokens[start : start + SEQUENCE_LENGTH + 1] == row
            ]
    return windows


def test_each_window_once_per_epoch(files: tuple[TokenFile, ...]) -> None:
    order = loader(files[:1], (1.0,), batch_size=23)
    epochs = [windows_of(order.batch(step), files[:1]) for step in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == [(0, window) for window in range(23)]
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_each_source_gives_each_window_once_per_its_epoch(files: tuple[TokenFile, ...]) -> None:
    order = loader(files, (3.0, 1.0, 2.0))
    sources, windows = order.locate(np.arange(6 * 7 * 11 * 23))
    for source, count in enumerate((23, 7, 11)):
        from_source = windows[sources == source]
        for epoch in range(len(from_source) // count):
            assert sorted(from_source[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_rows_are_windows_of_the_stream(files: tuple[TokenFile, ...]) -> None:
    order = loader(files, (1.0, 1.0, 1.0))
    for step in (0, 3, 1000):
        batch = order.batch(step)
        assert batch.tokens.shape == (4, SEQUENCE_LENGTH + 1)
        assert batch.tokens.dtype == batch.sample_indices.dtype == np.int64
        assert batch.sample_indices.tolist() == list(range(step * 4, step * 4 + 4))
        assert len(windows_of(batch, files)) == 4


def test_a_step_does_not_depend_on_other_steps(files: tuple[TokenFile, ...]) -> None:
    weights = (5.0, 1.0, 0.5)
    batches = loader(files, weights)
    forwards = [batches.batch(step).tokens for step in range(50)]
    for step in [49, 3, 3, 17, 0]:
        assert np.array_equal(loader(files, weights).batch(step).tokens, forwards[step])
        assert np.array_equal(batches.batch(step).tokens, forwards[step])
    far = loader(files, weights).batch(10**12)
    assert far.sample_indices[0] == 4 * 10**12
    assert not np.array_equal(loader(files, weights, seed=1).batch(0).tokens, forwards[0])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batch_size_only_groups_the_samples(files: tuple[TokenFile, ...], batch_size: int) -> None:
    weights = (5.0, 1.0, 0.5)
    rows = np.concatenate([loader(files, weights).batch(step).tokens for step in range(24)])
    other = loader(files, weights, batch_size)
    regrouped = np.concatenate([other.batch(step).tokens for step in range(96 // batch_size)])
    assert np.array_equal(rows, regrouped)


def check_weights(sources: np.ndarray, weights: tuple[float, ...]) -> None:
    steps = np.arange(1, len(sources) + 1)
    for source, weight in enumerate(weights):
        counts = np.cumsum(sources == source)
        assert np.abs(counts - steps * weight / sum(weights)).max() <= 1 + 1e-9


@pytest.mark.parametrize(
    "weights",
    [
        (1.0, 1.0, 1.0),
        (3.0, 1.0, 2.0),
        (0.7, 0.2, 0.1),
        (1000.0, 1.0, 1.0),
        (0.333, 0.333, 0.334),
        (1.0, 2.0, 1 / 3),
    ],
)
def test_weights_hold_over_every_prefix(files: tuple[TokenFile, ...], weights: tuple[float, ...]) -> None:
    sources, _ = loader(files, weights).locate(np.arange(20_000))
    check_weights(sources, weights)
    later, _ = loader(files, weights).locate(np.arange(5_000, 6_000))
    assert np.array_equal(later, sources[5_000:6_000])


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return token_file(tmp_path_factory.mktemp("short") / "a", 20)


@settings(max_examples=40)
@given(weights=st.lists(st.integers(1, 40).map(float), min_size=1, max_size=9))
def test_weights_of_many_sources(short: TokenFile, weights: list[float]) -> None:
    order = CorpusLoader([short] * len(weights), weights, SEQUENCE_LENGTH, 1, 0, 0)
    check_weights(order.locate(np.arange(1000))[0], tuple(weights))


def test_the_weight_check_catches_random_and_blockwise_turns() -> None:
    with pytest.raises(AssertionError):
        check_weights(np.random.default_rng(0).choice(2, 1000, p=[0.75, 0.25]), (3.0, 1.0))
    with pytest.raises(AssertionError):
        check_weights(np.tile([0] * 6 + [1] * 2, 100), (3.0, 1.0))


@pytest.mark.parametrize("weights", [(0.0, 1.0), (-1.0, 1.0), (0.00001, 1.0)])
def test_impossible_weights(files: tuple[TokenFile, ...], weights: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="above 0"):
        loader(files[:2], weights)


def test_weights_too_far_apart(files: tuple[TokenFile, ...]) -> None:
    with pytest.raises(DataError, match="1000001 samples"):
        loader(files[:2], (1000.0, 0.001))


def check_doc_lengths(batch: Batch) -> None:
    for row, lengths in zip(batch.tokens, batch.doc_lengths, strict=True):
        assert sum(lengths) == len(row) - 1
        assert min(lengths) > 0
        starts = np.cumsum((0, *lengths))[:-1].tolist()
        assert starts == sorted({0, *np.flatnonzero(row[:-1] == 0).tolist()})


def test_doc_lengths_are_the_documents_inside_a_row(files: tuple[TokenFile, ...]) -> None:
    for step in range(30):
        check_doc_lengths(loader(files, (1.0, 1.0, 1.0)).batch(step))
    batch = loader(files[:1], (1.0,)).batch(0)
    with pytest.raises(AssertionError):
        check_doc_lengths(Batch(batch.tokens, ((SEQUENCE_LENGTH,),) * 4, batch.sample_indices))


def test_adjacent_end_tokens_are_documents_of_one_token(tmp_path: Path) -> None:
    with write_token_file(tmp_path / "a", vocab_size=9, eod_id=0, tokenizer_hash="t") as writer:
        writer.add([[], [], [1, 2], [], [3]], 3)
    [batch] = evaluation_windows(TokenFile(tmp_path / "a"), 7)
    assert batch.tokens.tolist() == [[0, 0, 0, 1, 2, 0, 0, 3]]
    assert batch.doc_lengths == ((1, 1, 3, 1, 1),)


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 9, 10, 16, 17, 18, 150])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_evaluation_reads_every_target_once(tmp_path: Path, tokens: int, batch_size: int) -> None:
    file = token_file(tmp_path / "a", tokens)
    batches = list(evaluation_windows(file, SEQUENCE_LENGTH, batch_size))
    targets = [token for batch in batches for row in batch.tokens for token in row[1:].tolist()]
    inputs = [token for batch in batches for row in batch.tokens for token in row[:-1].tolist()]
    everything = file.read(0, len(file)).tolist()
    assert targets == everything[1:]
    assert inputs == everything[:-1]
    assert all(batch.tokens.shape[0] <= batch_size for batch in batches)
    assert [i for batch in batches for i in batch.sample_indices.tolist()] == list(
        range(-(-max(0, tokens - 1) // SEQUENCE_LENGTH))
    )
    for batch in batches:
        check_doc_lengths(batch)


def test_too_little_text_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file = token_file(tmp_path / "a", 4 * SEQUENCE_LENGTH + 1)
    check_token_count([file], SEQUENCE_LENGTH, 4)
    with pytest.raises(DataError, match=r"33 tokens.*5 samples.*8 needs 41.*give"):
        CorpusLoader([file], (1.0,), SEQUENCE_LENGTH, 5, 0, 0)
    small = token_file(tmp_path / "b", SEQUENCE_LENGTH)
    with pytest.raises(DataError, match=r"41 tokens.*34.*least 9"):
        CorpusLoader([file, small], (1.0, 1.0), SEQUENCE_LENGTH, 4, 0, 0)
    with pytest.raises(DataError, match="0 tokens"):
        check_token_count([token_file(tmp_path / "c", 0)], SEQUENCE_LENGTH, 1)
