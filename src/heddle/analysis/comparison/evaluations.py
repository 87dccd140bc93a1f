"""How often, and on how much text, a run is evaluated on its way: together at most a tenth of what it trains on."""

from typing import NamedTuple

from heddle.training.loop import INTERIM_EVALUATION_TOKENS
from heddle.training.settings import Settings

MAX_SHARE = 1 / 10  # of the batches that are trained on
MAX_POINTS = 10  # of a learning curve


class Evaluations(NamedTuple):
    """interval: steps between two evaluations, None for no evaluation. batches: of each, as large as a step's."""

    interval: int | None
    batches: int


def plan_evaluations(steps: int, tokens_per_step: int) -> Evaluations:
    """The evaluations of a run: at most `MAX_POINTS`, the last step's among them.

    A run of fewer than 10 steps has none. A long run reads no more than `INTERIM_EVALUATION_TOKENS` at each point.
    """
    affordable = int(MAX_SHARE * steps + 1e-9)
    if affordable < 1:
        return Evaluations(None, 0)
    interval = -(-steps // min(MAX_POINTS, affordable))
    points = -(-steps // interval)
    return Evaluations(interval, min(affordable // points, max(1, INTERIM_EVALUATION_TOKENS // tokens_per_step)))


def interim_tokens(settings: Settings, text_tokens: int) -> int:
    """The held-out tokens to ask the training loop for at each evaluation of a run.

    The loop reads every n-th batch of a text of `text_tokens` tokens, with n rounded down; this is a number of tokens
    for which it reads no more batches than planned.
    """
    planned = max(1, plan_evaluations(settings.steps, settings.tokens_per_step).batches)
    available = -(-text_tokens // settings.tokens_per_step)
    return max(1, available * settings.tokens_per_step // -(-available // planned))
