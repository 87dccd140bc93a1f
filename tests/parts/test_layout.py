"""Layouts: what their constructors build, the static facts they carry, and which errors they raise."""

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
    assert (layout.start, layout.padding, layout.segment_ids) == (4, None, None)
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
    assert layout.segment_ids is not None
    assert layout.segment_ids.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert layout.doc_lengths == ((2, 1), (1, 2))
    assert Layout.packed([[3], [3]]).start == 0


def test_axial_positions() -> None:
    layout = Layout.padded([1, 2])
    assert layout.axial_positions.tolist() == [[[0, 0], [0, 0]], [[0, 0], [1, 1]]]
    located = layout.with_coordinates(torch.tensor([[[9, 9], [3, 4]], [[5, 6], [-7, 8]]]))
    assert located.axial_positions.tolist() == [[[0, 0], [3, 4]], [[5, 6], [-7, 8]]]
    assert located.positions is layout.positions


def test_static_facts_of_attention_masks() -> None:
    facts = {
        name: (mask.contiguous, mask.all_visible, mask.may_have_padding)
        for name, mask in {
            "causal": Layout.causal(1, 5).attention_mask(None, True),
            "one token": Layout.causal(1, 1).attention_mask(None, True),
            "bidirectional": Layout.causal(1, 5).attention_mask(None, False),
            "bidirectional window": Layout.causal(1, 5).attention_mask(2, False),
            "padded": Layout.padded([5, 3]).attention_mask(None, True),
            "packed": Layout.packed([[2, 3]]).attention_mask(None, True),
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
    assert layout.segment_ids is not None
    assert layout.segment_ids[0, :3].tolist() == [0, 0, 1]
    assert (layout.has_padding, layout.doc_lengths, layout.start, layout.max_text_length) == (True, None, None, 4)
    assert Layout.packed([[2, 1], [1, 2]], 9).max_text_length == Layout.packed([[2, 1], [1, 2]]).max_text_length == 2
    for doc_lengths in ([[2, 2], [4]], [[3], [3]]):
        full, plain = Layout.packed(doc_lengths, sum(doc_lengths[0])), Layout.packed(doc_lengths)
        assert (full.doc_lengths, full.start, full.has_padding) == (plain.doc_lengths, plain.start, False)
        assert torch.equal(full.positions, plain.positions)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(torch.zeros(3)), "layout: positions have shape [3]; expected [batch, length]"),
        (
            lambda: Layout(torch.zeros(2, 3), torch.zeros(2, 4)),
            "layout: segment_ids have shape [2, 4], positions [2, 3]; expected the same shape",
        ),
        (
            lambda: Layout.causal(2, 3).with_coordinates(torch.zeros(2, 3)),
            "layout: coordinates have shape [2, 3]; expected [2, 3, 2], x and y of each token",
        ),
        (
            lambda: Layout.causal(2, 3).with_coordinates(torch.zeros(1, 3, 2)),
            "layout: coordinates have shape [1, 3, 2]; expected [2, 3, 2], x and y of each token",
        ),
        (
            lambda: Layout.causal(1, 1).with_coordinates(torch.zeros(1, 1, 2) > 0),
            "layout: coordinates are torch.bool; expected whole or floating-point numbers",
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
            "layout: doc_lengths [[1, 2], [2]] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([[1, 0]]),
            "layout: doc_lengths [[1, 0]] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([]),
            "layout: doc_lengths [] must be positive and sum to the same length in each row",
        ),
        (
            lambda: Layout.packed([[1, 2], [4]], 3),
            "layout: doc_lengths [[1, 2], [4]] must be positive and sum at most to 3",
        ),
        (lambda: Layout.packed([[1], []], 3), "layout: doc_lengths [[1], []] must be positive and sum at most to 3"),
    ],
)
def test_invalid_layouts_raise(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("name", ["attention-gqa", "sinusoidal", "attention-window-7"])
def test_a_layout_used_in_inference_can_be_used_in_training(name: str) -> None:
    model, tokens = heddle.build(case(name)), torch.ones(2, 5, dtype=torch.int64)
    for layout in (Layout.padded([5, 3]), Layout.packed([[2, 3], [4, 1]]), Layout.causal(2, 5)):
        with torch.inference_mode():
            before, _ = model(tokens, layout)
        after, _ = model(tokens, layout)
        after.sum().backward()
        assert torch.allclose(after.detach(), before)
