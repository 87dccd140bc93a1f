"""Padding and packing: the hidden state of a token does not depend on what else is in its row or batch."""

import torch
from torch import Tensor

from heddle.laws.harness import (
    add_gradients,
    assert_close,
    assert_gradients_close,
    forward,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    gradients,
    model_under_test,
    probe_loss,
    random_tokens,
    supports_state,
)
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout

LENGTHS = (9, 4, 1, 0)
NEW_TOKENS = 3


def padding_invariance(config: ModelConfig) -> None:
    """Padding on either side or between tokens changes no token, nor the tokens decoded after it."""
    model = model_under_test(config)
    rows = random_tokens(config, len(LENGTHS), max(LENGTHS) + NEW_TOKENS)
    alone = [forward_no_grad(model, rows[i : i + 1, : length + NEW_TOKENS])[0] for i, length in enumerate(LENGTHS)]
    short = [forward_no_grad(model, rows[i : i + 1, :length])[0] for i, length in enumerate(LENGTHS)]
    following = torch.stack([rows[i, length : length + NEW_TOKENS] for i, length in enumerate(LENGTHS)])
    for side in ("left", "right", "both"):
        layout, tokens = _padded(rows, side)
        hidden = forward_no_grad(model, tokens, layout)
        for i, length in enumerate(LENGTHS):
            unpadded = hidden[i][layout.positions[i] >= 0]
            assert_close(unpadded[None], short[i][None], f"row of {length} tokens padded on the {side} side")
        if supports_state(model):
            for cache_length in (None, max(LENGTHS) + NEW_TOKENS):
                _, state = forward_in_chunks(model, tokens, [tokens.shape[1]], cache_length, layout)
                for step in range(NEW_TOKENS):
                    hidden, state = forward_with_state(model, state, following[:, step : step + 1])
                    want = torch.stack([alone[i][length + step] for i, length in enumerate(LENGTHS)])
                    assert_close(hidden, want[:, None], f"step {step} after a prompt padded on the {side} side")


def _padded(rows: Tensor, side: str) -> tuple[Layout, Tensor]:
    """The first `LENGTHS` tokens of each row, padded to one more than the longest."""
    width = max(LENGTHS) + 1
    if side == "both":
        start = [(width - length) // 2 for length in LENGTHS]
        index = torch.arange(width) - torch.tensor(start)[:, None]
        layout = Layout(torch.where((index >= 0) & (index < torch.tensor(LENGTHS)[:, None]), index, -1))
    else:
        layout = Layout.padded(LENGTHS, width, side=side)
    filler = rows[:, -1:]  # an ordinary token, whose effect would show
    return layout, torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), filler)


def padding_gradients(config: ModelConfig) -> None:
    """The gradients of a padded batch are the sum of those of its rows computed separately."""
    model = model_under_test(config)
    rows = random_tokens(config, len(LENGTHS), max(LENGTHS))
    want = None
    for i, length in enumerate(LENGTHS):
        if length:
            row_gradients = gradients(model, probe_loss(forward(model, rows[i : i + 1, :length])))
            want = row_gradients if want is None else add_gradients(want, row_gradients)
    assert want is not None
    for side in ("left", "right"):
        layout, tokens = _padded(rows, side)
        got = gradients(model, probe_loss(forward(model, tokens, layout), layout.positions >= 0))
        assert_gradients_close(got, want, f"padding on the {side} side")


PACKED = ((4, 7, 1), (1, 2, 9))


def document_packing(config: ModelConfig) -> None:
    """Packed documents have the hidden states and gradients of the same documents computed separately."""
    model = model_under_test(config)
    tokens = random_tokens(config, 2, 12)
    separate, want = [], None
    for row, lengths in enumerate(PACKED):
        hidden = []
        for document in tokens[row].split(list(lengths)):
            hidden_states = forward(model, document[None])
            hidden.append(hidden_states[0].detach())
            document_gradients = gradients(model, probe_loss(hidden_states))
            want = document_gradients if want is None else add_gradients(want, document_gradients)
        separate.append(torch.cat(hidden))
    assert want is not None
    packed = Layout.packed(PACKED)
    plain = packed.map_tensors(lambda x: x)
    for name, layout in (("known lengths", packed), ("positions and documents alone", plain)):
        together = forward(model, tokens, layout)
        assert_close(together.detach(), torch.stack(separate), f"packed with {name}")
        assert_gradients_close(gradients(model, probe_loss(together)), want, f"packed with {name}")


def decoding_after_packing(config: ModelConfig) -> None:
    """Decoding after packed documents continues each row's last document."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    tokens, new_tokens = random_tokens(config, 2, 12), random_tokens(config, 2, NEW_TOKENS, seed=1)
    layout = Layout.packed(PACKED)
    want = []
    for row, lengths in enumerate(PACKED):
        last = torch.cat((tokens[row, 12 - lengths[-1] :], new_tokens[row]))
        want.append(forward_no_grad(model, last[None])[0, -NEW_TOKENS:])
    for cache_length in (None, 12 + NEW_TOKENS):
        _, state = forward_in_chunks(model, tokens, [12], cache_length, layout)
        hidden, _ = forward_with_state(model, state, new_tokens)
        assert_close(
            hidden, torch.stack(want), f"{NEW_TOKENS} tokens after packed documents, cache_length {cache_length}"
        )
