"""Rows of a batch know nothing of each other, and calls nothing of earlier ones."""

from heddle.laws.subject import (
    advance,
    answer,
    equal,
    fresh,
    identical,
    in_chunks,
    keeps_state,
    subject,
    text,
    undisturbed,
)
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout


def rows_alone(config: ModelConfig) -> None:
    """A row alone gives the same answer as in a batch, in one call and with a state."""
    model = subject(config)
    tokens = text(config, 3, 8)
    batch = answer(model, tokens)
    for row in range(3):
        one = tokens[row : row + 1]
        equal(batch[row : row + 1], answer(model, one), f"row {row} of a batch of 3, against itself alone")
    if keeps_state(model):
        steps, _ = in_chunks(model, tokens, [4, 1, 1, 2])
        equal(steps, batch, "3 rows with a state, against one call")


def other_rows(config: ModelConfig) -> None:
    """The tokens of other rows change no bit of a row."""
    model = subject(config)
    tokens, others = text(config, 3, 8), text(config, 3, 8, seed=1)
    others[1] = tokens[1]
    got, want = answer(model, others), answer(model, tokens)
    undisturbed(model, got[1:2], want[1:2], "the tokens of other rows were changed (the row is counted alone)")


def needle(config: ModelConfig) -> None:
    """A row gives the same answer in any batch: wherever it stands, however many others and much padding beside it."""
    model = subject(config)
    row, others = text(config, 1, 7), text(config, 5, 12, seed=1)
    alone = answer(model, row)
    for place, lengths in ((0, [7, 7]), (2, [1, 12, 7, 4]), (4, [9, 3, 0, 12, 7])):
        for side in ("left", "right"):
            layout = Layout.padded(lengths, side=side)
            first = 0 if side == "right" else layout.length - 7
            tokens = others[: len(lengths), : layout.length].clone()
            tokens[place, first : first + 7] = row[0]
            what = f"row {place} of {len(lengths)} padded on the {side} (counted alone)"
            equal(answer(model, tokens, layout)[place : place + 1, first : first + 7], alone, what)
            if model.causal:
                hidden, _ = in_chunks(model, tokens, [layout.length - 2, 2], None, layout)
                equal(hidden[place : place + 1, first : first + 7], alone, f"{what}, with a state")


def no_memory(config: ModelConfig) -> None:
    """A call gives the same bits after other calls, shorter, longer and with a state, as before them."""
    model = subject(config)
    tokens = text(config, 2, 8)
    before = answer(model, tokens)
    for length in (1, 19):
        answer(model, text(config, 3, length, seed=1))
    if keeps_state(model):
        state = fresh(model, 2)
        for start in range(0, 24, 6):
            _, state = advance(model, state, text(config, 2, 6, seed=start))
        first, _ = in_chunks(model, tokens, [5, 1, 2])
        equal(first, before, "a fresh state after another was used")
    identical(answer(model, tokens), before, "the same call after other calls")
