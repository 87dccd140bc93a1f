"""What a search is asked for: goals such as `state@32k=25%`, and layers that stay."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from heddle.errors import ConfigError
from heddle.model.config import ModelConfig

SCORE_TOKENS, CHECK_TOKENS = 2**12, 2**14  # at most
FLOPS_LENGTH = 2048  # where no goal names a length
GOAL = re.compile(
    r"(state@(\d+)(k?)|flops|parameters|quality)(?:(?:<=|=)\+?(\d*\.?\d+)(%?))?"  # cost, length, k, limit, percent
)
EXAMPLE = "state@32k=25%, flops=80%, parameters=90% or quality<=0.02"


@dataclass(frozen=True)
class Goal:
    """A limit of a cost or of quality. limit: a share of MODEL's cost, or added bits per byte; None: the least.

    cost: as in `costs_of`, or "quality".
    """

    text: str
    cost: str
    limit: float | None


def parse_goals(texts: Sequence[str]) -> list[Goal]:
    """Read goals such as `state@32k=25%`. Raises ConfigError."""
    found = [(text, GOAL.fullmatch(text)) for text in texts]
    for text, match in found:
        if match is None:
            raise ConfigError(f"--search {text}: is not a goal; write {EXAMPLE}")
    lengths = [int(m[2]) * (1024 if m[3] else 1) for _, m in found if m is not None and m[2]]
    if not all(lengths):
        raise ConfigError(f"--search {' '.join(texts)}: a context of 0 tokens has no state; write {EXAMPLE}")
    goals = [_goal(text, match, max(lengths, default=FLOPS_LENGTH)) for text, match in found if match is not None]
    costs = [goal.cost for goal in goals]
    if len(set(costs)) < len(costs):
        raise ConfigError(f"--search {' '.join(texts)}: two goals limit the same; give one of them")
    if costs == ["quality"]:
        raise ConfigError(f"--search {texts[0]}: says nothing to save; add another goal, such as state@32k")
    if goals and "quality" not in costs and all(goal.limit is None for goal in goals):
        raise ConfigError(f"--search {texts[0]}: has no limit; write {EXAMPLE}")
    return goals


def _goal(text: str, match: re.Match[str], longest: int) -> Goal:
    limit = None if match[4] is None else float(match[4]) / (100 if match[5] else 1)
    if match[1] == "quality":
        if limit is None or match[5]:
            raise ConfigError(f"--search {text}: needs added bits per byte; write quality<=0.02")
        return Goal(text, "quality", limit)
    if limit is not None and not 0 < limit <= 1:
        raise ConfigError(f"--search {text}: is not a share of MODEL's; write {EXAMPLE}")
    length = longest if match[2] is None else int(match[2]) * (1024 if match[3] else 1)
    cost = match[1].split("@")[0]
    return Goal(text, cost if cost == "parameters" else f"{cost}@{length}", limit)


def search_tokens(calibration_tokens: int) -> int:
    """The tokens that a search reads: to calibrate on, and others for scores and for checks of whole models."""
    return calibration_tokens + min(SCORE_TOKENS, calibration_tokens // 2) + min(CHECK_TOKENS, calibration_tokens)


def kept_layers(text: str | None, design: ModelConfig) -> tuple[int, ...]:
    """`0,5` -> (0, 5). Raises ConfigError for anything but layers of the design."""
    try:
        layers = tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--keep {text}: is not a list of layers; write their numbers, such as 0,5") from None
    if wrong := [layer for layer in layers if not 0 <= layer < design.depth]:
        raise ConfigError(f"--keep {text}: the model has layers 0 to {design.depth - 1}, and no {wrong[0]}")
    return layers
