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

from heddle.errors import ConfigError, MachineError
from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode, prefill
from heddle.generation.sampling import LOGITS_NOT_FINITE, all_finite
from heddle.model.decoder import Decoder
from heddle.numerics.transfer import tensor_of

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

    def accept(self, tokens: Tensor, accepted: Tensor, counts: list[int]) -> None:
        """Of the round's tokens [B, T], all read by now, keep each row's first and the `accepted` [B] after it.

        counts: the numbers of `accepted`.
        """
        rejected = [tokens.shape[1] - 1 - count for count in counts]
        if not any(rejected):
            return
        if self.round_start is None:
            self.state = self.state.rollback(rejected)
            return
        longest = max(counts) + 1
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
        device = target.hidden.device
        rows, emitted = list(range(len(request.prompt_ids))), [0] * len(request.prompt_ids)
        logits = target.runner.logits(target.hidden, request)
        last_tokens = sampler.draw(sampler.probabilities(logits), *_drawn_for(rows, emitted, device), NEXT)
        yield list(zip(rows, _read(all_finite(logits), last_tokens)[0], strict=True))
        emitted = [1] * len(rows)
        while True:
            active = [
                index for index, row in enumerate(rows) if not finished[row] and emitted[index] < request.max_new_tokens
            ]
            if not active:
                return
            if len(active) < len(rows):
                rows, emitted = [rows[index] for index in active], [emitted[index] for index in active]
                last_tokens = last_tokens[active]
                target.select(active)
                draft.select(active)
            # All rows propose equally many tokens, so the row closest to its limit decides how many.
            count = min(config.speculative_tokens, request.max_new_tokens - max(emitted) - 1)
            target.begin_round()
            draft.begin_round()
            drawn_for = _drawn_for(rows, emitted, device)
            tokens, q, finite = _propose(draft, request, drawn_for, last_tokens, count)
            logits = target.forward(tokens)
            accepted, last_tokens = _verify(sampler.probabilities(logits), q, tokens[:, 1:], request, drawn_for)
            # The only wait for what was drawn; rolling back waits once more for each of the two states.
            finite = finite & all_finite(logits)
            counts, ends, *proposed = _read(finite, accepted, last_tokens, *tokens[:, 1:].unbind(1))
            target.accept(tokens, accepted, counts)
            draft.accept(tokens, accepted, counts)
            if config.on_round is not None:
                config.on_round(_round_counts(logits, accepted, counts, count, request))
            texts = [[step[i] for step in proposed[:length]] + [ends[i]] for i, length in enumerate(counts)]
            yield [(row, token) for row, text in zip(rows, texts, strict=True) for token in text]
            emitted = [before + len(text) for before, text in zip(emitted, texts, strict=True)]


def _drawn_for(rows: list[int], emitted: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and positions int64 [B] as tensors, which random numbers depend on."""
    drawn_for = tensor_of([*rows, *emitted], torch.int64, device)
    return drawn_for[: len(rows)], drawn_for[len(rows) :]


def _read(finite: Tensor, *tensors: Tensor) -> list[list[int]]:
    """The values of tensors int64 [B], in one read. Raises MachineError unless `finite` [] is true."""
    *values, are_finite = torch.stack((*tensors, finite.expand_as(tensors[0]).long())).tolist()
    if not all(are_finite):
        raise MachineError(LOGITS_NOT_FINITE)
    return values


def _draft_request(request: GenerationRequest, config: SpeculativeConfig) -> GenerationRequest:
    """The request for the draft model: the prefix's state is the model's alone, an encoder output serves both."""
    needs_encoder = config.draft_model.encoder_width is not None
    return replace(request, prefix=None, encoder_output=request.encoder_output if needs_encoder else None)


def _propose(
    draft: RollbackRunner,
    request: GenerationRequest,
    drawn_for: tuple[Tensor, Tensor],
    last_tokens: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The last tokens and `count` proposed ones [B, 1 + count], and the draft's distributions q [B, count, vocab].

    Also whether the draft's logits are finite, bool [].

    The draft also reads the last proposed token: if all are accepted, the next round continues after it.
    """
    rows, emitted = drawn_for
    tokens, distributions, finite = [last_tokens], [], torch.ones((), dtype=torch.bool, device=rows.device)
    for index in range(count):
        logits = draft.forward(tokens[-1][:, None])[:, -1]
        finite = finite & all_finite(logits)
        distributions.append(request.sampler.probabilities(logits))
        tokens.append(request.sampler.draw(distributions[-1], rows, emitted + index, PROPOSE))
    logits = draft.forward(tokens[-1][:, None])
    empty = logits.new_zeros(len(rows), 0, logits.shape[-1]).double()
    return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else empty, finite


def _verify(
    p: Tensor, q: Tensor, proposed: Tensor, request: GenerationRequest, drawn_for: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """How many of the proposed tokens [B, k] each row accepts [B], and the token after those [B].

    p: the model's distributions [B, k + 1, vocab]; q: the draft's [B, k, vocab].
    """
    count, (rows, emitted) = proposed.shape[1], drawn_for
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


def _round_counts(
    logits: Tensor, accepted: Tensor, counts: list[int], proposed: int, request: GenerationRequest
) -> SpeculativeRound:
    rows, total = len(counts), sum(counts)
    return SpeculativeRound(rows * proposed, total, rows + total, _near_ties(logits, accepted, request))


def _near_ties(logits: Tensor, accepted: Tensor, request: GenerationRequest) -> int:
    """How many of the tokens emitted greedily have a runner-up within the rounding of the logits."""
    if request.sampler.temperature > 0.0 or logits.shape[-1] < 2:
        return 0
    top_two = logits.double().topk(2, dim=-1).values
    rounding = 64 * torch.finfo(logits.dtype).eps * logits.abs().amax(-1).double()
    emitted = torch.arange(logits.shape[1], device=accepted.device) <= accepted[:, None]
    return int(((top_two[..., 0] - top_two[..., 1] <= rounding) & emitted).sum())
