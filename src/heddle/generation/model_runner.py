"""Run a model for generation: forward passes without gradients, and logits over the tokens it may generate."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.distributed.ranks import is_sharded
from heddle.generation.sampling import Sampler
from heddle.model.decoder import Decoder
from heddle.model.state import State
from heddle.numerics.dispatch.transfer import Constants
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.layout import Layout

if TYPE_CHECKING:
    from heddle.generation.prefill import Prefix

NewTokens = Iterator[list[tuple[int, int]]]  # at each step the new tokens, as (row, token)


@dataclass(frozen=True)
class GenerationRequest:
    """A batch of prompts and how to continue them.

    prompt_ids: the tokens of each prompt, the prefix included. max_new_tokens: the limit of each row.
    vocab_limit: generate only tokens below it (None: all), since a vocabulary may be larger than its tokenizer's.
    unused_token_ids: tokens below the limit that are never generated. eos_ids: any of these ends a row.
    encoder_output: what cross-attention reads, one row per prompt. compile_decoding: the step of a token is compiled.
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


class ModelRunner:
    """A model without gradients, with packed weights that are reused from call to call.

    is_sharded: each forward pass is a collective of all ranks, and gathers the weights anew, so that none is packed.
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

    def logits(self, hidden: Tensor, request: GenerationRequest) -> Tensor:
        """hidden [..., width] -> logits [..., vocab], cut to the request's vocab_limit; -inf for unused tokens."""
        with torch.no_grad(), self._packing():
            logits: Tensor = self.model.head(hidden)
        logits = logits[..., : request.vocab_limit]
        if request.unused_token_ids:
            unused = self.constants.tensor(request.unused_token_ids, torch.int64, logits.device)
            logits = logits.index_fill(-1, unused, -torch.inf)
        return logits

    def _packing(self) -> AbstractContextManager[None]:
        """A compiled graph cannot set the context, and holds no packed weight."""
        return nullcontext() if self.is_sharded or is_compiling() else packed_weights(self.packed_weights)


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
