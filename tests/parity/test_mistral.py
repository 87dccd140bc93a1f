"""Mistral of transformers with random weights, in particular beyond its sliding window."""

from typing import Any

import pytest

from tests.parity import reference


def design(window: int | None, **mixer: Any) -> dict[str, Any]:
    attention = {"kind": "attention", "window": window, "position": {"kind": "rope"}, **mixer}
    feedforward = {"kind": "gated", "hidden": reference.HIDDEN}
    return {
        "norm": {"kind": "rms", "eps": 1e-5},
        "layers": [{"repeat": reference.DEPTH, "mixer": attention, "feedforward": feedforward}],
        "head": {"tied": False},
    }


@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "head_dim", "lengths"),
    [
        (None, 4, 2, 10, [17, 5]),
        (7, 6, 2, 14, [17, 5, 3]),  # the prompt is longer than the window
        (7, 3, 1, 8, [7, 6, 8]),  # it is as long, and one token to either side
        (16, 6, 3, 12, [5, 9]),  # the window is passed while decoding
        (2, 2, 2, 20, [9, 4]),
    ],
)
def test_mistral(window: int | None, heads: int, kv_heads: int, head_dim: int, lengths: list[int]) -> None:
    model = reference.theirs("mistral", heads, kv_heads, head_dim=head_dim, sliding_window=window, rms_norm_eps=1e-5)
    mine = reference.ours(design(window, heads=heads, kv_heads=kv_heads, head_dim=head_dim), model)
    reference.compare(mine, model, lengths)


def test_a_window_one_wider_is_told_apart() -> None:
    model = reference.theirs("mistral", 6, 2, head_dim=14, sliding_window=7, rms_norm_eps=1e-5)
    tokens, _, _ = reference.left_padded([17])
    want = reference.their_logits(model, tokens)
    for window in (6, 8):
        mine = reference.ours(design(window, heads=6, kv_heads=2, head_dim=14), model)
        difference = (reference.logits(mine, tokens) - want).abs().amax(-1)[0]
        assert float(difference[:6].max()) <= 1e-5
        assert float(difference[8:].max()) > 1e-3
