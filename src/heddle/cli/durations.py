"""Read a time that is given on the command line, the budget of a comparison, and when it stops."""

import re

from heddle.errors import ConfigError

DEFAULT_TOKENS = 100_000
SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str, option: str) -> float:
    """Seconds of a time such as 90s, 30m or 1.5h. Raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]] if match else 0.0
    if not seconds:
        raise ConfigError(f"{option} {text}: must be a time above 0, such as 90s, 30m or 2h")
    return seconds


def parse_stopping(until_resolved: float | None, budget: str | None, seeds: int) -> tuple[float | None, float | None]:
    """(the half-width at which a comparison stops, its budget in seconds); None where it has a number of seeds."""
    if until_resolved is None:
        if budget is not None:
            raise ConfigError(f"--budget {budget}: limits --until-resolved; give both, or neither")
        return None, None
    if not 0 < until_resolved < float("inf"):
        raise ConfigError(f"--until-resolved {until_resolved:g}: must be a number of bits per byte above 0")
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds}: must be at least 2 with --until-resolved, which starts with them")
    return until_resolved, None if budget is None else parse_duration(budget, "--budget")


def parse_budget(tokens: int | None, seconds: float | None, flops: float | None) -> tuple[str, float]:
    """The unit of the training budget ("tokens", "seconds" or "flops") and its amount, for each run."""
    options = {"tokens": tokens, "seconds": seconds, "flops": flops}
    budgets: dict[str, float] = {kind: value for kind, value in options.items() if value is not None}
    if len(budgets) > 1:
        flags = " and ".join(f"--{kind}" for kind in budgets)
        raise ConfigError(f"{flags}: all set the length of the training; give one of them")
    kind, value = next(iter(budgets.items()), ("tokens", float(DEFAULT_TOKENS)))
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{kind} {value:g}: must be a number above 0")
    return kind, value
