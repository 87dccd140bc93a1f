"""What a conversion changed: paired differences of loss and recall with intervals, and the share of the state.

All models read the same windows and rows. A difference is a ratio of sums over them; its 95 % interval is a bootstrap
over the text (`heddle.analysis.comparison.statistics`). It covers the choice of text, not that of the calibration text
or of seeds.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from heddle.analysis.comparison.statistics import (
    TEXT_SPANS,
    VALIDATION_WINDOWS,
    TextSampling,
    paired_difference,
)
from heddle.analysis.conversion.costs import share_of
from heddle.analysis.conversion.results import (
    CONVERTED,
    HEALED,
    ConversionResults,
    ModelResult,
)
from heddle.training.evaluation.scores import FiniteScores, finite_ratio
from heddle.training.evaluation.text_recall import NeedleScores

ROUNDING = 1e-5  # bits per byte; a smaller change is one of float32
Difference = Mapping[str, Any]  # mean, low, high, resolved
FixedScores = tuple[tuple[float | None, int], ...]  # FiniteScores that can be cached


def difference(
    scores: FiniteScores, reference: FiniteScores, sampling: TextSampling = VALIDATION_WINDOWS
) -> Difference:
    """`scores` minus `reference`, which are of the same pieces of text: mean, low, high, resolved."""
    return _difference(tuple(scores), tuple(reference), sampling)


@lru_cache(10_000)  # a page shows most differences several times, and each is a bootstrap
def _difference(scores: FixedScores, reference: FixedScores, sampling: TextSampling) -> Difference:
    pairs = [pair for pair in zip(scores, reference, strict=True) if pair[0][1] or pair[1][1]]
    return paired_difference([_run([pair[0] for pair in pairs])], [_run([pair[1] for pair in pairs])], sampling)


def _run(scores: Sequence[tuple[float | None, int]]) -> dict[str, Any]:
    """The scores in the form of a run of a comparison."""
    return {"seed": 0, "status": "done", "bits_per_byte": finite_ratio(scores), "windows": scores}


def added_loss(results: ConversionResults, model: ModelResult) -> Difference:
    """Bits per byte of a model minus those of the original."""
    return difference(model.windows, results.original.windows)


def added_share(results: ConversionResults, model: ModelResult) -> float | None:
    """The added loss as a share of the original's loss."""
    return share_of(added_loss(results, model)["mean"], finite_ratio(results.original.windows))


def describe_change(change: Difference) -> str:
    """What an interval supports: "worse", "better", "equal", "not resolved" or "not measured"."""
    if change["mean"] is None:
        return "not measured"
    half = 0.0 if change["low"] is None else (change["high"] - change["low"]) / 2
    if abs(change["mean"]) + half < ROUNDING:
        return "equal"
    if not change["resolved"]:
        return "not resolved"
    return "better" if change["mean"] < 0 else "worse"


def converted_from(results: ConversionResults, healed: ModelResult) -> ModelResult | None:
    """The converted model that was healed: the one of the same method and design."""
    same = [
        model
        for model in results.models
        if model.stage == CONVERTED and (model.method, model.design_key) == (healed.method, healed.design_key)
    ]
    return same[0] if same and healed.stage == HEALED else None


def healed_share(results: ConversionResults, healed: ModelResult) -> float | None:
    """The share of the added loss that healing removed; None where the conversion added none that is resolved."""
    before = converted_from(results, healed)
    if before is None:
        return None
    added, left = added_loss(results, before), added_loss(results, healed)
    if describe_change(added) != "worse" or left["mean"] is None:
        return None
    return 1 - float(left["mean"]) / float(added["mean"])


def copying_gain(model: ModelResult) -> Difference:
    """Bits per byte of a span's second occurrence minus those of its first: the lower, the more is copied."""
    return difference(model.repeated_spans, model.first_spans, TEXT_SPANS)


def copying_change(results: ConversionResults, model: ModelResult) -> Difference:
    """The model's copying gain minus the original's, row by row: above 0 it copies less."""
    return difference(_gains(model), _gains(results.original), TEXT_SPANS)


def _gains(model: ModelResult) -> FiniteScores:
    return [
        (None if second is None or first is None else second - first, size)
        for (first, size), (second, _) in zip(model.first_spans, model.repeated_spans, strict=True)
    ]


def copying_share(results: ConversionResults, model: ModelResult) -> float | None:
    """What is left of the original's copying gain; None where the original gains nothing that is resolved."""
    original, own = copying_gain(results.original), copying_gain(model)
    if not original["resolved"] or original["mean"] >= 0 or own["mean"] is None:
        return None
    return float(own["mean"]) / float(original["mean"])


def hidden_needles(model: ModelResult) -> Sequence[NeedleScores]:
    """The scores of the rows with needles, by depth."""
    return [needle for needle in model.needles if needle.depth is not None]


def chance_accuracy(model: ModelResult) -> float | None:
    """The share of right answers without the needles: what can be guessed from the query."""
    return finite_ratio(pair for needle in model.needles if needle.depth is None for pair in needle.correct)


def needle_accuracy(model: ModelResult) -> float | None:
    """The share of right answers over all depths."""
    return finite_ratio(pair for needle in hidden_needles(model) for pair in needle.correct)


def needle_gain(model: ModelResult) -> Difference:
    """Right answers with the needles minus those without them, over all depths, with an interval over the needles."""
    if not model.needles:
        return difference([], [])
    counts = [list(zip(*needle.correct, strict=True)) for needle in hidden_needles(model)]
    without = [pair for needle in model.needles if needle.depth is None for pair in needle.correct]
    rows: FiniteScores = [
        (math.fsum(answers[0][row] or 0 for answers in counts) / len(counts), scored)
        for row, (_, scored) in enumerate(without)
    ]
    return difference(rows, without, TEXT_SPANS)
