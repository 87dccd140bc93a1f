"""Layouts: what their constructors say, the static facts they carry, and what they refuse."""

import re
from collections.abc import Callable

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout
from tests.cases import case


def test_causal() -> None:
    layout = Layout.causal(2, 3, start=4)
    assert layout.positions.tolist() == [[4, 5, 6], [4, 5, 6]]
    assert (layout.start, layout.padding, layout.documents) == (4, None, None)
    assert (layout.batch, layout.length) == (2, 3)


def test_padded() -> None:
    assert Layout.padded([2, 3]).positions.tolist() == [[-1, 0, 1], [0, 1, 2]]
    assert Layout.padded([2, 3], side="right").positions.tolist() == [[0, 1, -1], [0, 1, 2]]
    assert Layout.padded([1, 0], 3).positions.tolist() == [[-1, -1, 0], [-1, -1, -1]]
    padding = Layout.padded([2, 3]).padding
    assert padding is not None
    assert padding.tolist() == [[True, False, False], [False, False, False]]


def test_packed() -> None:
    layout = Layout.packed([[2, 1], [1, 2]])
    assert layout.positions.tolist() == [[0, 1, 0], [0, 0, 1]]
    assert layout.documents is not None
    assert layout.documents.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert layout.pieces == ((2, 1), (1, 2))
    assert Layout.packed([[3], [3]]).start == 0


def test_places() -> None:
    layout = Layout.padded([1, 2])
    assert layout.coordinates.tolist() == [[[0, 0], [0, 0]], [[0, 0], [1, 1]]]
    placed = layout.with_places(torch.tensor([[[9, 9], [3, 4]], [[5, 6], [-7, 8]]]))
    assert placed.coordinates.tolist() == [[[0, 0], [3, 4]], [[5, 6], [-7, 8]]]
    assert placed.positions is layout.positions


def test_what_is_told_of_what_is_seen() -> None:
    facts = {
        name: (seen.ordered, seen.everything, seen.ragged)
        for name, seen in {
            "causal": Layout.causal(1, 5).seen(None, True),
            "one token": Layout.causal(1, 1).seen(None, True),
            "bidirectional": Layout.causal(1, 5).seen(None, False),
            "bidirectional window": Layout.causal(1, 5).seen(2, False),
            "padded": Layout.padded([5, 3]).seen(None, True),
            "packed": Layout.packed([[2, 3]]).seen(None, True),
        }.items()
    }
    assert facts == {
        "causal": (True, False, False),
        "one token": (True, True, False),
        "bidirectional": (True, True, False),
        "bidirectional window": (True, False, False),
        "padded": (False, False, True),
        "packed": (False, False, False),
    }


def test_packed_rows_may_end_in_padding() -> None:
    layout = Layout.packed([[2, 1], [4], [1]], 4)
    assert layout.positions.tolist() == [[0, 1, 0, -1], [0, 1, 2, 3], [0, -1, -1, -1]]
    assert layout.documents is not None
    assert layout.documents[0, :3].tolist() == [0, 0, 1]
    assert (layout.has_padding, layout.pieces, layout.start, layout.text_length) == (True, None, None, 4)
    assert Layout.packed([[2, 1], [1, 2]], 9).text_length == Layout.packed([[2, 1], [1, 2]]).text_length == 2
    for lengths in ([[2, 2], [4]], [[3], [3]]):
        full, plain = Layout.packed(lengths, sum(lengths[0])), Layout.packed(lengths)
        assert (full.pieces, full.start, full.has_padding) == (plain.pieces, plain.start, False)
        assert torch.equal(full.positions, plain.positions)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(torch.zeros(3)), "layout: positions have shape [3]; expected [batch, length]"),
        (
            lambda: Layout(torch.zeros(2, 3), torch.zeros(2, 4)),
            "layout: documents have shape [2, 4], positions [2, 3]; expected the same shape",
        ),
        (
            lambda: Layout.causal(2, 3).with_places(torch.zeros(2, 3)),
            "layout: places have shape [2, 3]; expected [2, 3, 2], x and y of each token",
        ),
        (
            lambda: Layout.causal(2, 3).with_places(torch.zeros(1, 3, 2)),
            "layout: places have shape [1, 3, 2]; expected [2, 3, 2], x and y of each token",
        ),
        (
            lambda: Layout.causal(1, 1).with_places(torch.zeros(1, 1, 2) > 0),
            "layout: places are torch.bool; expected whole or floating-point numbers",
        ),
        (
            lambda: Layout.padded([2, 4], 3),
            "layout: cannot pad rows of [2, 4] tokens to 3 on the side 'left'",
        ),
        (
            lambda: Layout.padded([2], side="middle"),
            "layout: cannot pad rows of [2] tokens to 2 on the side 'middle'",
        ),
        (lambda: Layout.padded([]), "layout: cannot pad rows of [] tokens to 0 on the side 'left'"),
        (
            lambda: Layout.packed([[1, 2], [2]]),
            "layout: packed lengths [[1, 2], [2]] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([[1, 0]]),
            "layout: packed lengths [[1, 0]] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([]),
            "layout: packed lengths [] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([[1, 2], [4]], 3),
            "layout: packed lengths [[1, 2], [4]] must be positive and sum at most to 3",
        ),
        (lambda: Layout.packed([[1], []], 3), "layout: packed lengths [[1], []] must be positive and sum at most to 3"),
    ],
)
def test_refusals(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("name", ["attention-gqa", "sinusoidal", "attention-window-7"])
def test_a_layout_seen_in_inference_serves_training_too(name: str) -> None:
    model, tokens = heddle.build(case(name)), torch.ones(2, 5, dtype=torch.int64)
    for layout in (Layout.padded([5, 3]), Layout.packed([[2, 3], [4, 1]]), Layout.causal(2, 5)):
        with torch.inference_mode():
            before, _ = model(tokens, layout)
        after, _ = model(tokens, layout)
        after.sum().backward()
        assert torch.allclose(after.detach(), before)
