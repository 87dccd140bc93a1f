"""Continue prompts of any lengths, in one batch, with the state each mixer defines."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.sampling import Sampling
from heddle.generation.stopping import Tail
from heddle.model.decoder import Decoder
from heddle.numerics.linear import packing
from heddle.parts.layout import Layout, Memory


class TextStream(Protocol):
    """Turns tokens into text as they come, never half a character."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    end: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> TextStream: ...


@overload
def generate(
    model: Decoder,
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int = ...,
    memory: Memory | None = ...,
    stop: Sequence[str] = ...,
    on_text: Callable[[int, str], None] | None = ...,
) -> list[str]: ...


@overload
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    tokenizer: None = ...,
    *,
    max_new_tokens: int = ...,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int = ...,
    memory: Memory | None = ...,
) -> list[list[int]]: ...


def generate(  # noqa: PLR0913 - settings by keyword
    model: Decoder,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: Tokenizer | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    memory: Memory | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[str] | list[list[int]]:
    """Continue each prompt; returns the new texts, or the new tokens where prompts are token lists.

    With a tokenizer, prompts are strings, each opened by the end token as in training, and a row ends at the
    end token or at the first of the `stop` strings (left out of the result); `on_text(row, piece)` is called
    as text comes. temperature 0 is greedy. `memory` is what cross-attention reads, a row for each prompt.
    Raises ConfigError for an empty prompt list or a bad setting.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens {max_new_tokens}: must be at least 1")
    if not prompts or isinstance(prompts, str):
        raise ConfigError("prompts: expected a list of at least one prompt")
    sampling = Sampling(temperature, top_k, top_p, seed)
    if tokenizer is None:
        rows = [_checked(prompt, model) for prompt in prompts]
        return _token_lists(tokens(model, rows, max_new_tokens, sampling, memory=memory), len(rows))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) != len(prompts):
        raise ConfigError("prompts: with a tokenizer every prompt is a string; leave the tokenizer out for tokens")
    rows = [_checked([tokenizer.end, *tokenizer.encode(text)], model) for text in texts]
    steps = tokens(model, rows, max_new_tokens, sampling, tokenizer.vocab_size, memory)
    return _texts(steps, len(rows), tokenizer, stop, on_text)


def _checked(prompt: str | Sequence[int], model: Decoder) -> list[int]:
    if isinstance(prompt, str):
        raise ConfigError("prompts: are strings; give the tokenizer too, or lists of tokens")
    row = [int(token) for token in prompt]
    vocab = model.embed.weight.shape[0]
    if not row or min(row) < 0 or max(row) >= vocab:
        raise ConfigError(f"prompts: each needs at least one token, all from 0 to {vocab - 1}")
    return row


def tokens(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    steps: int,
    sampling: Sampling,
    known: int | None = None,
    memory: Memory | None = None,
) -> Iterator[tuple[Tensor, "Rows"]]:
    """Yield each step's new tokens int64 [B] and the rows, on which the caller marks those that ended.

    Only the first `known` tokens are written (None: all): a vocabulary may be wider than its tokenizer.
    """
    device = model.embed.weight.device
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    inputs = torch.tensor(padded, device=device)
    ragged = min(lengths) < longest
    layout = Layout.padded(lengths, side="left", device=device) if ragged else None
    rows = Rows(len(prompts))
    was_training = model.training
    model.eval()
    try:
        state = model.init_state(len(prompts), longest + steps - 1, memory)
        for step in range(steps):
            with torch.no_grad(), packing():  # neither may be in force where the caller runs
                hidden, after = model(inputs, layout, state)
                logits = model.head(hidden[:, -1])[:, :known]
            chosen = sampling.choose(logits, step)
            yield chosen, rows
            if all(rows.ended):
                return
            assert after is not None
            inputs, layout, state = chosen[:, None], None, after
    finally:
        model.train(was_training)


class Rows:
    """Which rows of a batch have ended."""

    def __init__(self, count: int) -> None:
        self.ended = [False] * count


def _token_lists(steps: Iterator[tuple[Tensor, Rows]], count: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(count)]
    for chosen, _ in steps:
        for row, token in enumerate(chosen.tolist()):
            result[row].append(token)
    return result


def _texts(
    steps: Iterator[tuple[Tensor, Rows]],
    count: int,
    tokenizer: Tokenizer,
    stop: Sequence[str],
    on_text: Callable[[int, str], None] | None,
) -> list[str]:
    tell = on_text or (lambda row, piece: None)
    streams = [tokenizer.stream() for _ in range(count)]
    tails = [Tail(stop) for _ in range(count)]

    def add(row: int, piece: str) -> None:
        safe = tails[row].push(piece)
        if safe:
            tell(row, safe)

    for chosen, rows in steps:
        for row, token in enumerate(chosen.tolist()):
            if rows.ended[row]:
                continue
            if token == tokenizer.end:
                rows.ended[row] = True
            else:
                add(row, streams[row].push(token))
                rows.ended[row] = tails[row].stopped
    for row in range(count):
        if not tails[row].stopped:
            add(row, streams[row].finish())
        rest = tails[row].finish()
        if rest:
            tell(row, rest)
    return [tail.text for tail in tails]
