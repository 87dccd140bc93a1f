"""How generation reads: prompts of any lengths in one call, what they begin with alike only once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.sampling import Sampling
from heddle.model.decoder import BY_LENGTH, Decoder
from heddle.model.state import State
from heddle.numerics.linear import Packs, packing
from heddle.parts.context.layout import Layout, Memory

SHARED = 16  # tokens; prompts that share fewer are read whole, which costs less than one more call

Steps = Iterator[list[tuple[int, int]]]  # at each step, new tokens as (row, token)


@dataclass(frozen=True, eq=False)
class Prefix:
    """The tokens that prompts begin with, and the state after all of them but the last.

    The last is read with each prompt, so that a prompt which adds nothing can be continued too.
    """

    model: Decoder
    tokens: tuple[int, ...]
    state: State


@dataclass(frozen=True)
class Request:
    """What to continue and how: whole rows of tokens (the prefix among them), and how many more each may get.

    Only the first `known` tokens are written (None: all), and no `absent` one: a vocabulary may be wider than its
    tokenizer. A row may end at any of `ends`. memory: what cross-attention reads, a row each.
    """

    rows: Sequence[Sequence[int]]
    steps: int
    sampling: Sampling
    known: int | None = None
    ends: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    prefix: Prefix | None = None
    memory: Memory | None = None


class Reader:
    """A model at reading: no gradients, and packed weights that last from call to call."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.packs: Packs = {}

    def read(self, tokens: Tensor, layout: Layout | None, state: State) -> tuple[Tensor, State]:
        """tokens int64 [B, T] -> hidden [B, T, width] and the new state."""
        # Neither may be in force where the caller of a generator runs.
        with torch.no_grad(), packing(self.packs):
            hidden, after = self.model(tokens, layout, state)
        assert after is not None
        return hidden, after

    def logits(self, hidden: Tensor, request: Request) -> Tensor:
        """hidden [..., width] -> logits of the tokens that a request knows [..., known]; -inf for absent ones."""
        with torch.no_grad(), packing(self.packs):
            logits: Tensor = self.model.head(hidden)
        logits = logits[..., : request.known]
        if request.absent:
            absent = torch.tensor(request.absent, device=logits.device)
            logits = logits.index_fill(-1, absent, -torch.inf)
        return logits

    def prompts(self, request: Request, rewind: int = 0) -> tuple[Tensor, State]:
        """Read all prompts; returns hidden states of their last tokens [B, width], and the state."""
        batch, capacity = len(request.rows), max(map(len, request.rows)) + request.steps - 1
        shared, state = 0, None
        if request.prefix is not None:
            shared, state = len(request.prefix.tokens) - 1, request.prefix.state.select([0] * batch)
        elif batch > 1 and request.memory is None and (alike := _alike(request.rows)) >= SHARED:
            one = self.model.init_state(1, capacity, rewind=rewind)
            _, one = self.read(self._tensor([request.rows[0][:alike]]), None, one)
            shared, state = alike, one.select([0] * batch)
        if state is None:
            state = self.model.init_state(batch, capacity, request.memory, rewind)
        rest = [list(row[shared:]) for row in request.rows]
        lengths = [len(row) for row in rest]
        longest = max(lengths)
        tokens = self._tensor([[0] * (longest - len(row)) + row for row in rest])
        layout = None
        if min(lengths) < longest:
            padded = Layout.padded(lengths, side="left", device=tokens.device).positions
            layout = Layout(torch.where(padded >= 0, padded + shared, -1))
        hidden, state = self.read(tokens, layout, state)
        return hidden[:, -1], state

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self.model.embed.weight.device)


def _alike(rows: Sequence[Sequence[int]]) -> int:
    """With how many tokens all rows begin alike; each keeps one of its own, to be continued from."""
    most = min(map(len, rows)) - 1
    return next((i for i in range(most) if len({row[i] for row in rows}) > 1), most)


def read_prefix(model: Decoder, tokens: Sequence[int]) -> Prefix:
    """Read tokens once, for many calls; the state grows with what follows, so nobody knows how long it will be."""
    if model.by_length:
        raise ConfigError(f"prefix: {BY_LENGTH}, and what follows is not known yet; put its tokens before each prompt")
    reader = Reader(model)
    with evaluating(model):
        state = model.init_state(1)
        if len(tokens) > 1:
            _, state = reader.read(torch.tensor([list(tokens[:-1])], device=model.embed.weight.device), None, state)
    return Prefix(model, tuple(tokens), state)


@contextmanager
def evaluating(*models: Decoder) -> Iterator[None]:
    """Models in eval mode within the block, and as they were after it."""
    were = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, training in zip(models, were, strict=True):
            model.train(training)


def checked_row(row: Sequence[int], model: Decoder) -> list[int]:
    """A row of tokens. Raises ConfigError where it is empty or holds what the model does not know."""
    tokens = [int(token) for token in row]
    vocab = model.embed.weight.shape[0]
    if not tokens or min(tokens) < 0 or max(tokens) >= vocab:
        raise ConfigError(f"prompts: each needs at least one token, all from 0 to {vocab - 1}")
    return tokens
