"""Log probabilities of new tokens, as OpenAI's interface gives them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from heddle.generation.sampling import Sampler
from heddle.tokenization.tokenizer import Tokenizer


class TokenScore(NamedTuple):
    """A token's log probability (natural), and those of the most likely tokens, most likely first."""

    token: int
    log_probability: float
    alternatives: list[tuple[int, float]]


@dataclass(frozen=True)
class ScoringSampler(Sampler):
    """A sampler of one row that keeps the score of each token it chose, before temperature, top-k and top-p.

    For steps that run one by one: a recorded graph calls no sampler.
    """

    alternatives: int = 0
    scores: list[TokenScore] = field(default_factory=list, repr=False, compare=False)

    @property
    def can_share(self) -> bool:
        """Never: each row's score is its own."""
        return False

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """As in `Sampler`."""
        tokens = super().choose(logits, position)
        token, log_probabilities = int(tokens[0]), logits[0].double().log_softmax(-1)
        best = log_probabilities.topk(min(self.alternatives, len(log_probabilities)))
        pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        # JSON has no infinite number: a token without any probability has OpenAI's -9999.
        finite = [(other, max(score, -9999.0)) for other, score in pairs]
        self.scores.append(TokenScore(token, float(log_probabilities[token]), finite))
        return tokens


def chat_scores(scores: list[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of /v1/chat/completions; besides OpenAI's fields, each token has its `id`."""

    def entry(token: int, log_probability: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": log_probability, "bytes": list(tokenizer.token_bytes(token)), "id": token}

    content = [
        entry(score.token, score.log_probability) | {"top_logprobs": [entry(*pair) for pair in score.alternatives]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def completion_scores(scores: list[TokenScore], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of /v1/completions, and token_ids. text_offset: in characters from the first of these tokens."""
    tokens = [tokenizer.decode([score.token]) for score in scores]
    offsets = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    best = [{tokenizer.decode([token]): value for token, value in score.alternatives} for score in scores]
    log_probabilities = [score.log_probability for score in scores]
    ids = [score.token for score in scores]
    return {
        "tokens": tokens,
        "token_ids": ids,
        "token_logprobs": log_probabilities,
        "top_logprobs": best,
        "text_offset": offsets,
    }
