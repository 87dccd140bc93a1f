"""Chunking: a text read in chunks, with a state carried from call to call, gives the hidden states of one call."""

import torch

from heddle.laws.harness import (
    LawViolation,
    assert_close,
    assert_refused,
    encoder_output_for,
    fork,
    forward_in_chunks,
    forward_no_grad,
    forward_with_state,
    model_under_test,
    new_state,
    random_tokens,
    supports_state,
    windows,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.parts.context.layout import Layout
from heddle.parts.context.position_table import INITIAL_SLOTS


def chunked_decoding(config: ModelConfig) -> None:
    """Reading a text in chunks with a state equals reading it in one call, for lengths around every window."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    for length in _lengths(model):
        tokens = random_tokens(config, 2, length)
        full = forward_no_grad(model, tokens)
        for number, sizes in enumerate(_chunkings(length)):
            for cache_length in (None, length) if number == 0 else (length if number % 2 else None,):
                hidden, _ = forward_in_chunks(model, tokens, sizes, cache_length)
                assert_close(hidden, full, f"text of {length} in {_brief(sizes)}, cache_length {cache_length}")


def _lengths(model: Decoder) -> list[int]:
    around = {length for w in windows(model) for length in (w - 1, w, w + 1, 2 * w + 3)}
    return sorted(length for length in around | {11} if length > 0)


def _chunkings(length: int) -> list[list[int]]:
    """Token by token, all at once, a prefill and single steps, and uneven chunks."""
    chunkings = [[1] * length, [length]]
    for pattern in ([length // 2, 1, 1], [3, 1, 1, 4], [1, 5], [length - 1]):
        sizes, remaining = [], length
        for size in pattern * length:
            if 0 < size <= remaining:
                sizes.append(size)
                remaining -= size
        sizes += [remaining] if remaining else []
        if sizes not in chunkings:
            chunkings.append(sizes)
    return chunkings


def _brief(sizes: list[int]) -> str:
    if len(sizes) > 8 and len(set(sizes)) == 1:
        return f"{len(sizes)} chunks of {sizes[0]}"
    return f"chunks {sizes}"


def all_chunkings(config: ModelConfig, length: int = 6) -> None:
    """All 2^(T−1) ways to split a short text into chunks give the hidden states of one call."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    tokens = random_tokens(config, 2, length)
    full = forward_no_grad(model, tokens)

    def follow(state: State, chunks: list[int]) -> None:
        """Try every next chunk from this state. Chunkings with the same beginning share its calls."""
        start = sum(chunks)
        for size in range(1, length - start + 1):
            stop = start + size
            hidden, after = forward_with_state(model, fork(state), tokens[:, start:stop])
            assert_close(hidden, full[:, start:stop], f"after {chunks} a chunk of {size} (tokens counted from it)")
            follow(after, [*chunks, size])

    follow(new_state(model, 2, length), [])


def chunked_ragged_batch(config: ModelConfig) -> None:
    """Reading padded rows and packed documents in chunks equals reading them in one call."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    holes = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0, 1, 1, 1]])
    layouts = {
        "padded on the left": Layout.padded([5, 9, 1], side="left"),
        "padded on the right": Layout.padded([5, 9, 1], side="right"),
        "padded between": Layout(torch.where(holes > 0, holes.cumsum(1) - 1, -1)),
        "of packed documents": Layout.packed([[4, 5], [1, 8], [3, 3, 3]]),
    }
    tokens = random_tokens(config, 3, 9)
    for name, layout in layouts.items():
        is_token = (layout.positions >= 0)[..., None]
        full = forward_no_grad(model, tokens, layout) * is_token
        for sizes, cache_length in (([9], 9), ([1] * 9, None), ([1, 3, 1, 4], 9), ([6, 3], None)):
            hidden, _ = forward_in_chunks(model, tokens, sizes, cache_length, layout)
            assert_close(
                torch.where(is_token, hidden, 0.0), full, f"rows {name} in chunks {sizes}, cache_length {cache_length}"
            )


def cache_growth(config: ModelConfig) -> None:
    """A cache without a cache_length grows past its initial size and keeps its contents."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    length = INITIAL_SLOTS + 6
    tokens = random_tokens(config, 1, length)
    hidden, _ = forward_in_chunks(model, tokens, [INITIAL_SLOTS - 2, 1, 1, 1, 3, 2])
    assert_close(hidden, forward_no_grad(model, tokens), f"a growing state, {length} tokens")


def state_errors(config: ModelConfig) -> None:
    """A state that is full, consumed, of another batch or design, of unknown length or under gradients is refused."""
    model = model_under_test(config)
    if not supports_state(model):
        return
    tokens = random_tokens(config, 2, 6)
    _, state = forward_in_chunks(model, tokens, [6], cache_length=6)
    assert_refused(
        lambda: forward_with_state(model, fork(state), tokens[:, :1]),
        "cache_length 6",
        "a full state took another token",
    )
    first = new_state(model, 2, 6)
    forward_with_state(model, first, tokens)
    assert_refused(lambda: forward_with_state(model, first, tokens), "consumed", "a consumed state was used again")
    assert_refused(lambda: forward_with_state(model, new_state(model, 3), tokens), "3 rows", "a state of 3 rows took 2")
    other_model = model_under_test(
        config.replace(initialization=config.initialization.replace(std=config.initialization.std * 2))
    )
    assert_refused(
        lambda: forward_with_state(model, new_state(other_model, 2), tokens),
        "another design",
        "a state of another design was used",
    )
    with torch.enable_grad():
        assert_refused(lambda: model(tokens, None, new_state(model, 2)), "gradient", "a state was used under gradients")
    for batch, cache_length in ((0, 4), (1, 0)):
        make = lambda batch=batch, cache_length=cache_length: new_state(model, batch, cache_length)  # noqa: E731
        assert_refused(make, "at least 1", f"a state of {batch} rows and cache_length {cache_length} was made")
    if model.length_dependent:
        assert_refused(
            lambda: model.init_state(2, None, encoder_output_for(model, 2)),
            "cache_length",
            "a state without a cache_length was made",
        )
    if state.bytes != new_state(model, 2, 6).bytes:
        raise LawViolation(
            f"a state with a cache_length changed from {new_state(model, 2, 6).bytes} to {state.bytes} bytes"
        )
