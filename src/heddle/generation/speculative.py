"""Speculative decoding: a draft model proposes tokens, the model verifies them in one call (Leviathan et al. 2023).

    A proposed token d ~ q is accepted with probability min(1, p(d) / q(d)). At the first rejection the token is drawn
    from max(0, p − q) / Σ max(0, p − q); after a round without rejection one more token is drawn from p.

p is the model's distribution, q the draft model's. The text is distributed as without a draft model; greedy decoding
is the case where p and q are one-hot. Each row rolls back its rejected tokens. Where a layer cannot roll back, the
state is forked before the round, and the fork reads the accepted tokens again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode
from heddle.generation.prefill import prefill
from heddle.model.decoder import Decoder

PROPOSE, VERIFY, NEXT = 1, 2, 3  # sites of random numbers: draws for one position that must be independent


class SpeculativeRound(NamedTuple):
    """Counts of one round over all rows: tokens proposed, tokens accepted, and tokens emitted in total.

    near_ties: emitted greedy tokens whose runner-up was within rounding, where decoding without a draft may differ.
    """

    proposed: int
    accepted: int
    emitted: int
    near_ties: int


@dataclass(frozen=True)
class SpeculativeConfig:
    """The draft model, how many tokens it proposes per round at most, and a callback for each round's counts."""

    draft_model: Decoder
    speculative_tokens: int = 4
    on_round: Callable[[SpeculativeRound], None] | None = None

    def check(self, model: Decoder) -> None:
        """Raise ConfigError if the draft model cannot propose tokens for the model."""
        if self.speculative_tokens < 1:
            raise ConfigError(f"speculative_tokens {self.speculative_tokens}: must be at least 1")
        draft_size, model_size = self.draft_model.embed.weight.shape[0], model.embed.weight.shape[0]
        if draft_size != model_size:
            raise ConfigError(
                f"draft_model: has a vocabulary of {draft_size} tokens, the model {model_size}; they must be the same"
            )


class RollbackRunner:
    """A model and its state, which can discard the rejected tokens of a round."""

    def __init__(self, model: Decoder, request: GenerationRequest, speculative_tokens: int) -> None:
        self.runner, self.request = ModelRunner(model), request
        can_roll_back = model.init_state(len(request.prompt_ids), 1, request.encoder_output).can_roll_back(1)
        self.hidden, self.state = prefill(self.runner, request, speculative_tokens if can_roll_back else 0)
        self.needs_fork = not self.state.can_always_roll_back(speculative_tokens)

    def begin_round(self) -> None:
        """Remember the state that `accept` goes back to, if rolling back is not possible."""
        self.round_start = self.state.fork() if self.needs_fork else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab]."""
        hidden, self.state = self.runner.forward(tokens, None, self.state)
        return self.runner.logits(hidden, self.request)

    def accept(self, tokens: Tensor, accepted: Tensor) -> None:
        """Of the round's tokens [B, T], all read by now, keep each row's first and the `accepted` [B] after it."""
        longest, rejected = int(accepted.max()) + 1, tokens.shape[1] - 1 - accepted
        if not bool(rejected.any()):
            return
        if self.round_start is None:
            self.state = self.state.rollback(rejected)
            return
        layout = self.round_start.table.next_layout(longest, accepted + 1)
        _, self.state = self.runner.forward(tokens[:, :longest], layout, self.round_start)

    def select(self, rows: list[int]) -> None:
        """Continue with these rows only."""
        self.state = self.state.select(rows)


def speculative_decode(
    model: Decoder, request: GenerationRequest, finished: list[bool], config: SpeculativeConfig
) -> NewTokens:
    """Yield each round's tokens, several per row. The caller marks rows in `finished` when they need no more tokens."""
    config.check(model)
    sampler = request.sampler
    with eval_mode(model, config.draft_model):
        target = RollbackRunner(model, request, config.speculative_tokens)
        draft = RollbackRunner(config.draft_model, _draft_request(request, config), config.speculative_tokens)
        rows = torch.arange(len(request.prompt_ids), device=target.hidden.device)
        emitted = torch.zeros_like(rows)
        p = sampler.probabilities(target.runner.logits(target.hidden, request))
        last_tokens = sampler.draw(p, rows, emitted, NEXT)
        yield list(zip(rows.tolist(), last_tokens.tolist(), strict=True))
        emitted = emitted + 1
        while True:
            active = [
                index
                for index, row in enumerate(rows.tolist())
                if not finished[row] and emitted[index] < request.max_new_tokens
            ]
            if not active:
                return
            if len(active) < len(rows):
                rows, emitted, last_tokens = rows[active], emitted[active], last_tokens[active]
                target.select(active)
                draft.select(active)
            # All rows propose equally many tokens, so the row closest to its limit decides how many.
            count = min(config.speculative_tokens, request.max_new_tokens - int(emitted.max()) - 1)
            target.begin_round()
            draft.begin_round()
            tokens, q = _propose(draft, request, rows, emitted, last_tokens, count)
            logits = target.forward(tokens)
            accepted, last_tokens = _verify(sampler.probabilities(logits), q, tokens[:, 1:], request, rows, emitted)
            target.accept(tokens, accepted)
            draft.accept(tokens, accepted)
            if config.on_round is not None:
                config.on_round(_round_counts(logits, accepted, count, request))
            yield _emitted_tokens(rows, tokens, accepted, last_tokens)
            emitted = emitted + accepted + 1


def _draft_request(request: GenerationRequest, config: SpeculativeConfig) -> GenerationRequest:
    """The request for the draft model: the prefix's state is the model's alone, an encoder output serves both."""
    needs_encoder = config.draft_model.encoder_width is not None
    return replace(request, prefix=None, encoder_output=request.encoder_output if needs_encoder else None)


def _propose(
    draft: RollbackRunner, request: GenerationRequest, rows: Tensor, emitted: Tensor, last_tokens: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The last tokens and `count` proposed ones [B, 1 + count], and the draft's distributions q [B, count, vocab].

    The draft also reads the last proposed token: if all are accepted, the next round continues after it.
    """
    tokens, distributions = [last_tokens], []
    for index in range(count):
        logits = draft.forward(tokens[-1][:, None])[:, -1]
        distributions.append(request.sampler.probabilities(logits))
        tokens.append(request.sampler.draw(distributions[-1], rows, emitted + index, PROPOSE))
    logits = draft.forward(tokens[-1][:, None])
    empty = logits.new_zeros(len(rows), 0, logits.shape[-1]).double()
    return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else empty


def _verify(
    p: Tensor, q: Tensor, proposed: Tensor, request: GenerationRequest, rows: Tensor, emitted: Tensor
) -> tuple[Tensor, Tensor]:
    """How many of the proposed tokens [B, k] each row accepts [B], and the token after those [B].

    p: the model's distributions [B, k + 1, vocab]; q: the draft's [B, k, vocab].
    """
    count = proposed.shape[1]
    index = proposed[..., None]
    positions = emitted[:, None] + torch.arange(count, device=emitted.device)
    uniforms = request.sampler.uniform(rows[:, None].expand_as(positions), positions, VERIFY)
    passes = uniforms * q.gather(2, index)[..., 0] < p[:, :count].gather(2, index)[..., 0]
    accepted = passes.long().cumprod(1).sum(1)
    next_index = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    next_p = p.gather(1, next_index)[:, 0]
    residual = (p - torch.cat((q, torch.zeros_like(p[:, :1])), dim=1)).clamp(min=0.0).gather(1, next_index)[:, 0]
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, next_p)  # rounding may leave only zeros
    return accepted, request.sampler.draw(residual, rows, emitted + accepted, NEXT)


def _emitted_tokens(rows: Tensor, tokens: Tensor, accepted: Tensor, last_tokens: Tensor) -> list[tuple[int, int]]:
    """Each row's accepted tokens and the token drawn after them."""
    per_row = zip(rows.tolist(), tokens.tolist(), accepted.tolist(), last_tokens.tolist(), strict=True)
    return [(row, token) for row, proposed, count, last in per_row for token in (*proposed[1 : count + 1], last)]


def _round_counts(logits: Tensor, accepted: Tensor, proposed: int, request: GenerationRequest) -> SpeculativeRound:
    rows, total = len(accepted), int(accepted.sum())
    return SpeculativeRound(rows * proposed, total, rows + total, _near_ties(logits, accepted, request))


def _near_ties(logits: Tensor, accepted: Tensor, request: GenerationRequest) -> int:
    """How many of the tokens emitted greedily have a runner-up within the rounding of the logits."""
    if request.sampler.temperature > 0.0 or logits.shape[-1] < 2:
        return 0
    top_two = logits.double().topk(2, dim=-1).values
    rounding = 64 * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).double()
    emitted = torch.arange(logits.shape[1], device=accepted.device) <= accepted[:, None]
    return int(((top_two[..., 0] - top_two[..., 1] <= rounding) & emitted).sum())
