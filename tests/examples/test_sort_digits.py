"""The example that sorts digits, made short: it learns, and what it decodes with a state is what one call says."""

import copy

import numpy as np
import pytest
import torch

import heddle
from examples import sort_digits
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout
from heddle.training.step import encoded


def test_rows_are_digits_and_the_same_in_order() -> None:
    batch = sort_digits.draw(50, 3, longest=4)
    assert batch.source is not None
    for source, text in zip(batch.source.tolist(), batch.tokens.tolist(), strict=True):
        digits = [digit for digit in source if digit >= 0]
        ends = [sort_digits.END] * (5 - len(digits))
        assert text == [sort_digits.START, *sorted(digits), *ends]
        assert 1 <= len(digits) <= 4
    assert not np.array_equal(batch.tokens, sort_digits.draw(50, 4, longest=4).tokens)


@pytest.fixture(scope="module")
def trained() -> Decoder:
    return sort_digits.train(steps=80, longest=3)


def test_it_learns_to_sort(trained: Decoder) -> None:
    assert sort_digits.exact(trained, sort_digits.draw(300, 0, longest=3)) >= 0.9


def test_greedy_decoding_with_a_state_is_that_of_whole_calls(trained: Decoder) -> None:
    model, batch = copy.deepcopy(trained).to(torch.float64), sort_digits.draw(20, 0, longest=3)
    assert batch.source is not None
    with torch.no_grad():
        memory = encoded(model, batch.source)
        written = heddle.generate(model, [[sort_digits.START]] * 20, memory=memory, max_new_tokens=6)
        tokens = torch.tensor([[sort_digits.START]] * 20)
        for _ in range(6):
            hidden, _ = model(tokens, Layout.causal(*tokens.shape).with_memory(memory))
            tokens = torch.cat((tokens, model.head(hidden[:, -1:]).argmax(-1)), dim=1)
    assert tokens[:, 1:].tolist() == written
    assert len({tuple(row) for row in written}) > 10
