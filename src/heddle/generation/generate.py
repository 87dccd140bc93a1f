"""Generate text: continue prompts of any lengths in one batch, by decoding, speculative decoding or beam search."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from heddle.distributed.ranks import is_sharded
from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import (
    LOGITS_NOT_FINITE,
    GenerationRequest,
    ModelRunner,
    NewTokens,
    Prefix,
    Sampler,
    decode,
    eval_mode,
    prefill,
    prefill_prefix,
    validate_prompt,
)
from heddle.generation.scheduler import BatchScheduler, SeparateScheduler, decode_streams
from heddle.generation.speculative import SpeculativeConfig, SpeculativeRound, speculative_decode
from heddle.model.decoder import Decoder
from heddle.numerics.transfer import tensor_of
from heddle.parts.layout import EncoderOutput

# Prompts in any form: strings, lists of tokens or tensors of tokens, a single one or a batch.
#
# Generated tokens are returned in the same form.


Prompts = str | Tensor | Sequence[str] | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]]

NewRows = str | Tensor | list[str] | list[int] | list[Tensor] | list[list[int]]

TEXT_WITHOUT_TOKENIZER = (
    "prompts: are strings; pass the tokenizer of `model, tokenizer = heddle.load(folder)`, or give lists of tokens"
)
TOKENS_WITH_TOKENIZER = "prompts: must all be strings if there is a tokenizer; leave the tokenizer out for tokens"


@dataclass(frozen=True)
class PromptBatch:
    """texts, or else token_ids, of each prompt. restore: puts each row's new text or tokens in the caller's form."""

    texts: list[str]
    token_ids: list[list[int]]
    restore: Callable[[list[Any]], NewRows]


def read_prompts(prompts: Any, has_tokenizer: bool) -> PromptBatch:
    """Read prompts in any form of `Prompts`; numpy arrays count as lists.

    Raises ConfigError if there are no prompts, for strings without a tokenizer or tokens with one, and for values that
    are not tokens.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, str | Tensor) and (not isinstance(prompts, Sequence) or not prompts):
        raise ConfigError("prompts: expected at least one: a string, a list of tokens, a tensor, or a list of these")
    texts = [prompts] if isinstance(prompts, str) else [row for row in prompts if isinstance(row, str)]
    if has_tokenizer:
        if not isinstance(prompts, str) and len(texts) != len(prompts):
            raise ConfigError(TOKENS_WITH_TOKENIZER)
        return PromptBatch(texts, [], _first if isinstance(prompts, str) else list)
    if texts:
        raise ConfigError(TEXT_WITHOUT_TOKENIZER)
    if isinstance(prompts, Tensor):
        return _read_tensor(prompts)
    if _is_token(prompts[0]):
        return PromptBatch([], [token_list(prompts)], _first)
    token_ids = [token_list(row) for row in prompts]
    if all(isinstance(row, Tensor) for row in prompts):
        devices = [row.device for row in prompts if isinstance(row, Tensor)]
        return PromptBatch(
            [], token_ids, lambda rows: [torch.tensor(row, device=d) for row, d in zip(rows, devices, strict=True)]
        )
    return PromptBatch([], token_ids, list)


def token_list(tokens: Any) -> list[int]:
    """The tokens of one prompt: whole numbers in any iterable, or a tensor [T]. Raises ConfigError otherwise."""
    if isinstance(tokens, Tensor):
        _check_tensor(tokens, dims=(1,))
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ConfigError(f"prompts: contain {tokens!r:.80} where a list of tokens is expected")
    result = []
    for token in tokens:
        if not _is_token(token):
            raise ConfigError(f"prompts: contain {token!r:.80} where a token is expected; tokens are whole numbers")
        result.append(index(token))
    return result


def _is_token(value: Any) -> bool:
    """Whether a value is a whole number, also as a tensor or an array without dimensions."""
    try:
        index(value)
    except (TypeError, ValueError):  # a tensor of several numbers raises either
        return False
    return not isinstance(value, bool) and not (isinstance(value, Tensor) and value.dtype == torch.bool)


def _read_tensor(tokens: Tensor) -> PromptBatch:
    _check_tensor(tokens, dims=(1, 2))
    if tokens.dim() == 1:
        return PromptBatch([], [tokens.tolist()], lambda rows: torch.tensor(rows[0], device=tokens.device))
    return PromptBatch([], tokens.tolist(), lambda rows: torch.tensor(rows, device=tokens.device))


def _check_tensor(tokens: Tensor, dims: tuple[int, ...]) -> None:
    shapes = " or ".join("[batch, length]" if dim == 2 else "[length]" for dim in dims)
    if tokens.dim() not in dims or tokens.numel() == 0:
        raise ConfigError(f"prompts: a tensor has shape {list(tokens.shape)}; expected {shapes}, without a size of 0")
    if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise ConfigError(f"prompts: a tensor is of {tokens.dtype}; tokens are whole numbers, such as torch.int64")


def _first(rows: list[Any]) -> Any:
    return rows[0]


# Stop strings: hold text back while it may be the start of a stop string; cut the text where a stop string begins.


class StopStringBuffer:
    """The text of one row. `text`: what was released so far. `stopped`: whether a stop string was found."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise ConfigError("stop: an empty stop string would end every text at once; leave it out")
        self.stop_strings = tuple(stop_strings)
        self.text = ""
        self.stopped = False
        self._pending = ""

    def push(self, piece: str) -> str:
        """Add text; returns the text that can be shown now."""
        if self.stopped:
            return ""
        self._pending += piece
        matches = [index for stop in self.stop_strings if (index := self._pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches), discard_rest=True)
        longest = max((self._partial_match_length(stop) for stop in self.stop_strings), default=0)
        return self._release(len(self._pending) - longest)

    def finish(self) -> str:
        """Release the text still held back, when no more text will come."""
        return "" if self.stopped else self._release(len(self._pending))

    def _partial_match_length(self, stop: str) -> int:
        """How many of the last pending characters are the start of a stop string."""
        return next((length for length in range(len(stop) - 1, 0, -1) if self._pending.endswith(stop[:length])), 0)

    def _release(self, length: int, discard_rest: bool = False) -> str:
        released, self._pending = self._pending[:length], "" if discard_rest else self._pending[length:]
        self.text += released
        return released


# Gather the new tokens of each row, as tokens or as text.


class DecodeStreamProtocol(Protocol):
    """Decodes tokens to text one at a time, in whole characters."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TokenizerProtocol(Protocol):
    """What generation needs of a tokenizer.

    bos_ids come before a text; any of eos_ids ends it; unused_token_ids are ids below vocab_size without a token.
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


SAMPLE_TOKENS = 96


class GenerationSettings(TypedDict, total=False):
    """The settings of `generate`, for its overloads."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    encoder_output: EncoderOutput | None
    compile_decoding: bool
    prefix: Prefix | None
    streams: int | None
    batch_invariant: bool
    num_beams: int
    draft_model: Decoder | None
    multi_token_draft: bool
    speculative_tokens: int
    on_speculative_round: Callable[[SpeculativeRound], None] | None


class TextSettings(GenerationSettings, total=False):
    """Settings that need a tokenizer."""

    stop: str | Sequence[str]
    on_text: Callable[[int, str], None] | None


@overload
def generate(model: Decoder, prompts: str, tokenizer: TokenizerProtocol, **settings: Unpack[TextSettings]) -> str: ...


@overload
def generate(
    model: Decoder,
    prompts: list[str] | tuple[str, ...],
    tokenizer: TokenizerProtocol,
    **settings: Unpack[TextSettings],
) -> list[str]: ...


@overload
def generate(
    model: Decoder, prompts: Tensor, tokenizer: None = ..., **settings: Unpack[GenerationSettings]
) -> Tensor: ...


@overload
def generate(
    model: Decoder, prompts: Sequence[int], tokenizer: None = ..., **settings: Unpack[GenerationSettings]
) -> list[int]: ...


@overload
def generate(
    model: Decoder, prompts: Sequence[Tensor], tokenizer: None = ..., **settings: Unpack[GenerationSettings]
) -> list[Tensor]: ...


@overload
def generate(
    model: Decoder, prompts: Sequence[Sequence[int]], tokenizer: None = ..., **settings: Unpack[GenerationSettings]
) -> list[list[int]]: ...


def generate(
    model: Decoder,
    prompts: Prompts,
    tokenizer: TokenizerProtocol | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    encoder_output: EncoderOutput | None = None,
    compile_decoding: bool = False,
    stop: str | Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
    prefix: Prefix | None = None,
    streams: int | None = None,
    batch_invariant: bool = False,
    num_beams: int = 1,
    draft_model: Decoder | None = None,
    multi_token_draft: bool = False,
    speculative_tokens: int = 4,
    on_speculative_round: Callable[[SpeculativeRound], None] | None = None,
) -> NewRows:
    """Continue each prompt. Returns only what is new, in the form of the prompts.

    Without a tokenizer, prompts are tokens: int64 [T] or [B, T] -> int64 [N] or [B, N], N new tokens; a list of tokens
    -> a list; a list of tensors or of lists, of any lengths -> a list of the same.
    With a tokenizer, a string -> a string, a list of strings -> a list. Each is preceded by the tokenizer's bos_ids as
    in training; a row ends at one of its eos_ids, or at the first of the `stop` strings, which is left out of the
    result. `on_text(row, piece)` is called with new text as it is generated.
    temperature 0 is greedy. encoder_output: what cross-attention reads, one row per prompt. prefix (of
    `heddle.prefix`): tokens before each prompt that were already prefilled. streams: the most prompts that run at once;
    when one ends, the next one joins the batch (None: all prompts in one batch until the last has ended).
    batch_invariant: every prompt is computed alone, so that no bit depends on the other prompts.
    num_beams: the beam width of beam search.
    draft_model: a smaller model that proposes `speculative_tokens` tokens per round for speculative decoding: greedy
    text stays the same, sampled text follows the same distribution; `on_speculative_round` gets each round's counts.
    multi_token_draft: the model's own first multi-token module proposes them.
    compile_decoding: compile a decode step into one graph with torch.compile. This takes half a minute for a new design
    or length, or seconds if torch has it cached, and makes each token faster: it pays off for many tokens. The text is
    the same up to rounding.
    Where rotary frequencies depend on the sequence length (dynamic NTK, LongRoPE), each row's length is its prompt's
    plus max_new_tokens - 1; the last new token is never read.
    All ranks that share a sharded model call it at once, with the same prompts and settings.
    Raises ConfigError for prompts that are empty or malformed, and for a setting that is invalid, conflicts with
    another or would do nothing.
    """
    stop_strings = [stop] if isinstance(stop, str) else stop
    check_decoding(max_new_tokens, temperature, top_k, top_p, stop_strings, num_beams)
    if tokenizer is None and (stop or on_text is not None):
        raise ConfigError(f"{'stop' if stop else 'on_text'}: needs a tokenizer; pass one, or leave it out")
    if draft_model is not None and multi_token_draft:
        raise ConfigError("multi_token_draft: the draft_model proposes tokens already; leave out one of the two")
    has_draft = draft_model is not None or multi_token_draft
    if not has_draft and on_speculative_round is not None:
        raise ConfigError("on_speculative_round: has no effect without a draft_model; give one, or leave it out")
    batch = read_prompts(prompts, tokenizer is not None)
    speculative = SpeculativeConfig(draft_model, speculative_tokens, on_speculative_round) if has_draft else None
    _check_compatible(model, prefix, num_beams, speculative)
    if is_sharded(model):
        drafts = draft_model is not None, multi_token_draft
        _check_sharded(num_beams > 1, *drafts, streams is not None, batch_invariant, compile_decoding)
    if compile_decoding and (num_beams > 1 or speculative is not None):
        raise ConfigError("compile_decoding: beams and drafts have no one-token step to compile; leave it out")
    if prefix is not None and encoder_output is not None:
        raise ConfigError("encoder_output: the prefix was read with its own; leave out one of the two")
    request = GenerationRequest(
        prompt_ids=_prompt_ids(model, batch, tokenizer, prefix),
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature, top_k, top_p, seed),
        vocab_limit=None if tokenizer is None else tokenizer.vocab_size,
        eos_ids=() if tokenizer is None else tuple(tokenizer.eos_ids),
        unused_token_ids=() if tokenizer is None else tokenizer.unused_token_ids,
        prefix=prefix,
        encoder_output=encoder_output,
        compile_decoding=compile_decoding,
    )
    finished = [False] * len(request.prompt_ids)
    if streams is not None or batch_invariant:
        _check_streams(request, streams, num_beams > 1 or speculative is not None)
    if num_beams > 1:
        new_tokens = beam_search(model, request, num_beams)
    elif speculative is not None:
        new_tokens = speculative_decode(model, request, finished, speculative)
    elif streams is not None or batch_invariant:
        runner = ModelRunner(model)
        scheduler = SeparateScheduler(runner) if batch_invariant else BatchScheduler(runner)
        new_tokens = decode_streams(scheduler, runner, request, finished, streams or 1)
    else:
        new_tokens = decode(model, request, finished)
    if tokenizer is None:
        return batch.restore(collect_tokens(new_tokens, len(finished)))
    return batch.restore(collect_texts(new_tokens, request, tokenizer, finished, stop_strings, on_text))


MAX_NEW_TOKENS, MAX_BEAMS = 2**31 - 1, 4096


def check_decoding(
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop: Sequence[str],
    num_beams: int,
) -> None:
    """Raise ConfigError for settings of `generate` that no model takes."""
    if not 1 <= max_new_tokens <= MAX_NEW_TOKENS:
        raise ConfigError(f"max_new_tokens {max_new_tokens}: must be from 1 to {MAX_NEW_TOKENS}")
    if not 1 <= num_beams <= MAX_BEAMS:
        raise ConfigError(f"num_beams {num_beams}: must be from 1 to {MAX_BEAMS}")
    if num_beams > 1 and temperature != 0.0:
        raise ConfigError(f"num_beams {num_beams}: beam search does not sample; leave temperature at 0")
    Sampler(temperature, top_k, top_p)
    StopStringBuffer(stop)


def sample_text(model: Decoder, tokenizer: TokenizerProtocol, sequence_length: int) -> str:
    """A short sampled text from an empty prompt, to show what training achieved.

    It has at most 96 tokens, and at most the `sequence_length` that the model was trained on.
    """
    length = min(SAMPLE_TOKENS, sequence_length)
    return generate(model, [""], tokenizer, max_new_tokens=length, temperature=0.8, top_p=0.95)[0]


def prefix(model: Decoder, text: str | Sequence[int] | Tensor, tokenizer: TokenizerProtocol | None = None) -> Prefix:
    """Prefill the beginning of many prompts once, for `generate(prefix=...)`: a string with a tokenizer, or tokens.

    The new text is the same as with these tokens at the start of each prompt. The prefix is valid as long as the
    model's weights do not change. Raises ConfigError for no tokens, or tokens outside the model's vocabulary.
    """
    if isinstance(text, str) == (tokenizer is None):
        raise ConfigError("prefix: give a string and its tokenizer, or a list of tokens without one")
    if isinstance(text, str) and tokenizer is not None:
        return prefill_prefix(model, validate_prompt(_encode_after(tokenizer, tokenizer.bos_ids, text), model))
    return prefill_prefix(model, validate_prompt(token_list(text), model))


def _check_compatible(
    model: Decoder,
    shared_prefix: Prefix | None,
    num_beams: int,
    speculative: SpeculativeConfig | None,
) -> None:
    """Raise ConfigError for settings that cannot be combined."""
    if num_beams > 1 and speculative is not None:
        name = "multi_token_draft" if speculative.draft_model is None else "draft_model"
        raise ConfigError(f"num_beams {num_beams}: beam search takes no {name}; leave out one of the two")
    if shared_prefix is not None and shared_prefix.model is not model:
        raise ConfigError("prefix: was read by another model; make it with this one")
    if speculative is not None:
        speculative.check(model)
        if speculative.draft_model is None and shared_prefix is not None:
            raise ConfigError("multi_token_draft: a prefix has no state of the multi-token modules; leave out one")


def _check_sharded(*settings: bool) -> None:
    """Raise ConfigError for settings whose forward passes depend on the tokens, or on where the weights are."""
    names = ("num_beams", "draft_model", "multi_token_draft", "streams", "batch_invariant", "compile_decoding")
    for name in (name for name, is_set in zip(names, settings, strict=True) if is_set):
        raise ConfigError(f"{name}: ranks that share a model must all take the same one-token steps; leave it out")


def _check_streams(request: GenerationRequest, streams: int | None, has_rounds: bool) -> None:
    """Raise ConfigError for settings that need all prompts in one batch."""
    if streams is not None and streams < 1:
        raise ConfigError(f"streams {streams}: must be at least 1")
    if has_rounds:
        raise ConfigError("streams, batch_invariant: beams and drafts run all prompts in one batch; leave them out")
    if request.encoder_output is not None:
        raise ConfigError("encoder_output: has one row per prompt of one batch; leave streams out")
    if streams is not None and request.compile_decoding:
        raise ConfigError("compile_decoding: a changing batch has no fixed step to compile; leave streams out")


def _prompt_ids(
    model: Decoder, batch: PromptBatch, tokenizer: TokenizerProtocol | None, shared_prefix: Prefix | None
) -> list[list[int]]:
    """The tokens of each prompt, the prefix included."""
    if tokenizer is None:
        first_tokens: Sequence[int] = () if shared_prefix is None else shared_prefix.tokens
        return [validate_prompt([*first_tokens, *row], model) for row in batch.token_ids]
    first_tokens = tokenizer.bos_ids if shared_prefix is None else shared_prefix.tokens
    return [validate_prompt(_encode_after(tokenizer, first_tokens, text), model) for text in batch.texts]


def _encode_after(tokenizer: TokenizerProtocol, first_tokens: Sequence[int], text: str) -> list[int]:
    """The first tokens and the text's tokens. If both are empty, an EOS token, which precedes each text in training."""
    return [*first_tokens, *tokenizer.encode(text)] or tokenizer.eos_ids[:1]


# Beam search: keep the `num_beams` most likely continuations of each prompt at every step; return the best.
#
#     score = log p(tokens) / number of tokens        (the end token counts)
#
# A continuation of any beam by an end token is a finished candidate. Ties go to the earlier beam, then to the
# lower token.

TokenSequence = tuple[int, ...]


@dataclass
class BeamSearch:
    """The search for one prompt.

    sequences, log_probs float64 [beams]: the live beams, best first. best_sequence: the best finished one so far.
    """

    sequences: list[TokenSequence] = field(default_factory=lambda: [()])
    log_probs: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    best_sequence: TokenSequence = ()
    best_score: float = float("-inf")

    def step(self, token_log_probs: Tensor, num_beams: int, eos_ids: Sequence[int]) -> list[int]:
        """Extend the beams by one token; token_log_probs float64 [beams, vocab]. Returns each new beam's parent."""
        log_probs = self.log_probs[:, None] + token_log_probs
        for sequence, row in zip(self.sequences, log_probs, strict=True):
            for eos_id in eos_ids:
                self.add_finished((*sequence, eos_id), float(row[eos_id]))
        log_probs[:, list(eos_ids)] = -torch.inf
        chosen = _stable_topk(log_probs.flatten(), min(num_beams, int((log_probs > -torch.inf).sum())))
        parents = (chosen // log_probs.shape[1]).tolist()
        tokens = (chosen % log_probs.shape[1]).tolist()
        self.sequences = [(*self.sequences[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        self.log_probs = log_probs.flatten()[chosen]
        return parents

    def add_finished(self, sequence: TokenSequence, log_prob: float) -> None:
        """Consider a finished sequence; a tie keeps the earlier one."""
        if log_prob / len(sequence) > self.best_score:
            self.best_sequence, self.best_score = sequence, log_prob / len(sequence)

    def is_done(self, max_new_tokens: int) -> bool:
        """Whether no beam can still win: log p only falls, and no sequence exceeds `max_new_tokens`."""
        return not self.sequences or self.best_score >= float(self.log_probs[0]) / max_new_tokens

    def result(self) -> TokenSequence:
        """The best sequence, live beams included."""
        for sequence, log_prob in zip(self.sequences, self.log_probs.tolist(), strict=True):
            self.add_finished(sequence, log_prob)
        return self.best_sequence


def _stable_topk(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of scores [N], highest first; ties go to the lower index."""
    if count < 1:
        return torch.empty(0, dtype=torch.int64)
    threshold = scores.topk(min(count, len(scores))).values[-1]
    candidates = (scores >= threshold).nonzero().squeeze(1)
    return candidates[scores[candidates].sort(descending=True, stable=True).indices[:count]]


def beam_search(model: Decoder, request: GenerationRequest, num_beams: int) -> NewTokens:
    """Yield once: the tokens of each row's best sequence, including the end token if it has one."""
    runner = ModelRunner(model)
    searches = [BeamSearch() for _ in request.prompt_ids]
    with eval_mode(model):
        hidden, state = prefill(runner, request)
        active = searches
        for step in range(request.max_new_tokens):
            log_probs = runner.logits(hidden, request).double().log_softmax(-1).cpu()
            if log_probs.isnan().any():
                raise MachineError(LOGITS_NOT_FINITE)
            beam_counts = [len(search.sequences) for search in active]
            state_rows: list[int] = []
            unfinished, first = [], 0
            for search, count in zip(active, beam_counts, strict=True):
                parents = search.step(log_probs[first : first + count], num_beams, request.eos_ids)
                if not search.is_done(request.max_new_tokens):
                    unfinished.append(search)
                    state_rows += [first + parent for parent in parents]
                first += count
            active = unfinished
            if not active or step + 1 == request.max_new_tokens:
                break
            last_tokens = [sequence[-1] for search in active for sequence in search.sequences]
            tokens = tensor_of(last_tokens, torch.int64, hidden.device)[:, None]
            all_hidden, state = runner.forward(tokens, None, state.select(state_rows))
            hidden = all_hidden[:, -1]
    yield [(row, token) for row, search in enumerate(searches) for token in search.result()]
