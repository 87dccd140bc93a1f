"""What the results of a conversion say, in sentences: how small the state can get before it hurts."""

from heddle.analysis.comparison.formatting import (
    format_bytes,
    format_difference,
    format_percent,
    format_share,
)
from heddle.analysis.conversion.costs import state_per_token, state_share
from heddle.analysis.conversion.differences import (
    ROUNDING,
    added_loss,
    added_share,
    copying_gain,
    describe_change,
    healed_share,
)
from heddle.analysis.conversion.results import HEALED, ConversionResults, ModelResult
from heddle.training.evaluation.scores import finite_ratio

TOLERANCE = 0.01  # of the original's loss; below it, the page says that a conversion does not hurt


def conversion_verdict(results: ConversionResults) -> list[str]:
    """The first sentence answers the question of the page, the others qualify it."""
    measured = [model for model in results.converted_models if added_loss(results, model)["mean"] is not None]
    if not measured:
        return ["No converted model gave a finite loss."]
    designs = {(model.method, model.design_key) for model in measured}
    sentences = _describe_pair(results, measured) if len(designs) == 1 else _describe_sweep(results, measured)
    if len(results.original.first_spans) and not copying_gain(results.original)["resolved"]:
        sentences.append("The original hardly copies from its context, so recall says little here.")
    return sentences


def within_tolerance(results: ConversionResults, model: ModelResult) -> bool:
    """Whether the whole interval of the added loss is below TOLERANCE of the original's loss."""
    added, original = added_loss(results, model), finite_ratio(results.original.windows)
    if added["mean"] is None or original is None:
        return False
    return bool((added["mean"] if added["high"] is None else added["high"]) <= TOLERANCE * original)


def _describe_pair(results: ConversionResults, measured: list[ModelResult]) -> list[str]:
    """One conversion, before and after healing."""
    sentences: list[str] = []
    for model in measured:
        share = state_share(results, model)
        changes_state = share is not None and abs(share - 1) > ROUNDING
        subject = f"With {describe_state(results, model)}, the model" if changes_state else "The conversion"
        if model.stage == HEALED:
            subject = "Healed, it" if sentences else subject
        sentences.append(f"{subject} {_describe_added(results, model)}{_describe_healing(results, model)}.")
    return sentences


def _describe_healing(results: ConversionResults, model: ModelResult) -> str:
    share = healed_share(results, model)
    if share is None or not 0 < share < 1:
        return ""
    return f": healing removed {format_percent(share)} of the added loss"


def _describe_added(results: ConversionResults, model: ModelResult) -> str:
    """ "adds 0.012 ± 0.003 bits per byte (+0.5 %)", or that the loss is the same, or that no change is resolved."""
    added, share = added_loss(results, model), added_share(results, model)
    word = describe_change(added)
    if word == "equal":
        return "has the loss of the original"
    amount = f"{format_difference(added).removeprefix('+')} bits per byte ({format_signed_percent(share)})"
    return f"adds {amount}" + (", which is not resolved" if word == "not resolved" else "")


def _describe_sweep(results: ConversionResults, measured: list[ModelResult]) -> list[str]:
    """Many conversions: the smallest state that does not hurt, and what the next smaller one costs."""
    best = best_by_state(results, measured)
    tolerated = [model for model in best if within_tolerance(results, model)]
    limit = f"{100 * TOLERANCE:g} %"
    if not tolerated:
        mildest = min(measured, key=lambda model: float(added_loss(results, model)["mean"]))
        cost = describe_cost(results, mildest)
        return [f"Every conversion here adds more than {limit} to the loss, or may. The mildest: {cost}."]
    smallest = tolerated[0]
    following = _describe_next(results, best, smallest)
    if (state_share(results, smallest) or 1.0) >= 1:
        return [f"No smaller state is within {limit} of the original’s loss.", *following]
    size = describe_state(results, smallest, whole="")
    first = f"The state can shrink to {size} before the loss grows by more than {limit}"
    limit_reached = following or ["No smaller state was measured, so the limit may be lower."]
    return [f"{first}: {describe_cost(results, smallest)}.", *limit_reached]


def best_by_state(results: ConversionResults, models: list[ModelResult]) -> list[ModelResult]:
    """For each size of the state the model with the lowest loss, the smallest state first."""
    best: dict[float, ModelResult] = {}
    for model in sorted(models, key=lambda model: float(added_loss(results, model)["mean"])):
        size = state_per_token(results, model)
        if size is not None:
            best.setdefault(size, model)
    return [best[size] for size in sorted(best)]


def _describe_next(results: ConversionResults, best: list[ModelResult], smallest: ModelResult) -> list[str]:
    """A sentence on the next smaller state than `smallest`; empty if there is none."""
    smaller = best[: best.index(smallest)]
    return [f"With {describe_state(results, smaller[-1])}, {describe_cost(results, smaller[-1])}."] if smaller else []


def describe_cost(results: ConversionResults, model: ModelResult) -> str:
    """ "“heads-2” adds 0.012 ± 0.003 bits per byte (+0.5 %)"."""
    return f"“{model.name}” {_describe_added(results, model)}"


def describe_state(results: ConversionResults, model: ModelResult, whole: str = " of the state") -> str:
    """ "a quarter of the state (768 B a token)"."""
    own, original = state_per_token(results, model), state_per_token(results, results.original)
    if own is None or not original:
        return "a state of unknown size"
    return f"{format_share(own, original)}{whole} ({format_bytes(own)} a token)"


def format_signed_percent(share: float | None) -> str:
    """A share with its sign: "+5.9 %", "−0.3 %"; None gives "–"."""
    if share is None:
        return format_percent(None)
    text = f"{100 * share:+.1f} %".replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else text[1:]
