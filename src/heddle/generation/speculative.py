"""Speculative decoding: a draft model proposes tokens, the model verifies them in one call (Leviathan et al. 2023).

    A proposed token d ~ q is accepted with probability min(1, p(d) / q(d)). At the first rejection the token is drawn
    from max(0, p − q) / Σ max(0, p − q); after a round without rejection one more token is drawn from p.

p is the model's distribution, q the draft model's. The text is distributed as without a draft model; greedy decoding
is the case where p and q are one-hot. Each row rolls back its rejected tokens. Where a layer cannot roll back, the
state is forked before the round, and the fork reads the accepted tokens again.

The draft is another model, or the model's own first multi-token module (DeepSeek-V3): it reads the model's hidden state
of a token and the next token, and its own hidden states where the model has not computed any yet.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import (
    LOGITS_NOT_FINITE,
    GenerationRequest,
    ModelRunner,
    NewTokens,
    ReadPrompts,
    all_finite,
    eval_mode,
    final_lengths,
    prefill,
)
from heddle.model.decoder import Decoder
from heddle.model.multi_token import layout_ahead
from heddle.numerics.transfer import tensor_of
from heddle.parts.layout import Layout

PROPOSE, VERIFY, NEXT = 1, 2, 3  # sites of random numbers: draws for one position that must be independent
DrawnFor = tuple[Tensor, Tensor]  # rows and positions int64 [B], which random numbers depend on


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
    """The draft model, how many tokens it proposes per round at most, and a callback for each round's counts.

    draft_model: None means the model's own multi-token module.
    """

    draft_model: Decoder | None
    speculative_tokens: int = 4
    on_round: Callable[[SpeculativeRound], None] | None = None

    def check(self, model: Decoder) -> None:
        """Raise ConfigError if the draft model cannot propose tokens for the model."""
        if self.speculative_tokens < 1:
            raise ConfigError(f"speculative_tokens {self.speculative_tokens}: must be at least 1")
        if self.draft_model is None:
            if not len(model.multi_token):
                raise ConfigError("multi_token_draft: this design has no multi-token modules; leave it out")
            return
        draft_size, model_size = self.draft_model.embed.weight.shape[0], model.embed.weight.shape[0]
        if draft_size != model_size:
            raise ConfigError(
                f"draft_model: has a vocabulary of {draft_size} tokens, the model {model_size}; they must be the same"
            )


class RollbackRunner:
    """A model and its state, which can discard the rejected tokens of a round."""

    def __init__(
        self,
        model: Decoder,
        request: GenerationRequest,
        speculative_tokens: int,
        on_read: ReadPrompts | None = None,
    ) -> None:
        self.runner, self.request = ModelRunner(model), request
        can_roll_back = model.init_state(len(request.prompt_ids), 1, request.encoder_output).can_roll_back(1)
        self.hidden, self.state = prefill(self.runner, request, speculative_tokens if can_roll_back else 0, on_read)
        self.needs_fork = not self.state.can_always_roll_back(speculative_tokens)

    def begin_round(self) -> None:
        """Save the state that `accept` returns to, if it cannot be rolled back."""
        self.round_start = self.state.fork() if self.needs_fork else None

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, vocab]. The hidden states [B, T, width] stay in `hidden`."""
        self.hidden, self.state = self.runner.forward(tokens, None, self.state)
        return self.runner.logits(self.hidden, self.request)

    def accept(self, tokens: Tensor, accepted: Tensor, counts: list[int]) -> None:
        """Of the round's tokens [B, T], keep each row's first and the `accepted` [B] after it; roll back the others.

        counts: `accepted` as a list.
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


class DraftModel(RollbackRunner):
    """Another model as the draft."""

    def propose(self, drawn_for: DrawnFor, last_tokens: Tensor, count: int) -> "Proposal":
        """Propose `count` tokens. The draft also reads the last one: if all are accepted, it continues after it."""
        sampler, (rows, emitted) = self.request.sampler, drawn_for
        tokens, distributions, finite = [last_tokens], [], torch.ones((), dtype=torch.bool, device=rows.device)
        self.begin_round()
        for index in range(count):
            logits = self.forward(tokens[-1][:, None])[:, -1]
            finite = finite & all_finite(logits)
            distributions.append(sampler.probabilities(logits))
            tokens.append(sampler.draw(distributions[-1], rows, emitted + index, PROPOSE))
        logits = self.forward(tokens[-1][:, None])[:, -1]
        return _proposal(tokens, distributions, finite, logits)

    def accept_after(self, target: RollbackRunner, tokens: Tensor, accepted: Tensor, counts: list[int]) -> None:
        """As `accept`."""
        self.accept(tokens, accepted, counts)


class MultiTokenDraft:
    """The model's first multi-token module as the draft, and its state.

    Each round first reads the accepted tokens with the model's hidden states. To propose more than one token it then
    reads its own hidden states, and rolls these reads back.
    """

    def __init__(self, runner: ModelRunner, request: GenerationRequest, speculative_tokens: int) -> None:
        self.runner, self.request = runner, request
        model, lengths = runner.model, final_lengths(request)
        rows, output = len(lengths), request.encoder_output
        can_roll_back = model.init_draft_state(rows, 1, output).can_roll_back(1)
        text_lengths, rollback = lengths if model.length_dependent else None, speculative_tokens if can_roll_back else 0
        self.state = model.init_draft_state(rows, max(lengths), output, rollback, text_lengths)
        self.needs_fork = not self.state.can_always_roll_back(speculative_tokens)

    def read_prompts(self, tokens: Tensor, layout: Layout | None, hidden: Tensor) -> None:
        """Read the prompts except their last tokens, with the model's hidden states [B, T, width]."""
        rows, length = tokens.shape
        layout = Layout.causal(rows, length, device=tokens.device) if layout is None else layout
        if length > 1:
            ahead, index = layout_ahead(layout, 1)
            following = tokens[:, 1:] if index is None else tokens.gather(1, index)
            _, self.state = self.runner.draft(hidden[:, :-1], following, ahead, self.state)
        self._keep(hidden[:, -1:], tokens[:, :0], torch.zeros_like(tokens[:, 0]), [0] * len(tokens))

    def _keep(self, hidden: Tensor, following: Tensor, accepted: Tensor, counts: list[int]) -> None:
        """Keep what the next round reads first: hidden [B, T, width], and the tokens after all but each row's last."""
        longest = max(counts) + 1
        self.hidden, self.following, self.accepted, self.counts = hidden[:, :longest], following, accepted, counts

    def propose(self, drawn_for: DrawnFor, last_tokens: Tensor, count: int) -> "Proposal":
        """Read the accepted tokens, and propose `count` tokens."""
        sampler, (rows, emitted) = self.request.sampler, drawn_for
        predicted = self._read_accepted(last_tokens)
        round_start = self.state.fork() if self.needs_fork and count > 1 else None
        tokens, distributions, finite = [last_tokens], [], torch.ones((), dtype=torch.bool, device=rows.device)
        for index in range(count):
            if index:
                layout = self.state.table.next_layout(1)
                predicted, self.state = self.runner.draft(predicted, tokens[-1][:, None], layout, self.state)
            logits = self.runner.logits(predicted[:, -1], self.request)
            finite = finite & all_finite(logits)
            distributions.append(sampler.probabilities(logits))
            tokens.append(sampler.draw(distributions[-1], rows, emitted + index, PROPOSE))
        if round_start is not None:
            self.state = round_start
        elif count > 1:
            self.state = self.state.rollback(count - 1)
        return _proposal(tokens, distributions, finite, self.runner.logits(predicted[:, -1], self.request))

    def _read_accepted(self, last_tokens: Tensor) -> Tensor:
        """The module's hidden states [B, 1, width] for the newest hidden state and the newest token."""
        longest, last = self.hidden.shape[1], self.accepted[:, None]
        padded = torch.cat((self.following, last_tokens[:, None]), dim=1)[:, :longest]
        following = padded.scatter(1, last, last_tokens[:, None])
        uneven = min(self.counts) + 1 < longest
        layout = self.state.table.next_layout(longest, self.accepted + 1 if uneven else None)
        predicted, self.state = self.runner.draft(self.hidden, following, layout, self.state)
        return predicted.gather(1, last[..., None].expand(-1, -1, predicted.shape[2]))

    def accept_after(self, target: RollbackRunner, tokens: Tensor, accepted: Tensor, counts: list[int]) -> None:
        """Keep the model's hidden states of the accepted tokens; arguments as in `RollbackRunner.accept`."""
        self._keep(target.hidden, tokens[:, 1:], accepted, counts)

    def select(self, rows: list[int]) -> None:
        """Continue with these rows only."""
        self.state = self.state.select(rows)
        self._keep(self.hidden[rows], self.following[rows], self.accepted[rows], [self.counts[row] for row in rows])


class Proposal(NamedTuple):
    """A draft's proposal: the last and the proposed tokens [B, 1 + k], and its distributions q [B, k, vocab].

    finite: whether its logits are finite, bool [].
    """

    tokens: Tensor
    q: Tensor
    finite: Tensor


def _proposal(tokens: list[Tensor], distributions: list[Tensor], finite: Tensor, logits: Tensor) -> Proposal:
    """logits [B, vocab]: any of the draft's, which give the shape if nothing was proposed."""
    empty = logits.new_zeros(len(logits), 0, logits.shape[-1]).double()
    return Proposal(torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else empty, finite)


def speculative_decode(
    model: Decoder, request: GenerationRequest, finished: list[bool], config: SpeculativeConfig
) -> NewTokens:
    """Yield each round's tokens, several per row. The caller marks rows in `finished` when they need no more tokens."""
    config.check(model)
    sampler = request.sampler
    with eval_mode(model, config.draft_model or model):
        target, draft = _runners(model, request, config)
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
            drawn_for = _drawn_for(rows, emitted, device)
            tokens, q, finite = draft.propose(drawn_for, last_tokens, count)
            logits = target.forward(tokens)
            accepted, last_tokens = _verify(sampler.probabilities(logits), q, tokens[:, 1:], request, drawn_for)
            # The only wait for sampled tokens; rolling back waits once more for each of the two states.
            finite = finite & all_finite(logits)
            counts, ends, *proposed = _read(finite, accepted, last_tokens, *tokens[:, 1:].unbind(1))
            target.accept(tokens, accepted, counts)
            draft.accept_after(target, tokens, accepted, counts)
            if config.on_round is not None:
                config.on_round(_round_counts(logits, accepted, counts, count, request))
            texts = [[step[i] for step in proposed[:length]] + [ends[i]] for i, length in enumerate(counts)]
            yield [(row, token) for row, text in zip(rows, texts, strict=True) for token in text]
            emitted = [before + len(text) for before, text in zip(emitted, texts, strict=True)]


def _drawn_for(rows: list[int], emitted: list[int], device: torch.device) -> DrawnFor:
    """Rows and positions int64 [B] as tensors, which random numbers depend on."""
    drawn_for = tensor_of([*rows, *emitted], torch.int64, device)
    return drawn_for[: len(rows)], drawn_for[len(rows) :]


def _read(finite: Tensor, *tensors: Tensor) -> list[list[int]]:
    """The values of tensors int64 [B], in one read. Raises MachineError unless `finite` [] is true."""
    *values, are_finite = torch.stack((*tensors, finite.expand_as(tensors[0]).long())).tolist()
    if not all(are_finite):
        raise MachineError(LOGITS_NOT_FINITE)
    return values


def _runners(
    model: Decoder, request: GenerationRequest, config: SpeculativeConfig
) -> tuple[RollbackRunner, DraftModel | MultiTokenDraft]:
    """The model and the draft, after both have read the prompts."""
    if config.draft_model is None:
        draft = MultiTokenDraft(ModelRunner(model), request, config.speculative_tokens)
        return RollbackRunner(model, request, config.speculative_tokens, draft.read_prompts), draft
    needs_encoder = config.draft_model.encoder_width is not None
    # The prefix's state is the model's alone, an encoder output serves both.
    own = replace(request, prefix=None, encoder_output=request.encoder_output if needs_encoder else None)
    target = RollbackRunner(model, request, config.speculative_tokens)
    return target, DraftModel(config.draft_model, own, config.speculative_tokens)


def _verify(
    p: Tensor, q: Tensor, proposed: Tensor, request: GenerationRequest, drawn_for: DrawnFor
) -> tuple[Tensor, Tensor]:
    """How many of the proposed tokens [B, k] each row accepts [B], and the token after them [B].

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
