"""Checking a design against every law, or some."""

from collections.abc import Iterable

from heddle.laws import LAWS, run
from heddle.model.config import ModelConfig

OPTIONS = "options_have_effect"  # takes as long as all others, since it builds the design anew for each of its fields
OTHERS = [name for name in LAWS if name != OPTIONS]


def violations_of(config: ModelConfig, names: Iterable[str] | None = None) -> list[str]:
    """The laws (default: all) that a design violates, each with its message and the design."""
    return [f"{result.name}: {result.message}\n  {config.dump()}" for result in run(config, names) if not result.passed]
