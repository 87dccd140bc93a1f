"""Bits per byte against a plain loop over documents."""

import math

import numpy as np
import pytest
import torch

from heddle.data.samples import Batch, evaluation_windows
from heddle.model.decoder import Decoder, build
from heddle.training.evaluation.scores import bits_and_bytes, ratio_of_sums
from tests import small

VOCABULARY = 40
SIZES = np.array([0, *(1 + token % 4 for token in range(1, VOCABULARY))], dtype=np.int64)  # token 0 is the end


def batch_of(tokens: np.ndarray, doc_lengths: tuple[tuple[int, ...], ...]) -> Batch:
    return Batch(tokens, doc_lengths, np.arange(len(tokens)))


def windows() -> list[Batch]:
    """Two batches; documents begin with token 0."""
    draw = np.random.default_rng(2)
    first = draw.integers(1, VOCABULARY, (3, 11))
    first[0, 0] = first[1, 4] = first[2, 0] = first[2, 1] = first[2, 10] = 0
    second = draw.integers(1, VOCABULARY, (1, 5))
    return [batch_of(first, ((10,), (4, 6), (1, 9))), batch_of(second, ((4,),))]


def plainly(model: Decoder, batches: list[Batch]) -> list[tuple[float, int]]:
    """The same numbers, one document and one target at a time."""
    result = []
    for window in batches:
        for row, lengths in zip(window.tokens, window.doc_lengths, strict=True):
            bits, size, start = 0.0, 0, 0
            for length in lengths:
                piece = torch.from_numpy(row[start : start + length])[None]
                with torch.no_grad():
                    logits = model.head(model(piece)[0])[0].log_softmax(-1)
                for position in range(length):
                    target = int(row[start + position + 1])
                    if target != 0:
                        bits -= float(logits[position, target]) / math.log(2)
                        size += int(SIZES[target])
                start += length
            result.append((bits, size))
    return result


@pytest.fixture
def model() -> Decoder:
    return build(small.config(small.dropping() | {"vocab_size": VOCABULARY}), dtype=torch.float64, seed=4).eval()


def agree(first: list[tuple[float, int]], second: list[tuple[float, int]]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(a[1] == b[1] and math.isclose(a[0], b[0], rel_tol=1e-12) for a, b in pairs)


def test_bits_and_bytes_of_each_window_equal_a_plain_loop(model: Decoder) -> None:
    assert agree(bits_and_bytes(model, windows(), SIZES), plainly(model, windows()))


def test_counting_the_end_token_is_caught(model: Decoder) -> None:
    counting = SIZES.copy()
    counting[0] = 1
    assert not agree(bits_and_bytes(model, windows(), counting), plainly(model, windows()))


def test_documents_that_see_each_other_are_caught(model: Decoder) -> None:
    joined = [batch_of(window.tokens, ((window.tokens.shape[1] - 1,),) * len(window.tokens)) for window in windows()]
    assert not agree(bits_and_bytes(model, joined, SIZES), plainly(model, windows()))


def test_the_model_is_measured_without_noise_and_comes_back_in_its_mode(model: Decoder) -> None:
    model.train()
    measured = bits_and_bytes(model, windows(), SIZES)
    assert model.training
    assert agree(measured, bits_and_bytes(model.eval(), windows(), SIZES))
    assert not model.training


def test_the_ratio_is_of_the_totals() -> None:
    assert ratio_of_sums([(10.0, 4), (2.0, 8)]) == 1.0
    assert math.isnan(ratio_of_sums([]))
    assert math.isnan(ratio_of_sums([(0.0, 0)]))


def test_every_byte_of_a_text_is_measured_once(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> None:
    corpus = small.corpus(tmp_path_factory.mktemp("text"))
    wide = build(small.config(), seed=1).eval()
    for context, batch in ((16, 4), (33, 1)):
        scores = bits_and_bytes(
            wide, evaluation_windows(corpus.validation, context, batch), corpus.tokenizer.byte_lengths
        )
        # the first token of the text, an end token, is no target and has no bytes
        assert sum(size for _, size in scores) == corpus.validation.text_bytes


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary(model: Decoder) -> None:
    with torch.no_grad():
        model.embed.weight.zero_()
    scores = bits_and_bytes(model, windows(), SIZES)
    targets = sum(int((window.tokens[:, 1:] != 0).sum()) for window in windows())
    assert sum(bits for bits, _ in scores) == pytest.approx(targets * math.log2(VOCABULARY), rel=1e-12)


def test_in_bfloat16_the_loss_stays_near(model: Decoder) -> None:
    single = model.float()
    exact = ratio_of_sums(bits_and_bytes(single, windows(), SIZES))
    narrow = ratio_of_sums(bits_and_bytes(single, windows(), SIZES, torch.bfloat16))
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=1e-2)
