"""Poison: NaN in padding, in unused slots of a state or in other rows changes no bit of anything else."""

import torch

from heddle.laws.subject import (
    POISON,
    Broken,
    advance,
    answer,
    call,
    equal_gradients,
    fork,
    gradients,
    identical,
    in_chunks,
    keeps_state,
    loss,
    subject,
    text,
    undisturbed,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.context.kv_cache import Cache
from heddle.parts.context.layout import Layout

LENGTHS = (7, 3, 1)
NAN = float("nan")


def _poisoned(model: Decoder) -> None:
    with torch.no_grad():
        model.embed.weight[POISON] = NAN


def poison_in_padding(config: ModelConfig) -> None:
    """NaN in the embedding of the padding token changes no bit of a real token and no gradient."""
    model = subject(config)
    rows = text(config, 3, max(LENGTHS))
    layouts = {side: Layout.padded(LENGTHS, 8, side=side) for side in ("left", "right")}
    padded = {
        side: torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), POISON)
        for side, layout in layouts.items()
    }

    def everything() -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        found = {}
        for side, layout in layouts.items():
            real = layout.positions >= 0
            hidden = call(model, padded[side], layout)
            values = hidden.detach()
            if model.causal:
                values = torch.cat((values, in_chunks(model, padded[side], [3, 1, 4], None, layout)[0]), dim=1)
                real = real.repeat(1, 2)
            grads = gradients(model, loss(hidden, layout.positions >= 0))
            found[side] = torch.where(real[..., None], values, 0.0), grads
        return found

    clean = everything()
    _poisoned(model)
    for side, (values, grads) in everything().items():
        identical(values, clean[side][0], f"NaN in the padding on the {side} side")
        equal_gradients(grads, clean[side][1], f"NaN in the padding on the {side} side", tolerance=0.0)


def poison_in_slots(config: ModelConfig) -> None:
    """NaN in the unused slots of a state changes no bit of what follows."""
    model = subject(config)
    if not keeps_state(model):
        return
    tokens, more = text(config, 3, 7), text(config, 3, 6, seed=1)
    ragged = Layout.padded(LENGTHS, 7, side="right")
    for name, layout, capacity, sizes in (
        ("even rows", None, None, [4, 2]),
        ("even rows", None, 20, [1, 1, 1, 1, 2]),
        ("ragged rows", ragged, None, [1, 2, 3]),
        ("ragged rows", ragged, 20, [4, 1, 1]),
    ):
        _, state = in_chunks(model, tokens, [7], capacity, layout)
        bad = fork(state)
        _poison_slots(bad)
        want = _continued(model, state, more, sizes)
        got = _continued(model, bad, more, sizes)
        identical(got, want, f"NaN in the unused slots of {name}, then chunks {sizes}, capacity {capacity}")


def _continued(model: Decoder, state: State, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    out = []
    for chunk in tokens.split(sizes, dim=1):
        hidden, state = advance(model, state, chunk)
        out.append(hidden)
    return torch.cat(out, dim=1)


def _poison_slots(state: State) -> None:
    """A row of n tokens uses the first n slots of each cache, and all of them once it has filled a ring."""
    held = [part for layer in state.layers if layer is not None for part in layer.parts()]
    for cache in held:
        if isinstance(cache, Cache):
            for tensor in cache.tensors().values():
                unused = torch.arange(tensor.shape[2]) >= state.table.counts[:, None]
                tensor.masked_fill_(unused[:, None, :, None], NAN)


def padding_is_not_kept(config: ModelConfig) -> None:
    """Padding is written to no state: what rows hold after a padded call is what they hold after a call alone."""
    model = subject(config)
    if not keeps_state(model):
        return
    rows = text(config, 3, max(LENGTHS))
    for side in ("left", "right"):
        layout = Layout.padded(LENGTHS, 8, side=side)
        tokens = torch.where(layout.positions >= 0, rows.gather(1, layout.positions.clamp(min=0)), POISON)
        _, padded = in_chunks(model, tokens, [8], 12, layout)
        held = padded.tensors()
        for row, length in enumerate(LENGTHS):
            _, alone = in_chunks(model, rows[row : row + 1, :length], [length], 12)
            for name, tensor in alone.tensors().items():
                difference = (held[name][row] - tensor[0]).abs()
                if not bool((difference <= 1e-10).all()):
                    raise Broken(f"{name} of row {row} padded on the {side} side differs from the row alone")


def poison_in_rows(config: ModelConfig) -> None:
    """NaN in other rows of a batch changes no bit, in one call and with a state."""
    model = subject(config)
    tokens = text(config, 3, 8)
    bad = tokens.clone()
    bad[1, 2:] = POISON
    others = torch.tensor([0, 2])

    def rows(tokens: torch.Tensor) -> list[torch.Tensor]:
        found = [answer(model, tokens)[others]]
        if model.causal:
            found.append(in_chunks(model, tokens, [3, 1, 4])[0][others])
        return found

    clean = rows(tokens)
    _poisoned(model)
    for got, want, how in zip(rows(bad), clean, ("in one call", "with a state"), strict=False):
        undisturbed(model, got, want, f"NaN in row 1, {how} (rows counted without it)")
