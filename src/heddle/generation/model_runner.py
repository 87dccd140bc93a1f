"""Run a model for generation: forward passes without gradients, and logits over the tokens it may generate."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.distributed.ranks import is_sharded
from heddle.errors import ConfigError
from heddle.generation.sampling import Sampler
from heddle.model.decoder import LENGTH_DEPENDENT, Decoder
from heddle.model.state import State
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.numerics.transfer import Constants, to_device
from heddle.parts.layout import EncoderOutput, Layout

READ_TOKENS = 16  # of a prompt whose logits are in memory at a time: a vocabulary may be large
NewTokens = Iterator[list[tuple[int, int]]]  # at each step the new tokens, as (row, token)


@dataclass(frozen=True)
class GenerationRequest:
    """A batch of prompts and how to continue them.

    prompt_ids: the tokens of each prompt, the prefix included. max_new_tokens: the limit of each row. vocab_limit:
    generate only tokens below it (None: all), since a vocabulary may be larger than its tokenizer's. unused_token_ids:
    tokens below the limit that are never generated. eos_ids: any of these ends a row. encoder_output: what
    cross-attention reads, one row per prompt. compile_decoding: compile the decode step. read_prompt: called with the
    logits [n, vocab] after each token of a single prompt without a prefix, a few tokens at a time.
    """

    prompt_ids: Sequence[Sequence[int]]
    max_new_tokens: int
    sampler: Sampler
    vocab_limit: int | None = None
    eos_ids: tuple[int, ...] = ()
    unused_token_ids: tuple[int, ...] = ()
    prefix: "Prefix | None" = None
    encoder_output: EncoderOutput | None = None
    compile_decoding: bool = False
    read_prompt: Callable[[Tensor], None] | None = None


class ModelRunner:
    """Runs a model without gradients, with packed weights that are reused between calls.

    is_sharded: each forward pass is a collective of all ranks and gathers the weights again, so none are packed.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.is_sharded = model, is_sharded(model)
        self.packed_weights: PackedWeightCache = {}
        self.constants = Constants()

    def forward(self, tokens: Tensor, layout: Layout | None, state: State) -> tuple[Tensor, State]:
        """tokens int64 [B, T] -> hidden [B, T, width] and the new state."""
        # Entered at each call: a generator that yields inside these blocks would leave them active in its caller.
        with torch.no_grad(), self._packing():
            hidden, new_state = self.model(tokens, layout, state)
        assert new_state is not None
        return hidden, new_state

    def draft(self, hidden: Tensor, tokens: Tensor, layout: Layout, state: State) -> tuple[Tensor, State]:
        """hidden [B, T, width] and the tokens after each, int64 [B, T] -> the first multi-token module's output.

        layout: of the tokens of `hidden`. state: of `init_draft_state`; also returns the new one.
        """
        with torch.no_grad(), self._packing():
            embedding = self.model.embed(tokens, _one_later(layout))
            predicted, new_state = self.model.multi_token[0](hidden, embedding, layout, state)
        return predicted, new_state

    def logits(self, hidden: Tensor, request: GenerationRequest) -> Tensor:
        """hidden [..., width] -> logits [..., vocab] below the request's vocab_limit; -inf for unused tokens."""
        with torch.no_grad(), self._packing():
            logits: Tensor = self.model.head(hidden)
        logits = logits[..., : request.vocab_limit]
        if request.unused_token_ids:
            unused = self.constants.tensor(request.unused_token_ids, torch.int64, logits.device)
            logits = logits.index_fill(-1, unused, -torch.inf)
        return logits

    def read_prompt(self, hidden: Tensor, request: GenerationRequest) -> None:
        """Pass the logits of prompt tokens that were just read to the request. hidden: [1, T, width]."""
        if request.read_prompt is not None:
            for piece in hidden[0].split(READ_TOKENS):
                request.read_prompt(self.logits(piece, request))

    def _packing(self) -> AbstractContextManager[None]:
        """A compiled graph cannot set the context, and holds no packed weight."""
        return nullcontext() if self.is_sharded or is_compiling() else packed_weights(self.packed_weights)


def _one_later(layout: Layout) -> Layout:
    """The layout of the tokens one later than `layout`'s, for their embeddings."""
    positions = torch.where(layout.positions < 0, -1, layout.positions + 1)
    start = None if layout.start is None else layout.start + 1
    newest = None if layout.max_position is None else layout.max_position + 1
    return replace(layout, positions=positions, start=start, max_position=newest, cache={})


@contextmanager
def eval_mode(*models: Decoder) -> Iterator[None]:
    """Put models in eval mode within the block, and restore their mode after it."""
    training_flags = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, training in zip(models, training_flags, strict=True):
            model.train(training)


# Prefill: read prompts of any lengths in one call. A common beginning of all prompts is read only once.


LENGTH_STEP = DeviceSize(cpu=1, accelerator=64)  # the lengths that uneven prompts are padded to are multiples of it
MIN_SHARED_TOKENS = 16  # reading a shorter common beginning once saves less than the extra call costs


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens that prompts begin with, and the state after all of them but the last.

    The last token is read with each prompt, so that an empty prompt after the prefix has a token to continue from.
    """

    model: Decoder
    tokens: tuple[int, ...]
    state: State


def final_lengths(request: GenerationRequest) -> list[int]:
    """How many tokens of each row a model reads: the last new one is never read."""
    return [len(prompt) + request.max_new_tokens - 1 for prompt in request.prompt_ids]


ReadPrompts = Callable[[Tensor, Layout | None, Tensor], None]  # (tokens [B, T], layout, hidden [B, T, width])


def prefill(
    runner: ModelRunner, request: GenerationRequest, rollback: int = 0, on_read: ReadPrompts | None = None
) -> tuple[Tensor, State]:
    """Read all prompts; returns the hidden state of each prompt's last token [B, width], and the model's state.

    rollback: how many tokens the state must be able to roll back at a time. on_read: called with all tokens of the
    prompts, which have no prefix and are then read in one call.
    """
    prompts, model, batch, lengths = request.prompt_ids, runner.model, len(request.prompt_ids), final_lengths(request)
    cache_length, text_lengths = max(lengths), lengths if model.length_dependent else None
    is_alone = batch == 1 or request.encoder_output is not None or (text_lengths and len(set(text_lengths)) > 1)
    common = 0 if is_alone or on_read is not None else _common_prefix_length(prompts)
    if request.prefix is not None:
        shared, state = len(request.prefix.tokens) - 1, request.prefix.state.select([0] * batch)
    elif common >= MIN_SHARED_TOKENS:
        shared_lengths = None if text_lengths is None else text_lengths[:1]
        shared, shared_state = common, model.init_state(1, cache_length, None, rollback, shared_lengths)
        _, shared_state = runner.forward(_token_tensor([prompts[0][:common]], model), None, shared_state)
        state = shared_state.select([0] * batch)
    else:
        shared, state = 0, model.init_state(batch, cache_length, request.encoder_output, rollback, text_lengths)
    remaining = [list(prompt[shared:]) for prompt in prompts]
    lengths = [len(row) for row in remaining]
    longest = max(lengths)
    layout = None
    if min(lengths) < longest:  # exact lengths would hardly ever recur
        longest = padded_length(longest, LENGTH_STEP.on(model.embed.weight))
        layout = Layout.padded(lengths, longest, side="left", device=model.embed.weight.device, start=shared)
    tokens = _token_tensor([[0] * (longest - len(row)) + row for row in remaining], model)
    hidden, state = runner.forward(tokens, layout, state)
    runner.read_prompt(hidden, request)
    if on_read is not None:
        on_read(tokens, layout, hidden)
    return hidden[:, -1], state


def prefill_prefix(model: Decoder, tokens: Sequence[int]) -> Prefix:
    """Prefill tokens that the prompts of many calls begin with. The state has no cache_length: it grows."""
    if model.length_dependent:
        raise ConfigError(
            f"prefix: {LENGTH_DEPENDENT}, which is not known before the prompts; put its tokens before each prompt"
        )
    runner = ModelRunner(model)
    with eval_mode(model):
        state = model.init_state(1)
        if len(tokens) > 1:
            _, state = runner.forward(_token_tensor([tokens[:-1]], model), None, state)
    return Prefix(model, tuple(tokens), state)


def padded_length(longest: int, step: int) -> int:
    """The length that uneven prompts are padded to: a multiple of `step`, at most a quarter more for long ones.

    With few distinct lengths, a GPU's kernels, which are set up per shape, are reused.
    """
    if step == 1:
        return longest
    multiple = max(step, 1 << max(0, longest.bit_length() - 3))
    return -(-longest // multiple) * multiple


def validate_prompt(tokens: list[int], model: Decoder) -> list[int]:
    """Return the tokens of a prompt. Raises ConfigError if it is empty or a token is outside the vocabulary."""
    vocab_size = model.embed.weight.shape[0]
    if not tokens or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ConfigError(f"prompts: each needs at least one token, all from 0 to {vocab_size - 1}")
    return tokens


def _common_prefix_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all prompts share, leaving each at least one token of its own to continue from."""
    limit = min(map(len, prompts)) - 1
    return next((index for index in range(limit) if len({prompt[index] for prompt in prompts}) > 1), limit)


def _token_tensor(rows: Sequence[Sequence[int]], model: Decoder) -> Tensor:
    return to_device(torch.tensor([list(row) for row in rows], device="cpu"), model.embed.weight.device)
