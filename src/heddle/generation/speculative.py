"""Speculative decoding: a small model guesses ahead, the model reads all guesses in one call (Leviathan et al. 2023).

    guess d ~ q; kept with probability min(1, p(d) / q(d)); at the first that is not, the token is drawn from
    max(0, p − q) / Σ max(0, p − q), and after a round of kept ones from p

so what is written is distributed as without the draft. Greedy is the case where p and q are certain. A row takes
back what was not kept; where a layer cannot go back, its state is forked before and reads what was kept again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.prefill import Reader, Request, Steps, evaluating
from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout


class Round(NamedTuple):
    """What one call of the model brought: tokens guessed, of them kept, and tokens written in all.

    near_ties: of those written greedily, how many had a rival within rounding, where a plain run may differ.
    """

    guessed: int
    kept: int
    written: int
    near_ties: int


@dataclass(frozen=True)
class Draft:
    """The model that guesses, how many tokens ahead at most, and who is told of every round."""

    model: Decoder
    lookahead: int = 4
    tell: Callable[[Round], None] | None = None

    def check(self, model: Decoder) -> None:
        """Raises ConfigError where it cannot guess for the model."""
        if self.lookahead < 1:
            raise ConfigError(f"lookahead {self.lookahead}: must be at least 1")
        own, needed = self.model.embed.weight.shape[0], model.embed.weight.shape[0]
        if own != needed:
            raise ConfigError(f"draft: has a vocabulary of {own} tokens, the model {needed}; they must be the same")


class Side:
    """One of the two models and its state, which can give back tokens of the last round."""

    def __init__(self, model: Decoder, request: Request, lookahead: int) -> None:
        self.reader, self.request = Reader(model), request
        returns = model.init_state(len(request.rows), 1, request.memory).can_roll_back(1)
        rewind = lookahead if returns else 0
        self.hidden, self.state = self.reader.prompts(request, rewind)
        self.forks = not self.state.keeps(lookahead)

    def begin(self) -> None:
        """A new round."""
        self.before = self.state.fork() if self.forks else None

    def read(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab]."""
        hidden, self.state = self.reader.read(tokens, None, self.state)
        return self.reader.logits(hidden, self.request)

    def keep(self, tokens: Tensor, kept: Tensor) -> None:
        """Of the round's tokens [B, T], all of them read, the first and `kept` [B] after it stay."""
        most, back = int(kept.max()) + 1, tokens.shape[1] - 1 - kept
        if not bool(back.any()):
            return
        if self.before is None:
            self.state = self.state.rewind(back)
            return
        following = self.before.table.following(most)
        beyond = torch.arange(most, device=kept.device) > kept[:, None]
        layout = Layout(following.positions.masked_fill(beyond, -1), following.documents)
        _, self.state = self.reader.read(tokens[:, :most], layout, self.before)

    def select(self, rows: list[int]) -> None:
        """Go on with some rows only."""
        self.state = self.state.select(rows)


def guessed(model: Decoder, request: Request, ended: list[bool], draft: Draft) -> Steps:
    """Each round's tokens, several for each row; the caller marks in `ended` the rows that want no more."""
    draft.check(model)
    sampling = request.sampling
    with evaluating(model, draft.model):
        large = Side(model, request, draft.lookahead)
        # The prefix is the model's alone; a memory serves both, where both read one.
        memory = None if draft.model.memory_width is None else request.memory
        small = Side(draft.model, replace(request, prefix=None, memory=memory), draft.lookahead)
        rows = torch.arange(len(request.rows), device=large.hidden.device)
        written = torch.zeros_like(rows)
        p = sampling.probabilities(large.reader.logits(large.hidden, request))
        newest = sampling.draw(p, rows, written, NEXT)
        yield list(zip(rows.tolist(), newest.tolist(), strict=True))
        written = written + 1
        while True:
            live = [i for i, row in enumerate(rows.tolist()) if not ended[row] and written[i] < request.steps]
            if not live:
                return
            if len(live) < len(rows):
                rows, written, newest = rows[live], written[live], newest[live]
                large.select(live)
                small.select(live)
            # The row that is nearest to its end says how far ahead all may guess.
            ahead = min(draft.lookahead, request.steps - int(written.max()) - 1)
            large.begin()
            small.begin()
            tokens, q = _guess(small, request, rows, written, newest, ahead)
            logits = large.read(tokens)
            p = sampling.probabilities(logits)
            kept, newest = _judge(p, q, tokens[:, 1:], request, rows, written)
            large.keep(tokens, kept)
            small.keep(tokens, kept)
            counts = kept.tolist()
            if draft.tell is not None:
                new = len(counts) + sum(counts)
                draft.tell(Round(len(counts) * ahead, sum(counts), new, _near_ties(logits, kept, request)))
            lists = [[*row[1 : count + 1], last] for row, count, last in
                     zip(tokens.tolist(), counts, newest.tolist(), strict=True)]  # fmt: skip
            yield [(row, token) for row, new in zip(rows.tolist(), lists, strict=True) for token in new]
            written = written + kept + 1


GUESS, JUDGE, NEXT = 1, 2, 3  # draws of one place in the text that must not depend on each other


def _guess(
    small: Side, request: Request, rows: Tensor, written: Tensor, newest: Tensor, ahead: int
) -> tuple[Tensor, Tensor]:
    """The newest tokens and what the draft guesses after them, [B, 1 + ahead], and its distributions [B, ahead, vocab].

    The last guess is read as well: where all are kept, the next round goes on after it.
    """
    tokens, q = [newest], []
    for number in range(ahead):
        logits = small.read(tokens[-1][:, None])[:, -1]
        q.append(request.sampling.probabilities(logits))
        tokens.append(request.sampling.draw(q[-1], rows, written + number, GUESS))
    logits = small.read(tokens[-1][:, None])
    distributions = torch.stack(q, dim=1) if q else logits.new_zeros(len(rows), 0, logits.shape[-1]).double()
    return torch.stack(tokens, dim=1), distributions


def _judge(
    p: Tensor, q: Tensor, guesses: Tensor, request: Request, rows: Tensor, written: Tensor
) -> tuple[Tensor, Tensor]:
    """How many guesses [B, k] of each row are kept [B], and the token after them [B].

    p: the model's distributions [B, k + 1, vocab]; q: the draft's [B, k, vocab].
    """
    ahead = guesses.shape[1]
    index = guesses[..., None]
    places = written[:, None] + torch.arange(ahead, device=written.device)
    drawn = request.sampling.uniform(rows[:, None].expand_as(places), places, JUDGE)
    fits = drawn * q.gather(2, index)[..., 0] < p[:, :ahead].gather(2, index)[..., 0]
    kept = fits.long().cumprod(1).sum(1)
    at = kept[:, None, None].expand(-1, 1, p.shape[-1])
    own = p.gather(1, at)[:, 0]
    left = (p - torch.cat((q, torch.zeros_like(p[:, :1])), dim=1)).clamp(min=0.0).gather(1, at)[:, 0]
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, own)  # rounding may leave nothing
    return kept, request.sampling.draw(left, rows, written + kept, NEXT)


def _near_ties(logits: Tensor, kept: Tensor, request: Request) -> int:
    """How many of the tokens that were written greedily had a rival within the rounding of the logits."""
    if request.sampling.temperature > 0.0 or logits.shape[-1] < 2:
        return 0
    best = logits.double().topk(2, dim=-1).values
    near = best[..., 0] - best[..., 1] <= 64 * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).double()
    return int((near & (torch.arange(logits.shape[1], device=kept.device) <= kept[:, None])).sum())
