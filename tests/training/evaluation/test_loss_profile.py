"""Loss by position and by token frequency: sums by hand, groups of a tenth of the text each, planted errors."""

import math
import random

import numpy as np
import pytest

from heddle.data.corpus import Corpus, prepare_corpus
from heddle.data.samples import evaluation_windows
from heddle.model.decoder import build
from heddle.training.evaluation import loss_profile
from heddle.training.evaluation.loss_profile import (
    LossProfile,
    frequency_groups,
    merge_rows,
    position_edges,
    position_groups,
    token_frequencies,
)
from heddle.training.evaluation.scores import bits_and_bytes, token_scores
from tests import small
from tests.laws.planting import Plant, calls, constant, reads, wrapped

LENGTH = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Short documents of words, some of them frequent."""
    folder, draw = tmp_path_factory.mktemp("words"), random.Random(0)
    words = ["a", "the", "heddle", "shuttle", "reed", "warp", "weft"]
    for number in range(60):
        text = " ".join(draw.choices(words, weights=[30, 20, 5, 4, 3, 2, 1], k=draw.randint(5, 200)))
        (folder / f"{number}.txt").write_text(text)
    return prepare_corpus([str(folder)], vocab_size=272, max_train_tokens=None)


def test_every_loss_is_in_the_group_of_its_position_and_of_its_token(corpus: Corpus) -> None:
    model = build(small.config(small.design(vocab_size=272)), seed=0)
    byte_lengths = corpus.tokenizer.byte_lengths
    batches = list(evaluation_windows(corpus.validation, LENGTH, 4))
    groups = frequency_groups(token_frequencies(corpus))
    profile = LossProfile(position_edges(LENGTH), groups)
    windows = bits_and_bytes(model, batches, byte_lengths, observer=profile.add)
    by_hand: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for batch, tokens in token_scores(model, batches, byte_lengths):
        for row, lengths in enumerate(batch.doc_lengths):
            positions = [position for length in lengths for position in range(length)]
            for column, position in enumerate(positions):
                target = int(batch.targets[row, column])
                size = int(byte_lengths[target])
                if size > 0:
                    bits = float(tokens.nats[row, column]) / math.log(2)
                    edge = sum(position >= limit for limit in (2, 4, 8, 16))
                    for key in (("positions", edge), ("frequencies", int(groups[target]))):
                        by_hand.setdefault(key, []).append((bits, size))
    for name, collected in (("positions", profile.positions), ("frequencies", profile.frequencies)):
        for group, scores in enumerate(collected):
            assert len(scores) == len(windows)
            expected = by_hand.get((name, group), [])
            assert sum(size for _, size in scores if size > 0) == sum(size for _, size in expected)
            assert math.isclose(sum(bits for bits, _ in scores), sum(bits for bits, _ in expected), rel_tol=1e-10)
        for window, (bits, _) in enumerate(windows):
            assert math.isclose(sum(scores[window][0] for scores in collected), bits, rel_tol=1e-10)
    summary = profile.summary()
    assert [len(blocks) for blocks in summary["positions"]] == [len(merge_rows(windows))] * 5


@pytest.mark.parametrize(
    "plant",
    [
        reads(LossProfile.add, "targets", lambda targets, *, batch: batch.tokens[:, :-1]),
        wrapped(position_groups, lambda groups, lengths, edges: groups([[sum(row)] for row in lengths], edges)),
        constant(position_groups, "right", "left"),
        calls(frequency_groups, "argsort", lambda np, x, kind: np.argsort(-x, kind=kind)),
    ],
    ids=["the input's frequency", "positions in the window", "off by one", "rare first"],
)
def test_planted_errors_are_caught(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(monkeypatch)
    try:
        test_every_loss_is_in_the_group_of_its_position_and_of_its_token(corpus)
        test_each_group_of_tokens_makes_up_a_tenth_of_the_text()
    except AssertionError:
        return
    raise AssertionError("the planted error was not caught")


def test_each_group_of_tokens_makes_up_a_tenth_of_the_text() -> None:
    frequencies = np.random.default_rng(0).pareto(2.0, 5000)
    groups = frequency_groups(frequencies)
    shares = [frequencies[groups == group].sum() / frequencies.sum() for group in range(10)]
    assert groups.max() == 9
    assert np.allclose(shares, 0.1, atol=0.01)
    order = np.argsort(-frequencies)
    assert (np.diff(groups[order]) >= 0).all()  # group 0 has the most frequent tokens
    # a token that is half of the text is a group of its own, and no group is empty
    one_large = np.array([0.5] + [0.01] * 50)
    assert (frequency_groups(one_large) == 0).sum() == 1
    assert sorted(set(frequency_groups(one_large))) == list(range(frequency_groups(one_large).max() + 1))
    assert (frequency_groups(np.zeros(3)) == 0).all()


def test_frequencies_are_those_of_the_training_text(corpus: Corpus) -> None:
    [file] = corpus.train
    counts = np.bincount(file.read(0, len(file)), minlength=272).astype(float)
    counts[corpus.tokenizer.eod_id] = 0
    assert np.allclose(token_frequencies(corpus), counts / counts.sum())


def test_long_files_are_counted_in_pieces(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = token_frequencies(corpus)
    monkeypatch.setattr(loss_profile, "MAX_TOKENS", 1000)
    pieces = token_frequencies(corpus)
    assert 0 < np.abs(pieces - whole).max() < 0.05


def test_rows_are_merged_in_order() -> None:
    rows = [(float(number), 1) for number in range(70)]
    assert merge_rows(rows, 32) == [(float(3 * (3 * n + 1)), 3) for n in range(23)] + [(69.0, 1)]
    assert merge_rows(rows[:5], 32) == rows[:5]
    assert merge_rows([]) == []


def test_positions_start_again_in_each_document() -> None:
    assert position_groups(((3, 5), (8,)), [0, 2, 4, 8]).tolist() == [
        [0, 0, 1, 0, 0, 1, 1, 2],
        [0, 0, 1, 1, 2, 2, 2, 2],
    ]
    assert position_edges(256) == [0, 16, 32, 64, 128, 256]
