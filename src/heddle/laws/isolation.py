"""Padding and packing: the hidden state of a token does not depend on what else is in its row or batch."""

import torch
from torch import Tensor

from heddle.laws.harness import (
    PADDING_TOKEN,
    LawViolation,
    add_gradients,
    assert_bitwise_equal,
    assert_close,
    assert_gradients_close,
    assert_unaffected,
    fork,
    forward,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    gradients,
    model_under_test,
    new_state,
    probe_loss,
    random_tokens,
    require_state,
    supports_state,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.layout import Layout
from heddle.parts.states import KVCache

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
    filler = rows[:, -1:]  # an ordinary token, to make any effect of padding visible
    return layout, torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), filler)


def padding_gradients(config: ModelConfig) -> None:
    """The gradients of a padded batch are the sum over its rows computed separately."""
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
    require_state(model)
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


# Batches: rows are independent of each other, and calls of earlier calls.


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


# NaN isolation: NaN in padding, in unused cache slots or in other rows changes no bit of anything else.


POISONED_LENGTHS = (7, 3, 1)
NAN = float("nan")


def _poison_padding_token(model: Decoder) -> None:
    with torch.no_grad():
        model.embed.weight[PADDING_TOKEN] = NAN


def nan_in_padding(config: ModelConfig) -> None:
    """NaN in the padding token's embedding changes no bit of a token and no gradient."""
    model = model_under_test(config)
    rows = random_tokens(config, 3, max(POISONED_LENGTHS))
    layouts = {side: Layout.padded(POISONED_LENGTHS, 8, side=side) for side in ("left", "right")}
    padded = {
        side: torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), PADDING_TOKEN)
        for side, layout in layouts.items()
    }

    def everything() -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        results = {}
        for side, layout in layouts.items():
            is_token = layout.positions >= 0
            hidden = forward(model, padded[side], layout)
            values = hidden.detach()
            if model.causal:
                values = torch.cat((values, forward_in_chunks(model, padded[side], [3, 1, 4], None, layout)[0]), dim=1)
                is_token = is_token.repeat(1, 2)
            grads = gradients(model, probe_loss(hidden, layout.positions >= 0))
            results[side] = torch.where(is_token[..., None], values, 0.0), grads
        return results

    clean = everything()
    _poison_padding_token(model)
    for side, (values, grads) in everything().items():
        assert_bitwise_equal(values, clean[side][0], f"NaN in the padding on the {side} side")
        assert_gradients_close(grads, clean[side][1], f"NaN in the padding on the {side} side", tolerance=0.0)


def nan_in_unused_slots(config: ModelConfig) -> None:
    """NaN in the unused slots of a cache changes no bit of the tokens decoded next."""
    model = model_under_test(config)
    require_state(model)
    tokens, new_tokens = random_tokens(config, 3, 7), random_tokens(config, 3, 6, seed=1)
    ragged = Layout.padded(POISONED_LENGTHS, 7, side="right")
    for name, layout, cache_length, sizes in (
        ("even rows", None, None, [4, 2]),
        ("even rows", None, 20, [1, 1, 1, 1, 2]),
        ("ragged rows", ragged, None, [1, 2, 3]),
        ("ragged rows", ragged, 20, [4, 1, 1]),
    ):
        _, state = forward_in_chunks(model, tokens, [7], cache_length, layout)
        poisoned = fork(state)
        _poison_slots(poisoned)
        want = _continued(model, state, new_tokens, sizes)
        got = _continued(model, poisoned, new_tokens, sizes)
        assert_bitwise_equal(
            got, want, f"NaN in the unused slots of {name}, then chunks {sizes}, cache_length {cache_length}"
        )


def _continued(model: Decoder, state: State, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    out = []
    for chunk in tokens.split(sizes, dim=1):
        hidden, state = forward_with_state(model, state, chunk)
        out.append(hidden)
    return torch.cat(out, dim=1)


def _poison_slots(state: State) -> None:
    """Fill the unused slots. A row of n tokens uses the first n slots of a cache, or all of a full ring buffer."""
    caches = [part for layer in state.layers if layer is not None for part in layer.nested_states()]
    for cache in caches:
        if isinstance(cache, KVCache):
            for tensor in cache.tensors().values():
                unused = torch.arange(tensor.shape[2]) >= state.table.token_counts[:, None]
                tensor.masked_fill_(unused[:, None, :, None], NAN)


def padding_not_cached(config: ModelConfig) -> None:
    """Padding is written to no state: after a padded call, a row's state is the same as after a call on it alone."""
    model = model_under_test(config)
    require_state(model)
    rows = random_tokens(config, 3, max(POISONED_LENGTHS))
    for side in ("left", "right"):
        layout = Layout.padded(POISONED_LENGTHS, 8, side=side)
        tokens = torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), PADDING_TOKEN)
        _, padded = forward_in_chunks(model, tokens, [8], 12, layout)
        batch_tensors = padded.tensors()
        for row, length in enumerate(POISONED_LENGTHS):
            _, alone = forward_in_chunks(model, rows[row : row + 1, :length], [length], 12)
            for name, tensor in alone.tensors().items():
                got, want = batch_tensors[name][row], tensor[0]
                same = (got - want).abs() <= 1e-10 if want.is_floating_point() else got == want
                if not bool(same.all()):
                    raise LawViolation(f"{name} of row {row} padded on the {side} side differs from the row alone")


def nan_in_other_rows(config: ModelConfig) -> None:
    """NaN in other rows of a batch changes no bit of a row, in one call and with a state."""
    model = model_under_test(config)
    tokens = random_tokens(config, 3, 8)
    poisoned = tokens.clone()
    poisoned[1, 2:] = PADDING_TOKEN
    others = torch.tensor([0, 2])

    def rows(tokens: torch.Tensor) -> list[torch.Tensor]:
        outputs = [forward_no_grad(model, tokens)[others]]
        if model.causal:
            outputs.append(forward_in_chunks(model, tokens, [3, 1, 4])[0][others])
        return outputs

    clean = rows(tokens)
    _poison_padding_token(model)
    for got, want, how in zip(rows(poisoned), clean, ("in one call", "with a state"), strict=False):
        assert_unaffected(model, got, want, f"NaN in row 1, {how} (rows counted without it)")
