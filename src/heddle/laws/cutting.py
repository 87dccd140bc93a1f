"""The law of mixers: cutting a text anywhere and carrying the state gives the uncut answer."""

import torch

from heddle.laws.subject import (
    Broken,
    advance,
    answer,
    equal,
    fork,
    fresh,
    in_chunks,
    keeps_state,
    memory,
    refuses,
    subject,
    text,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.context.layout import Layout
from heddle.parts.context.position_table import GROWTH_START


def cut(config: ModelConfig) -> None:
    """Cutting a text and carrying the state gives the uncut answer, at lengths around every window."""
    model = subject(config)
    if not keeps_state(model):
        return
    for length in _lengths(model):
        tokens = text(config, 2, length)
        whole = answer(model, tokens)
        for number, sizes in enumerate(_chunkings(length)):
            for capacity in (None, length) if number == 0 else (length if number % 2 else None,):
                hidden, _ = in_chunks(model, tokens, sizes, capacity)
                equal(hidden, whole, f"text of {length} cut {_brief(sizes)}, capacity {capacity}")


def _lengths(model: Decoder) -> list[int]:
    around = {length for w in windows(model) for length in (w - 1, w, w + 1, 2 * w + 3)}
    return sorted(length for length in around | {11} if length > 0)


def _chunkings(length: int) -> list[list[int]]:
    """Token by token, at once, a prefill and steps, and uneven chunks."""
    found = [[1] * length, [length]]
    for pattern in ([length // 2, 1, 1], [3, 1, 1, 4], [1, 5], [length - 1]):
        sizes, left = [], length
        for size in pattern * length:
            if 0 < size <= left:
                sizes.append(size)
                left -= size
        sizes += [left] if left else []
        if sizes not in found:
            found.append(sizes)
    return found


def _brief(sizes: list[int]) -> str:
    if len(sizes) > 8 and len(set(sizes)) == 1:
        return f"into {len(sizes)} chunks of {sizes[0]}"
    return str(sizes)


def cut_everywhere(config: ModelConfig, length: int = 6) -> None:
    """Every one of the 2^(T−1) ways to cut a short text gives the uncut answer."""
    model = subject(config)
    if not keeps_state(model):
        return
    tokens = text(config, 2, length)
    whole = answer(model, tokens)

    def follow(state: State, done: list[int]) -> None:
        """Each next chunk from this state; ways that begin alike share their beginning."""
        start = sum(done)
        for size in range(1, length - start + 1):
            stop = start + size
            hidden, after = advance(model, fork(state), tokens[:, start:stop])
            equal(hidden, whole[:, start:stop], f"after {done} a chunk of {size} (tokens counted from it)")
            follow(after, [*done, size])

    follow(fresh(model, 2, length), [])


def cut_ragged(config: ModelConfig) -> None:
    """Cutting padded rows and packed documents gives the uncut answer."""
    model = subject(config)
    if not keeps_state(model):
        return
    holes = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]])
    layouts = {
        "padded on the left": Layout.padded([5, 9, 1], side="left"),
        "padded on the right": Layout.padded([5, 9, 1], side="right"),
        "padded between": Layout(torch.where(holes > 0, holes.cumsum(1) - 1, -1)),
        "of packed documents": Layout.packed([[4, 5], [1, 8], [3, 3, 3]]),
    }
    tokens = text(config, 3, 9)
    for name, layout in layouts.items():
        real = (layout.positions >= 0)[..., None]
        whole = answer(model, tokens, layout) * real
        for sizes, capacity in (([9], 9), ([1] * 9, None), ([1, 3, 1, 4], 9), ([6, 3], None)):
            hidden, _ = in_chunks(model, tokens, sizes, capacity, layout)
            equal(torch.where(real, hidden, 0.0), whole, f"rows {name} cut {sizes}, capacity {capacity}")


def growth(config: ModelConfig) -> None:
    """A state without a declared capacity grows past its first size and keeps what it held."""
    model = subject(config)
    if not keeps_state(model):
        return
    length = GROWTH_START + 6
    tokens = text(config, 1, length)
    hidden, _ = in_chunks(model, tokens, [GROWTH_START - 2, 1, 1, 1, 3, 2])
    equal(hidden, answer(model, tokens), f"a growing state, {length} tokens")


def state_refusals(config: ModelConfig) -> None:
    """A state that is full, consumed, of unknown length, another batch or design, or under gradients is refused."""
    model = subject(config)
    if not keeps_state(model):
        return
    tokens = text(config, 2, 6)
    _, state = in_chunks(model, tokens, [6], capacity=6)
    refuses(lambda: advance(model, fork(state), tokens[:, :1]), "capacity 6", "a full state took another token")
    first = fresh(model, 2, 6)
    advance(model, first, tokens)
    refuses(lambda: advance(model, first, tokens), "consumed", "a consumed state was used again")
    refuses(lambda: advance(model, fresh(model, 3), tokens), "3 rows", "a state of 3 rows took 2")
    other = subject(config.replace(initialisation=config.initialisation.replace(std=config.initialisation.std * 2)))
    refuses(lambda: advance(model, fresh(other, 2), tokens), "another design", "a state of another design was used")
    with torch.enable_grad():
        refuses(lambda: model(tokens, None, fresh(model, 2)), "gradient", "a state was used under gradients")
    for batch, capacity in ((0, 4), (1, 0)):
        make = lambda batch=batch, capacity=capacity: fresh(model, batch, capacity)  # noqa: E731
        refuses(make, "at least 1", f"a state of {batch} rows and capacity {capacity} was made")
    if model.by_length:
        refuses(lambda: model.init_state(2, None, memory(model, 2)), "capacity", "a state of unknown length was made")
    if state.bytes != fresh(model, 2, 6).bytes:
        raise Broken(f"a state of declared capacity changed from {fresh(model, 2, 6).bytes} to {state.bytes} bytes")
