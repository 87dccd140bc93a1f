"""Batches: rows are independent of each other, and calls of earlier calls."""

from heddle.laws.harness import (
    assert_bitwise_equal,
    assert_close,
    assert_unaffected,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
    supports_state,
)
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout


def batch_invariance(config: ModelConfig) -> None:
    """A row gives the same hidden states alone as in a batch, in one call and with a state."""
    model = model_under_test(config)
    tokens = random_tokens(config, 3, 8)
    batch = forward_no_grad(model, tokens)
    for row in range(3):
        row_tokens = tokens[row : row + 1]
        assert_close(
            batch[row : row + 1], forward_no_grad(model, row_tokens), f"row {row} of a batch of 3, against itself alone"
        )
    if supports_state(model):
        steps, _ = forward_in_chunks(model, tokens, [4, 1, 1, 2])
        assert_close(steps, batch, "3 rows with a state, against one call")


def row_isolation(config: ModelConfig) -> None:
    """Changing the tokens of other rows changes no bit of a row."""
    model = model_under_test(config)
    tokens, others = random_tokens(config, 3, 8), random_tokens(config, 3, 8, seed=1)
    others[1] = tokens[1]
    got, want = forward_no_grad(model, others), forward_no_grad(model, tokens)
    assert_unaffected(model, got[1:2], want[1:2], "the tokens of other rows were changed (the row is counted alone)")


def batch_position_invariance(config: ModelConfig) -> None:
    """A row gives the same hidden states at any index of any batch, however many rows and padding surround it."""
    model = model_under_test(config)
    row, others = random_tokens(config, 1, 7), random_tokens(config, 5, 12, seed=1)
    alone = forward_no_grad(model, row)
    for position, lengths in ((0, [7, 7]), (2, [1, 12, 7, 4]), (4, [9, 3, 0, 12, 7])):
        for side in ("left", "right"):
            layout = Layout.padded(lengths, side=side)
            first = 0 if side == "right" else layout.length - 7
            tokens = others[: len(lengths), : layout.length].clone()
            tokens[position, first : first + 7] = row[0]
            what = f"row {position} of {len(lengths)} padded on the {side} (counted alone)"
            assert_close(
                forward_no_grad(model, tokens, layout)[position : position + 1, first : first + 7], alone, what
            )
            if model.causal:
                hidden, _ = forward_in_chunks(model, tokens, [layout.length - 2, 2], None, layout)
                assert_close(hidden[position : position + 1, first : first + 7], alone, f"{what}, with a state")


def call_isolation(config: ModelConfig) -> None:
    """A call gives the same bits before and after other calls: shorter, longer and with a state."""
    model = model_under_test(config)
    tokens = random_tokens(config, 2, 8)
    before = forward_no_grad(model, tokens)
    for length in (1, 19):
        forward_no_grad(model, random_tokens(config, 3, length, seed=1))
    if supports_state(model):
        state = new_state(model, 2)
        for start in range(0, 24, 6):
            _, state = forward_with_state(model, state, random_tokens(config, 2, 6, seed=start))
        first, _ = forward_in_chunks(model, tokens, [5, 1, 2])
        assert_close(first, before, "a fresh state after another was used")
    assert_bitwise_equal(forward_no_grad(model, tokens), before, "the same call after other calls")
