"""The sorting example, made short: it learns, and decoding with a state equals whole forward calls."""

import copy

import numpy as np
import pytest
import torch

import heddle
from examples import sort_digits
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from heddle.training.step import run_encoder


def test_rows_are_digits_and_the_same_digits_sorted() -> None:
    batch = sort_digits.random_batch(50, 3, max_digits=4)
    assert batch.encoder_tokens is not None
    for source, text in zip(batch.encoder_tokens.tolist(), batch.tokens.tolist(), strict=True):
        digits = [digit for digit in source if digit >= 0]
        ends = [sort_digits.END] * (5 - len(digits))
        assert text == [sort_digits.START, *sorted(digits), *ends]
        assert 1 <= len(digits) <= 4
    assert not np.array_equal(batch.tokens, sort_digits.random_batch(50, 4, max_digits=4).tokens)


@pytest.fixture(scope="module")
def trained() -> Decoder:
    return sort_digits.train(steps=80, max_digits=3)


def test_it_learns_to_sort(trained: Decoder) -> None:
    assert sort_digits.exact_match(trained, sort_digits.random_batch(300, 0, max_digits=3)) >= 0.9


def test_greedy_decoding_with_a_state_equals_whole_forward_calls(trained: Decoder) -> None:
    model, batch = copy.deepcopy(trained).to(torch.float64), sort_digits.random_batch(20, 0, max_digits=3)
    assert batch.encoder_tokens is not None
    with torch.no_grad():
        encoder_output = run_encoder(model, batch.encoder_tokens)
        generated = heddle.generate(model, [[sort_digits.START]] * 20, encoder_output=encoder_output, max_new_tokens=6)
        tokens = torch.tensor([[sort_digits.START]] * 20)
        for _ in range(6):
            hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_encoder_output(encoder_output))
            tokens = torch.cat((tokens, model.head(hidden[:, -1:]).argmax(-1)), dim=1)
    assert tokens[:, 1:].tolist() == generated
    assert len({tuple(row) for row in generated}) > 10
