"""Continue prompts of any lengths, in one batch, with the state each mixer defines."""

from collections.abc import Callable, Sequence
from typing import Protocol, overload

from heddle.errors import ConfigError
from heddle.generation.beam_search import searched
from heddle.generation.decode import plain
from heddle.generation.prefill import Prefix, Request, Steps, checked_row, read_prefix
from heddle.generation.sampling import Sampling
from heddle.generation.speculative import Draft, Round, guessed
from heddle.generation.stop_strings import Tail
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Memory


class TextStream(Protocol):
    """Turns tokens into text as they come, never half a character."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """What generation needs of a tokenizer: `opening` stands before a text, any of `ends` ends it, none is `absent`."""

    opening: list[int]
    ends: list[int]
    vocab_size: int
    absent: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def stream(self, before: Sequence[int] = ...) -> TextStream: ...


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
    prefix: Prefix | None = ...,
    beams: int = ...,
    draft: Decoder | None = ...,
    lookahead: int = ...,
    on_round: Callable[[Round], None] | None = ...,
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
    prefix: Prefix | None = ...,
    beams: int = ...,
    draft: Decoder | None = ...,
    lookahead: int = ...,
    on_round: Callable[[Round], None] | None = ...,
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
    prefix: Prefix | None = None,
    beams: int = 1,
    draft: Decoder | None = None,
    lookahead: int = 4,
    on_round: Callable[[Round], None] | None = None,
) -> list[str] | list[list[int]]:
    """Continue each prompt; returns the new texts, or the new tokens where prompts are token lists.

    With a tokenizer, prompts are strings, each opened as in training (ours by the end token), and a row ends at an
    end token or at the first of the `stop` strings (left out of the result); `on_text(row, piece)` is called
    as text comes. temperature 0 is greedy. memory: what cross-attention reads, a row for each prompt. prefix (of
    `heddle.prefix`): what stands before each prompt. beams: how many continuations are followed for the likeliest
    text. draft: a smaller model that guesses `lookahead` tokens ahead; what is written stays the same, or as likely;
    `on_round` hears what came of each guess. Where a rotation depends on the length (dynamic ntk, longrope), all rows
    are turned for the longest prompt and max_new_tokens, less the last, which is never read.
    Raises ConfigError for an empty prompt list or a setting that is bad or does not go with another.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens {max_new_tokens}: must be at least 1")
    if not prompts or isinstance(prompts, str):
        raise ConfigError("prompts: expected a list of at least one prompt")
    guessing = None if draft is None else Draft(draft, lookahead, on_round)
    _check_ways(model, temperature, prefix, beams, guessing)
    if prefix is not None and memory is not None:
        raise ConfigError("memory: the prefix was read beside its own; leave out one of the two")
    request = Request(
        rows=_rows(model, prompts, tokenizer, prefix),
        steps=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, seed),
        known=None if tokenizer is None else tokenizer.vocab_size,
        ends=() if tokenizer is None else tuple(tokenizer.ends),
        absent=() if tokenizer is None else tokenizer.absent,
        prefix=prefix,
        memory=memory,
    )
    ended = [False] * len(prompts)
    if beams > 1:
        steps = searched(model, request, beams)
    else:
        steps = plain(model, request, ended) if guessing is None else guessed(model, request, ended, guessing)
    if tokenizer is None:
        return _token_lists(steps, len(prompts))
    return _texts(steps, request, tokenizer, ended, stop, on_text)


def prefix(model: Decoder, text: str | Sequence[int], tokenizer: Tokenizer | None = None) -> Prefix:
    """Read once what many prompts begin with (a string with a tokenizer, or tokens), for `generate(prefix=...)`.

    The result is that of prompts with its tokens before theirs. It holds for the weights the model has now.
    Raises ConfigError for tokens that the model does not know, or none.
    """
    if isinstance(text, str) == (tokenizer is None):
        raise ConfigError("prefix: give a string and its tokenizer, or a list of tokens without one")
    if isinstance(text, str) and tokenizer is not None:
        return read_prefix(model, checked_row(_opened(tokenizer, tokenizer.opening, text), model))
    return read_prefix(model, checked_row([int(token) for token in text], model))


def _check_ways(model: Decoder, temperature: float, before: Prefix | None, beams: int, guessing: Draft | None) -> None:
    """Refuse ways of generating that do not go together."""
    if beams < 1:
        raise ConfigError(f"beams {beams}: must be at least 1")
    if beams > 1 and temperature != 0.0:
        raise ConfigError(f"beams {beams}: look for the likeliest text and do not sample; leave temperature at 0")
    if beams > 1 and guessing is not None:
        raise ConfigError(f"beams {beams}: follow their own guesses; leave out the draft, or the beams")
    if before is not None and before.model is not model:
        raise ConfigError("prefix: was read by another model; read it with this one")
    if guessing is not None:
        guessing.check(model)


def _rows(
    model: Decoder,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: Tokenizer | None,
    before: Prefix | None,
) -> list[list[int]]:
    """The tokens of each row, those before the prompt among them."""
    if tokenizer is None:
        given = [] if before is None else [*before.tokens]
        if any(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError("prompts: are strings; give the tokenizer too, or lists of tokens")
        return [checked_row([*given, *map(int, prompt)], model) for prompt in prompts]
    opening: Sequence[int] = tokenizer.opening if before is None else before.tokens
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) != len(prompts):
        raise ConfigError("prompts: with a tokenizer every prompt is a string; leave the tokenizer out for tokens")
    return [checked_row(_opened(tokenizer, opening, text), model) for text in texts]


def _opened(tokenizer: Tokenizer, opening: Sequence[int], text: str) -> list[int]:
    """A text after its opening. An empty one that nothing opens begins where another would have ended."""
    return [*opening, *tokenizer.encode(text)] or tokenizer.ends[:1]


def _token_lists(steps: Steps, count: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(count)]
    for new in steps:
        for row, token in new:
            result[row].append(token)
    return result


def _texts(
    steps: Steps,
    request: Request,
    tokenizer: Tokenizer,
    ended: list[bool],
    stop: Sequence[str],
    on_text: Callable[[int, str], None] | None,
) -> list[str]:
    tell = on_text or (lambda row, piece: None)
    streams = [tokenizer.stream(row) for row in request.rows]
    tails = [Tail(stop) for _ in ended]

    def add(row: int, piece: str) -> None:
        safe = tails[row].push(piece)
        if safe:
            tell(row, safe)

    for new in steps:
        for row, token in new:
            if ended[row]:
                continue
            if token in tokenizer.ends:
                ended[row] = True
            else:
                add(row, streams[row].push(token))
                ended[row] = tails[row].stopped
    for row in range(len(ended)):
        if not tails[row].stopped:
            add(row, streams[row].finish())
        rest = tails[row].finish()
        if rest:
            tell(row, rest)
    return [tail.text for tail in tails]
