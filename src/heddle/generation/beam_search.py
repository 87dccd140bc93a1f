"""Beam search: keep the `num_beams` most likely continuations of each prompt at every step; return the best.

    score = log p(tokens) / number of tokens        (the end token counts)

A continuation of any beam by an end token is a finished candidate. Of equal scores, the earlier beam wins, then the
lower token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heddle.generation.model_runner import GenerationRequest, ModelRunner, NewTokens, eval_mode, prefill
from heddle.model.decoder import Decoder
from heddle.numerics.transfer import tensor_of

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
        """Consider a finished sequence; of equal scores the earlier one stays."""
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
    """Indices of the highest of scores [N], highest first; of equal scores the lower index comes first."""
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
