"""Layouts: what their constructors build, the static facts they carry, and which errors they raise."""

import re
from collections.abc import Callable

import pytest
import torch

import heddle
from heddle.errors import ConfigError
from heddle.parts.layout import Layout
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
    assert Layout.padded([2, 3], start=5).positions.tolist() == [[-1, 5, 6], [5, 6, 7]]
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
    assert (layout.has_padding, layout.packed_lengths, layout.start) == (True, None, None)
    assert layout.text_lengths == ((2, 1), (4,), (1,))
    assert Layout.packed([[2, 1], [1, 2]], 9).text_lengths == Layout.packed([[2, 1], [1, 2]]).text_lengths
    for doc_lengths in ([[2, 2], [4]], [[3], [3]]):
        full, plain = Layout.packed(doc_lengths, sum(doc_lengths[0])), Layout.packed(doc_lengths)
        assert (full.doc_lengths, full.start, full.has_padding) == (plain.doc_lengths, plain.start, False)
        assert torch.equal(full.positions, plain.positions)


CONSTRUCTED: dict[str, Callable[[], Layout]] = {
    "causal": lambda: Layout.causal(2, 5, start=3),
    "padded on the left": lambda: Layout.padded([2, 0, 3], 4),
    "padded on the right": lambda: Layout.padded([2, 3], side="right", start=7),
    "packed": lambda: Layout.packed([[2, 1], [1, 2]]),
    "packed with padding": lambda: Layout.packed([[2, 1], [4], [1]], 4),
    "packed, one document a row": lambda: Layout.packed([[3], [3]]),
    "one token": lambda: Layout.causal(1, 1),
}


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_facts_read_off_tensors_are_those_of_the_constructor(name: str) -> None:
    layout = CONSTRUCTED[name]()
    wrong_facts = Layout(layout.positions, layout.segment_ids, start=9, doc_lengths=((9,),), max_position=99)
    assert layout.is_checked
    for other in (Layout.of(layout.positions.to(torch.int32), layout.segment_ids), wrong_facts.checked()):
        assert other.is_checked
        assert torch.equal(other.positions, layout.positions)
        assert (other.start, other.has_padding) == (layout.start, layout.has_padding)
        assert other.text_lengths == layout.text_lengths
        assert other.max_position == int(layout.positions.max())
        if layout.start is None:
            assert (other.packed_lengths, other.max_position) == (layout.packed_lengths, layout.max_position)


def test_a_layout_from_tensors_is_a_copy() -> None:
    positions, segment_ids = torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.int64)
    layout = Layout.of(positions, segment_ids)
    positions[0, 2], segment_ids[0, 1] = 0, 7
    assert layout.positions.tolist() == [[0, 1, 2, 3]]
    assert layout.dense_segment_ids.tolist() == [[0, 0, 0, 0]]


def test_an_encoder_believes_no_fact_of_a_layout_from_outside() -> None:
    model, layout = heddle.build(case("encoder")), Layout.padded([3, 5])
    source = torch.ones(2, 5, dtype=torch.int64)
    is_token = model.encode(source, Layout(layout.positions, has_padding=False)).is_token
    assert is_token is not None
    assert torch.equal(is_token, layout.positions >= 0)


def test_a_layout_on_another_device_is_refused() -> None:
    model = heddle.build(case("attention-mha"))
    with pytest.raises(ConfigError, match=r"^layout:.*cpu"):
        model(torch.ones(1, 2, dtype=torch.int64), Layout.causal(1, 2, device="meta"))


def test_constructors_and_decoding_read_no_value_from_the_device() -> None:
    """On the meta device there is no value to read."""
    config = case("attention-window-7")
    model = heddle.build(config, device="meta")
    tokens = torch.zeros(2, 9, dtype=torch.int64, device="meta")
    with torch.no_grad():
        for layout in (
            Layout.causal(2, 9, device="meta"),
            Layout.padded([4, 9], device="meta"),
            Layout.packed([[4, 5], [2, 7]], device="meta"),
            Layout.packed([[4], [9]], 9, device="meta"),
        ):
            model(tokens, layout)
        _, state = model(tokens, None, model.init_state(2, 20))
        _, state = model(tokens[:, :1], None, state)
        _, state = model(tokens[:, :1], Layout.causal(2, 1, start=10, device="meta"), state)
        # a layout of tensors is read
        with pytest.raises(NotImplementedError, match=r"^Cannot copy out of meta tensor; no data!$"):
            model(tokens, Layout(torch.zeros(2, 9, dtype=torch.int64, device="meta")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.of(torch.zeros(2, 3)), "layout: positions are torch.float32"),
        (
            lambda: Layout.of(torch.tensor([[0, 1]]), torch.zeros(1, 2) > 0),
            "layout: segment_ids are torch.bool",
        ),
        (
            lambda: Layout.of(
                torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64, device="meta")
            ),
            "layout: segment_ids are on meta, positions on cpu",
        ),
        (
            lambda: Layout.of(torch.tensor([[0, 1, 2, 0]])),
            "layout: position 0 follows 2 at token 3 of row 0",
        ),
        (
            lambda: Layout.of(torch.tensor([[-1, 0], [3, 5]])),
            "layout: position 5 follows 3 at token 1 of row 1",
        ),
        (
            lambda: Layout.of(torch.tensor([[0, 1, 0, -1, 2]]), torch.tensor([[4, 4, 9, 0, 4]])),
            "layout: segment id 4 follows 9 at token 4 of row 0",
        ),
        (
            lambda: Layout.of(torch.tensor([[0, -2]])),
            "layout: position -2 at token 1 of row 0",
        ),
        (
            lambda: Layout.of(torch.tensor([[2**31]])),
            "layout: position 2147483648 at token 0 of row 0",
        ),
        (
            lambda: Layout.of(torch.tensor([[0]]), torch.tensor([[-1]])),
            "layout: segment id -1 at token 0 of row 0",
        ),
        (lambda: Layout.causal(1, 4, start=-2), "layout: start = -2 must be from 0 to 1073741824"),
        (lambda: Layout.padded([4], start=2**31), "layout: start = 2147483648 must be from 0 to 1073741824"),
        (lambda: Layout(torch.zeros(3)), "layout: positions have shape [3]"),
        (
            lambda: Layout(torch.zeros(2, 3), torch.zeros(2, 4)),
            "layout: segment_ids have shape [2, 4], positions [2, 3]",
        ),
        (
            lambda: Layout.causal(2, 3).with_coordinates(torch.zeros(2, 3)),
            "layout: coordinates have shape [2, 3]",
        ),
        (
            lambda: Layout.causal(2, 3).with_coordinates(torch.zeros(1, 3, 2)),
            "layout: coordinates have shape [1, 3, 2]",
        ),
        (
            lambda: Layout.causal(1, 1).with_coordinates(torch.zeros(1, 1, 2) > 0),
            "layout: coordinates are torch.bool",
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
            "layout: doc_lengths [[1, 2], [4]] must be positive and sum to at most 3",
        ),
        (lambda: Layout.packed([[1], []], 3), "layout: doc_lengths [[1], []] must be positive and sum to at most 3"),
    ],
)
def test_invalid_layouts_raise(make: Callable[[], Layout], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
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
