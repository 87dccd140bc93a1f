"""Prefill: read prompts of any lengths in one call. Tokens that every prompt begins with are read only once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.model_runner import GenerationRequest, ModelRunner, eval_mode
from heddle.model.decoder import LENGTH_DEPENDENT, Decoder
from heddle.model.state import State
from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.numerics.dispatch.transfer import to_device
from heddle.parts.context.layout import Layout

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


def prefill(runner: ModelRunner, request: GenerationRequest, rollback: int = 0) -> tuple[Tensor, State]:
    """Read all prompts; returns the hidden state of each prompt's last token [B, width], and the model's state.

    rollback: how many tokens the state must be able to roll back at a time.
    """
    prompts, model, batch = request.prompt_ids, runner.model, len(request.prompt_ids)
    final_lengths = [len(prompt) + request.max_new_tokens - 1 for prompt in prompts]
    cache_length, text_lengths = max(final_lengths), final_lengths if model.length_dependent else None
    is_alone = batch == 1 or request.encoder_output is not None or (text_lengths and len(set(text_lengths)) > 1)
    common = 0 if is_alone else _common_prefix_length(prompts)
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
    if min(lengths) < longest:  # these lengths would hardly ever come again
        longest = padded_length(longest, LENGTH_STEP.on(model.embed.weight))
        layout = Layout.padded(lengths, longest, side="left", device=model.embed.weight.device, start=shared)
    tokens = _token_tensor([[0] * (longest - len(row)) + row for row in remaining], model)
    hidden, state = runner.forward(tokens, layout, state)
    return hidden[:, -1], state


def prefill_prefix(model: Decoder, tokens: Sequence[int]) -> Prefix:
    """Read the tokens that the prompts of many calls begin with. Its state has no cache_length: it grows."""
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

    There are few such lengths, so that a GPU's kernels, which are set up for each shape, find theirs again.
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
    """How many first tokens all prompts share, leaving each prompt at least one token of its own to continue from."""
    limit = min(map(len, prompts)) - 1
    return next((index for index in range(limit) if len({prompt[index] for prompt in prompts}) > 1), limit)


def _token_tensor(rows: Sequence[Sequence[int]], model: Decoder) -> Tensor:
    return to_device(torch.tensor([list(row) for row in rows], device="cpu"), model.embed.weight.device)
