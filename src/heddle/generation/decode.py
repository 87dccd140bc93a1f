"""Autoregressive decoding: prefill, then one forward pass per new token of every row."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode
from heddle.generation.pinned_decoding import pinned_steps
from heddle.generation.prefill import prefill
from heddle.generation.sampling import check_chosen
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.numerics.dispatch.operation import Kernel, Operation, device_type

# Steps between two reads of the tokens. On a GPU each read waits for all steps before it; steps after a row's end are
# dropped. On a CPU a read costs nothing, and text is shown token by token.
STEPS_PER_READ = DeviceSize(cpu=1, accelerator=16)
MIN_GRAPH_TOKENS = 4  # recording a graph takes about as long as a step


class DecodingFacts(NamedTuple):
    """What decides how tokens are decoded. refusal: why no graph can be recorded, once that is known."""

    device: str
    tokens: int
    is_compiled: bool = False
    refusal: str | None = None


def decode(
    model: Decoder, request: GenerationRequest, finished: list[bool], runner: ModelRunner | None = None
) -> NewTokens:
    """Yield one new token per row at each step. The caller marks rows in `finished` when they need no more tokens.

    runner: that of the model, where several calls share its packed weights. A sharded model takes all `max_new_tokens`
    steps: ranks compute the tokens apart, and must take part in as many forward passes as the others.
    """
    runner = runner or ModelRunner(model)
    with eval_mode(model):
        hidden, state = prefill(runner, request)
        block_size = STEPS_PER_READ.on(hidden)
        refusal = "the ranks gather its weights at each step" if runner.is_sharded else None
        facts = DecodingFacts(device_type(hidden), request.max_new_tokens, request.compile_decoding, refusal)
        steps = DECODING.choose(facts).run(runner, request, hidden, state)
        while block := list(islice(steps, block_size)):
            for tokens in torch.stack(block).tolist():
                check_chosen(tokens)
                yield list(enumerate(tokens))
                if all(finished) and not runner.is_sharded:
                    return


def _eager_steps(runner: ModelRunner, request: GenerationRequest, hidden: Tensor, state: State) -> Iterator[Tensor]:
    """Yield the next tokens of all rows, int64 [B], at each step; −1 where logits are not finite."""
    for step in range(request.max_new_tokens):
        position = torch.full((), step, device=hidden.device)
        tokens = request.sampler.choose(runner.logits(hidden, request), position)
        yield tokens
        if step + 1 < request.max_new_tokens:
            all_hidden, state = runner.forward(tokens.clamp(min=0)[:, None], None, state)
            hidden = all_hidden[:, -1]


def _graph_steps(runner: ModelRunner, request: GenerationRequest, hidden: Tensor, state: State) -> Iterator[Tensor]:
    """As `_eager_steps`, by the replays of a graph."""

    def on_refusal(reason: str) -> None:  # the choice that the text is decoded by, for whoever records choices
        facts = DecodingFacts(device_type(hidden), request.max_new_tokens, request.compile_decoding, reason)
        DECODING.choose(facts)

    yield from pinned_steps(runner, request, hidden, state, on_refusal)


def _graph_unsupported(facts: DecodingFacts) -> str | None:
    if facts.device != "cuda":
        return "CUDA records graphs"
    if facts.tokens < MIN_GRAPH_TOKENS:
        return f"recording a graph does not pay for fewer than {MIN_GRAPH_TOKENS} tokens"
    return facts.refusal


def _pinned_unsupported(facts: DecodingFacts) -> str | None:
    if facts.device == "cuda" or facts.is_compiled:
        return None
    return "it is for CUDA and compiled steps: elsewhere it would read slots without tokens for nothing"


DECODING = Operation(
    "decoding",
    (
        Kernel("graph", _graph_steps, _graph_unsupported),
        Kernel("pinned", pinned_steps, _pinned_unsupported),
        Kernel("eager", _eager_steps, lambda facts: "its steps are not compiled" if facts.is_compiled else None),
    ),
)
