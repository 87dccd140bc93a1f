"""What each model of a conversion costs: its state and its speed, at contexts that all models can process."""

from heddle.analysis.comparison.lookup import PREFERRED_CONTEXT, value_at
from heddle.analysis.comparison.speed import summarize_speeds
from heddle.analysis.conversion.results import ConversionResults, ModelResult

SpeedRows = list[tuple[int, float, float, float]]  # context, tokens per second, low, high


def share_of(part: float | None, whole: float | None) -> float | None:
    """`part` / `whole`; None where either is missing or the whole is 0."""
    return None if part is None or not whole else part / whole


def state_context(results: ConversionResults) -> int | None:
    """The context at which states are compared: 8192, or the longest that all models can process."""
    contexts = [{context for context, _ in model.state_bytes} for model in results.models]
    common = set.intersection(*contexts) if contexts else set()
    return PREFERRED_CONTEXT if PREFERRED_CONTEXT in common else max(common, default=None)


def state_per_token(results: ConversionResults, model: ModelResult) -> float | None:
    """State bytes a token: those of a text as long as `state_context`, divided by its tokens."""
    context = state_context(results)
    return share_of(value_at(model.state_bytes, context), context)


def state_share(results: ConversionResults, model: ModelResult) -> float | None:
    """The state as a share of the original's."""
    return share_of(state_per_token(results, model), state_per_token(results, results.original))


def speeds_of(results: ConversionResults, model: ModelResult, operation: str) -> SpeedRows:
    """The speeds of prefill or decode over the context; empty where they were not measured."""
    rounds = results.speeds.get(model.design_key, [])
    return summarize_speeds(rounds)[operation] if rounds else []


def decode_context(results: ConversionResults) -> int | None:
    """The longest context at which all models were measured."""
    contexts = [{row[0] for row in speeds_of(results, model, "decode")} for model in results.models]
    return max(set.intersection(*contexts), default=None) if contexts else None
