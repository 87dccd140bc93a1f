"""Padding and packing: a token's answer does not depend on what else was put into its row or its call."""

import torch
from torch import Tensor

from heddle.laws.subject import (
    add,
    advance,
    answer,
    call,
    equal,
    equal_gradients,
    gradients,
    in_chunks,
    keeps_state,
    loss,
    subject,
    text,
)
from heddle.model.config import ModelConfig
from heddle.parts.context.layout import Layout

LENGTHS = (9, 4, 1, 0)
MORE = 3


def padding(config: ModelConfig) -> None:
    """Padding on either side or between tokens changes no real token, also when decoding goes on from it."""
    model = subject(config)
    rows = text(config, len(LENGTHS), max(LENGTHS) + MORE)
    alone = [answer(model, rows[i : i + 1, : length + MORE])[0] for i, length in enumerate(LENGTHS)]
    short = [answer(model, rows[i : i + 1, :length])[0] for i, length in enumerate(LENGTHS)]
    following = torch.stack([rows[i, length : length + MORE] for i, length in enumerate(LENGTHS)])
    for side in ("left", "right", "both"):
        layout, tokens = _padded(rows, side)
        hidden = answer(model, tokens, layout)
        for i, length in enumerate(LENGTHS):
            real = hidden[i][layout.positions[i] >= 0]
            equal(real[None], short[i][None], f"row of {length} tokens padded on the {side} side")
        if keeps_state(model):
            for capacity in (None, max(LENGTHS) + MORE):
                _, state = in_chunks(model, tokens, [tokens.shape[1]], capacity, layout)
                for step in range(MORE):
                    hidden, state = advance(model, state, following[:, step : step + 1])
                    want = torch.stack([alone[i][length + step] for i, length in enumerate(LENGTHS)])
                    equal(hidden, want[:, None], f"step {step} after a prompt padded on the {side} side")


def _padded(rows: Tensor, side: str) -> tuple[Layout, Tensor]:
    """The first `LENGTHS` tokens of each row, padded to one more than the longest."""
    width = max(LENGTHS) + 1
    if side == "both":
        start = [(width - length) // 2 for length in LENGTHS]
        index = torch.arange(width) - torch.tensor(start)[:, None]
        layout = Layout(torch.where((index >= 0) & (index < torch.tensor(LENGTHS)[:, None]), index, -1))
    else:
        layout = Layout.padded(LENGTHS, width, side=side)
    filler = rows[:, -1:]  # an ordinary token, which would be seen if it were let
    return layout, torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), filler)


def padding_gradients(config: ModelConfig) -> None:
    """The gradients of padded rows are the sum of those of the rows alone."""
    model = subject(config)
    rows = text(config, len(LENGTHS), max(LENGTHS))
    want = None
    for i, length in enumerate(LENGTHS):
        if length:
            one = gradients(model, loss(call(model, rows[i : i + 1, :length])))
            want = one if want is None else add(want, one)
    assert want is not None
    for side in ("left", "right"):
        layout, tokens = _padded(rows, side)
        got = gradients(model, loss(call(model, tokens, layout), layout.positions >= 0))
        equal_gradients(got, want, f"padding on the {side} side")


PACKED = ((4, 7, 1), (1, 2, 9))


def packing(config: ModelConfig) -> None:
    """Packed documents give the values and gradients of the same documents alone."""
    model = subject(config)
    tokens = text(config, 2, 12)
    separate, want = [], None
    for row, lengths in enumerate(PACKED):
        hidden = []
        for document in tokens[row].split(list(lengths)):
            one = call(model, document[None])
            hidden.append(one[0].detach())
            found = gradients(model, loss(one))
            want = found if want is None else add(want, found)
        separate.append(torch.cat(hidden))
    assert want is not None
    packed = Layout.packed(PACKED)
    plain = Layout(packed.positions, packed.documents, has_padding=False)
    for name, layout in (("known lengths", packed), ("positions and documents alone", plain)):
        together = call(model, tokens, layout)
        equal(together.detach(), torch.stack(separate), f"packed with {name}")
        equal_gradients(gradients(model, loss(together)), want, f"packed with {name}")


def packing_continued(config: ModelConfig) -> None:
    """Decoding after packed documents goes on in each row's last document."""
    model = subject(config)
    if not keeps_state(model):
        return
    tokens, more = text(config, 2, 12), text(config, 2, MORE, seed=1)
    layout = Layout.packed(PACKED)
    want = []
    for row, lengths in enumerate(PACKED):
        last = torch.cat((tokens[row, 12 - lengths[-1] :], more[row]))
        want.append(answer(model, last[None])[0, -MORE:])
    for capacity in (None, 12 + MORE):
        _, state = in_chunks(model, tokens, [12], capacity, layout)
        hidden, _ = advance(model, state, more)
        equal(hidden, torch.stack(want), f"{MORE} tokens after packed documents, capacity {capacity}")
