"""Gather the new tokens of each row, as tokens or as text."""

from collections.abc import Callable, Sequence
from typing import Protocol

from heddle.generation.model_runner import GenerationRequest, NewTokens
from heddle.generation.stop_strings import StopStringBuffer


class DecodeStreamProtocol(Protocol):
    """Turns tokens into text as they come, in whole characters."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TokenizerProtocol(Protocol):
    """What generation needs of a tokenizer.

    bos_ids come before a text; any of eos_ids ends it; unused_token_ids, below vocab_size, stand for no token.
    """

    bos_ids: list[int]
    eos_ids: list[int]
    vocab_size: int
    unused_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode_stream(self, previous_ids: Sequence[int] = ...) -> DecodeStreamProtocol: ...


def collect_tokens(new_tokens: NewTokens, count: int) -> list[list[int]]:
    """All tokens of each of `count` rows."""
    result: list[list[int]] = [[] for _ in range(count)]
    for step_tokens in new_tokens:
        for row, token in step_tokens:
            result[row].append(token)
    return result


def collect_texts(
    new_tokens: NewTokens,
    request: GenerationRequest,
    tokenizer: TokenizerProtocol,
    finished: list[bool],
    stop: Sequence[str],
    on_text: Callable[[int, str], None] | None,
) -> list[str]:
    """Decode each row's tokens up to its end, and mark finished rows in `finished`."""
    show = on_text or (lambda row, piece: None)
    streams = [tokenizer.decode_stream(prompt) for prompt in request.prompt_ids]
    buffers = [StopStringBuffer(stop) for _ in finished]

    def push(row: int, piece: str) -> None:
        released = buffers[row].push(piece)
        if released:
            show(row, released)

    for step_tokens in new_tokens:
        for row, token in step_tokens:
            if finished[row]:
                continue
            if token in tokenizer.eos_ids:
                finished[row] = True
            else:
                push(row, streams[row].push(token))
                finished[row] = buffers[row].stopped
    for row, buffer in enumerate(buffers):
        if not buffer.stopped:
            push(row, streams[row].finish())
        released = buffer.finish()
        if released:
            show(row, released)
    return [buffer.text for buffer in buffers]
