"""Beam search: of each prompt's continuations the n likeliest so far are kept at every step; the best one wins.

    score = log p(tokens) / number of tokens        (the end token counts)

Every continuation of a kept one by an end token is a candidate. Equal scores go to the earlier beam, then to the
lower token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heddle.generation.prefill import Reader, Request, Steps, evaluating
from heddle.model.decoder import Decoder

Tokens = tuple[int, ...]


@dataclass
class Search:
    """One prompt's beams, best first: their tokens and log p float64 [beams]; and the best text that has ended."""

    texts: list[Tokens] = field(default_factory=lambda: [()])
    totals: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    best: Tokens = ()
    score: float = float("-inf")

    def step(self, log_p: Tensor, beams: int, ends: Sequence[int]) -> list[int]:
        """Go on by one token, log_p float64 [beams, vocab]; returns each new beam's parent."""
        totals = self.totals[:, None] + log_p
        for text, row in zip(self.texts, totals, strict=True):
            for end in ends:
                self.offer((*text, end), float(row[end]))
        totals[:, list(ends)] = -torch.inf
        chosen = _likeliest(totals.flatten(), min(beams, int((totals > -torch.inf).sum())))
        parents = (chosen // totals.shape[1]).tolist()
        added = (chosen % totals.shape[1]).tolist()
        self.texts = [(*self.texts[parent], token) for parent, token in zip(parents, added, strict=True)]
        self.totals = totals.flatten()[chosen]
        return parents

    def offer(self, text: Tokens, total: float) -> None:
        """A text that goes on no further; an earlier one wins where scores are equal."""
        if total / len(text) > self.score:
            self.best, self.score = text, total / len(text)

    def settled(self, steps: int) -> bool:
        """Whether no beam can win any more: log p only falls, and a text has at most `steps` tokens."""
        return not self.texts or self.score >= float(self.totals[0]) / steps

    def result(self) -> Tokens:
        """The best text, those that have not ended among them."""
        for text, total in zip(self.texts, self.totals.tolist(), strict=True):
            self.offer(text, total)
        return self.best


def _likeliest(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest of scores [N], highest first; of equal ones the lower index."""
    if count < 1:
        return torch.empty(0, dtype=torch.int64)
    least = scores.topk(min(count, len(scores))).values[-1]
    among = (scores >= least).nonzero().squeeze(1)
    return among[scores[among].sort(descending=True, stable=True).indices[:count]]


def searched(model: Decoder, request: Request, beams: int) -> Steps:
    """One step: the tokens of each row's best text, the end token last where it ended."""
    reader = Reader(model)
    searches = [Search() for _ in request.rows]
    with evaluating(model):
        hidden, state = reader.prompts(request)
        live = searches
        for step in range(request.steps):
            log_p = reader.logits(hidden, request).double().log_softmax(-1).cpu()
            widths = [len(search.texts) for search in live]
            rows: list[int] = []
            following, first = [], 0
            for search, width in zip(live, widths, strict=True):
                parents = search.step(log_p[first : first + width], beams, request.ends)
                if not search.settled(request.steps):
                    following.append(search)
                    rows += [first + parent for parent in parents]
                first += width
            live = following
            if not live or step + 1 == request.steps:
                break
            newest = torch.tensor([[text[-1]] for search in live for text in search.texts])
            read, state = reader.read(newest.to(hidden.device), None, state.select(rows))
            hidden = read[:, -1]
    yield [(row, token) for row, search in enumerate(searches) for token in search.result()]
