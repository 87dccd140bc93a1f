"""Read a time that is given on the command line, and when a comparison stops."""

import re

from heddle.errors import ConfigError

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
