"""Measurements of the models of a conversion, as plain data that is saved after each model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from heddle.data.samples import RowProtocol
from heddle.lab.compare.probes import Samples, summarize_speeds
from heddle.lab.compare.results import Difference, ScoredRun, left_out, parse
from heddle.lab.compare.statistics import TEXT_SPANS, VALIDATION_WINDOWS, TextSampling, paired_difference
from heddle.lab.compare.tables import (
    PREFERRED_CONTEXT,
    format_bytes,
    format_context,
    format_difference,
    format_percent,
    format_share,
    half_width,
    value_at,
)
from heddle.lab.search.results import SearchResults
from heddle.training.evaluation.scores import FiniteScores, finite_ratio
from heddle.training.evaluation.text_recall import NeedleScores

ORIGINAL, CONVERTED, HEALED = "original", "converted", "healed"
SEARCH = "search"  # the method of a search's choice beside baselines


@dataclass(frozen=True)
class LayerError:
    """The relative error ‖converted − original‖ / ‖original‖ of one layer.

    mixer: of the mixer's output, given the original's hidden states as input. stream: of the residual stream after the
    layer, when each model reads its own. None if the two differ in shape, or one is not finite.
    """

    layer: int
    mixer: float | None
    stream: float | None


@dataclass(frozen=True)
class ModelResult:
    """The measurements of one model.

    key: identifies its weights. method: its line in the figures. architecture: the transformers class.
    state_bytes: [(context, bytes)]. windows: of the held-out text. positions: for each range of positions, of each
    window; frequencies: for each group of tokens, the most frequent first. first_spans, repeated_spans: of the spans
    that are repeated in each row. layer_errors: empty for the original, and if layers do not correspond.
    """

    name: str
    stage: str
    method: str
    source: str
    key: str
    design_key: str
    summary: str
    architecture: str
    parameters: int
    flops_per_token: float
    state_bytes: list[tuple[int, int]]
    windows: FiniteScores
    positions: list[FiniteScores]
    first_spans: FiniteScores
    repeated_spans: FiniteScores
    needles: list[NeedleScores]
    layer_errors: list[LayerError]
    frequencies: list[FiniteScores] = field(default_factory=list)  # missing in older files


@dataclass(frozen=True)
class MeasuredText:
    """The held-out text that every model reads.

    positions: the ranges [first, end) of a token's position in its document, within a window. note: what could not be
    measured, or "". bos_ids: the tokens that each row begins with (`heddle.data.samples.RowProtocol`).
    """

    name: str
    sha256: str
    sequence_length: int
    windows: int
    bytes: int
    positions: list[tuple[int, int]]
    row_length: int
    span_rows: int
    span_length: int
    needle_rows: int
    needle_length: int
    note: str = ""
    bos_ids: tuple[int, ...] = left_out(())  # missing in older files
    vocab_size: int | None = left_out()  # of the tokenizer; missing in older files


@dataclass
class ConversionResults:
    """All measurements of a conversion.

    speeds: by the key of a design, the samples of each round. warnings: sentences for the reader. search: how the
    design was chosen, if it was searched.
    """

    heddle: str
    created: str
    command: str
    source: str
    hardware: dict[str, Any]
    text: MeasuredText
    settings: dict[str, Any]
    models: list[ModelResult] = field(default_factory=list)
    speeds: dict[str, list[dict[str, Samples]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    search: SearchResults | None = field(default=None, metadata={"left_out": True})

    @property
    def original(self) -> ModelResult:
        """The model that was converted."""
        return next(model for model in self.models if model.stage == ORIGINAL)

    @property
    def converted_models(self) -> list[ModelResult]:
        """The converted and the healed models."""
        return [model for model in self.models if model.stage != ORIGINAL]


def parse_results(data: dict[str, Any]) -> ConversionResults:
    """The results that `plain` wrote. Raises pydantic's ValidationError for anything else."""
    return parse(ConversionResults, data)


# What each model of a conversion costs: its state and its speed, at contexts that all models can process.


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
    """State bytes per token: the state of a sequence of `state_context` tokens, divided by its length."""
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


# What a conversion changed: paired differences of loss and recall with intervals, and the share of the state.
#
# All models read the same windows and rows. A difference is a ratio of sums over them; its 95 % interval is a bootstrap
# over the text (`heddle.lab.compare.statistics`). It covers the sampling error of the text, not variance from the
# calibration text or from seeds.


ROUNDING = 1e-5  # bits per byte; a smaller change is float32 rounding
FixedScores = tuple[tuple[float | None, int], ...]  # FiniteScores that can be cached


def difference(
    scores: FiniteScores, reference: FiniteScores, sampling: TextSampling = VALIDATION_WINDOWS
) -> Difference:
    """`scores` minus `reference`, both on the same pieces of text: mean, low, high, resolved."""
    return _difference(tuple(scores), tuple(reference), sampling)


@lru_cache(10_000)  # a page shows most differences several times, and each is a bootstrap
def _difference(scores: FixedScores, reference: FixedScores, sampling: TextSampling) -> Difference:
    pairs = [pair for pair in zip(scores, reference, strict=True) if pair[0][1] or pair[1][1]]
    return paired_difference([_run([pair[0] for pair in pairs])], [_run([pair[1] for pair in pairs])], sampling)


def _run(scores: Sequence[tuple[float | None, int]]) -> ScoredRun:
    """The scores in the form of a run of a comparison."""
    return ScoredRun(seed=0, status="done", bits_per_byte=finite_ratio(scores), windows=scores)


def added_loss(results: ConversionResults, model: ModelResult) -> Difference:
    """Bits per byte of a model minus the original's."""
    return difference(model.windows, results.original.windows)


def added_share(results: ConversionResults, model: ModelResult) -> float | None:
    """The added loss as a share of the original's loss."""
    return share_of(added_loss(results, model).mean, finite_ratio(results.original.windows))


def describe_change(change: Difference) -> str:
    """What an interval supports: "worse", "better", "equal", "not resolved" or "not measured"."""
    if change.mean is None:
        return "not measured"
    half = half_width(change) or 0.0
    if abs(change.mean) + half < ROUNDING:
        return "equal"
    if not change.resolved:
        return "not resolved"
    return "better" if change.mean < 0 else "worse"


def converted_from(results: ConversionResults, healed: ModelResult) -> ModelResult | None:
    """The converted model that was healed: the one with the same method and design."""
    same = [
        model
        for model in results.models
        if model.stage == CONVERTED and (model.method, model.design_key) == (healed.method, healed.design_key)
    ]
    return same[0] if same and healed.stage == HEALED else None


def healed_share(results: ConversionResults, healed: ModelResult) -> float | None:
    """The share of the added loss that healing removed; None if the conversion added no resolved loss."""
    before = converted_from(results, healed)
    if before is None:
        return None
    added, left = added_loss(results, before), added_loss(results, healed)
    if describe_change(added) != "worse" or left.mean is None:
        return None
    return 1 - left.mean / (added.mean or math.nan)


def healing_change(results: ConversionResults, model: ModelResult) -> Difference:
    """Bits per byte of a healed model minus its bits per byte before; not measured for a model that was not healed."""
    before = converted_from(results, model)
    return difference([], []) if before is None else difference(model.windows, before.windows)


def harmed_models(results: ConversionResults) -> list[ModelResult]:
    """The models whose loss is higher after healing than before, or not finite."""
    return [
        model
        for model in results.models
        if model.stage == HEALED
        and (finite_ratio(model.windows) is None or describe_change(healing_change(results, model)) == "worse")
    ]


def copying_gain(model: ModelResult) -> Difference:
    """Bits per byte of a span's second occurrence minus the first's: the lower, the more is copied."""
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
    """The remaining share of the original's copying gain; None if the original's gain is not resolved."""
    original, own = copying_gain(results.original), copying_gain(model)
    if not original.resolved or original.mean is None or original.mean >= 0 or own.mean is None:
        return None
    return own.mean / original.mean


def hidden_needles(model: ModelResult) -> Sequence[NeedleScores]:
    """The scores of the rows with needles, by depth."""
    return [needle for needle in model.needles if needle.depth is not None]


def chance_accuracy(model: ModelResult) -> float | None:
    """Accuracy without the needles: what can be guessed from the query."""
    return finite_ratio(pair for needle in model.needles if needle.depth is None for pair in needle.correct)


def needle_accuracy(model: ModelResult) -> float | None:
    """Accuracy over all depths."""
    return finite_ratio(pair for needle in hidden_needles(model) for pair in needle.correct)


def needle_gain(model: ModelResult) -> Difference:
    """Accuracy with the needles minus accuracy without, over all depths, with an interval over the needles."""
    if not model.needles:
        return difference([], [])
    counts = [list(zip(*needle.correct, strict=True)) for needle in hidden_needles(model)]
    without = [pair for needle in model.needles if needle.depth is None for pair in needle.correct]
    rows: FiniteScores = [
        (math.fsum(answers[0][row] or 0 for answers in counts) / len(counts), scored)
        for row, (_, scored) in enumerate(without)
    ]
    return difference(rows, without, TEXT_SPANS)


def needle_change(results: ConversionResults, model: ModelResult) -> Difference:
    """Accuracy over all depths minus the original's, with an interval over the rows."""
    rows, reference = (
        [
            (None if any(hits is None for hits, _ in depths) else math.fsum(hits or 0 for hits, _ in depths), scored)
            for depths in zip(*(needle.correct for needle in hidden_needles(each)), strict=True)
            for scored in [sum(count for _, count in depths)]
        ]
        for each in (model, results.original)
    )
    return difference(rows, reference, TEXT_SPANS)


# The results of a conversion in sentences: how small the state can get before it hurts.


UNTRAINED = 0.9  # of the loss of a uniform guess; a model above it has hardly learned anything
RECALL_LOSS = 0.05  # of the accuracy on needles; a resolved fall by more stands beside the loss
TOLERANCE = 0.01  # of the original's loss; below it, the page says that a conversion does not hurt


def conversion_verdict(results: ConversionResults) -> list[str]:
    """The first sentence answers the page's question, the others qualify it."""
    measured = [model for model in results.converted_models if added_loss(results, model).mean is not None]
    if not measured:
        return ["No converted model has a finite loss."]
    designs = {(model.method, model.design_key) for model in measured}
    sentences = _describe_untrained(results)
    sentences += _describe_pair(results, measured) if len(designs) == 1 else _describe_sweep(results, measured)
    sentences += _describe_baselines(results)
    if harmed := [model for model in harmed_models(results) if model in measured]:
        worst = max(harmed, key=lambda model: healing_change(results, model).mean or 0.0)
        which = "the model" if len(designs) == 1 else f"{len(harmed)} of the models, most of all {worst.name}"
        amount = format_difference(healing_change(results, worst)).removeprefix("+")
        remedy = "heal for more tokens, with a lower --heal-lr, or with --heal-parameters touched"
        kept = "what was converted is kept in the folder that ends in .work"
        sentences.append(f"Healing made {which} worse, by {amount} bits per byte: {remedy}; {kept}.")
    if len(results.original.first_spans) and not copying_gain(results.original).resolved:
        sentences.append("The original hardly copies from its context, so recall says little here.")
    return sentences


def _describe_baselines(results: ConversionResults) -> list[str]:
    """A sentence that compares a search's healed choice with the best of the equally healed baselines."""
    healed = [model for model in results.models if model.stage == HEALED and finite_ratio(model.windows) is not None]
    if results.search is None or len(healed) < 2 or healed[0].method != SEARCH:
        return []
    own, *others = healed
    best = min(others, key=lambda model: (finite_ratio(model.windows) or 0.0, model.name))
    change = difference(own.windows, best.windows)
    which = f"the best of {len(others)} baselines that were healed alike" if len(others) > 1 else "the healed baseline"
    amount = f"{format_difference(change)} bits per byte: {describe_change(change)}"
    return [f"Against {which}, “{best.method}”, the healed choice of the search has {amount}."]


def _describe_untrained(results: ConversionResults) -> list[str]:
    """A sentence if the original's loss is about the loss of guessing each token uniformly."""
    text, loss = results.text, finite_ratio(results.original.windows)
    if text.vocab_size is None or loss is None:
        return []
    uniform = math.log2(text.vocab_size) * text.windows * text.sequence_length / text.bytes
    if loss < UNTRAINED * uniform:
        return []
    losses = f"{loss:.2f} bits per byte, and guessing has {uniform:.2f}"
    return [f"The original is hardly trained ({losses}), so this says little about a conversion of a trained model."]


def measured_text_sentence(results: ConversionResults) -> str:
    """The sequences that a report's losses are measured on, and how they begin: other sequences have other losses."""
    text = results.text
    return (
        f"Losses of this report: {text.windows:,} held-out sequences of {text.sequence_length:,} tokens, "
        f"{RowProtocol(tuple(text.bos_ids))}."
    )


def within_tolerance(results: ConversionResults, model: ModelResult) -> bool:
    """Whether the whole interval of the added loss is below TOLERANCE of the original's loss."""
    added, original = added_loss(results, model), finite_ratio(results.original.windows)
    if added.mean is None or original is None:
        return False
    return bool((added.mean if added.high is None else added.high) <= TOLERANCE * original)


def _describe_pair(results: ConversionResults, measured: list[ModelResult]) -> list[str]:
    """Sentences on one conversion, before and after healing."""
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
    """ "adds 0.012 ± 0.003 bits per byte (+0.5 %)", or that the loss is unchanged, or the change not resolved."""
    added, share = added_loss(results, model), added_share(results, model)
    word = describe_change(added)
    if word == "equal":
        unchanged = f"has the loss of the original on sequences of {results.text.sequence_length:,} tokens"
        return unchanged + _describe_recall(results, model)
    amount = f"{format_difference(added).removeprefix('+')} bits per byte ({format_signed_percent(share)})"
    resolved = ", which is not resolved," if word == "not resolved" else ""
    return f"adds {amount}{resolved}{_describe_recall(results, model)}".removesuffix(",")


def _describe_recall(results: ConversionResults, model: ModelResult) -> str:
    """ " and finds 40 % of the needles, the original 95 %" where accuracy fell clearly; otherwise ""."""
    change = needle_change(results, model)
    if change.mean is None or not change.resolved or change.mean > -RECALL_LOSS:
        return ""
    found, before = (format_percent(needle_accuracy(each)) for each in (model, results.original))
    return f" and finds {found} of the needles, the original {before}"


def _describe_sweep(results: ConversionResults, measured: list[ModelResult]) -> list[str]:
    """Sentences on many conversions: the smallest state that does not hurt, and the cost of the next smaller one."""
    best = best_by_state(results, measured)
    tolerated = [model for model in best if within_tolerance(results, model)]
    limit = f"{100 * TOLERANCE:g} %"
    if not tolerated:
        mildest = min(measured, key=lambda model: _added(results, model))
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


def _added(results: ConversionResults, model: ModelResult) -> float:
    mean = added_loss(results, model).mean
    return math.inf if mean is None else mean


def best_by_state(results: ConversionResults, models: list[ModelResult]) -> list[ModelResult]:
    """For each size of the state the model with the lowest loss, the smallest state first."""
    best: dict[float, ModelResult] = {}
    for model in sorted(models, key=lambda model: _added(results, model)):
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
    """ "a quarter of the state (768 B per token at 8k)"."""
    own, original = state_per_token(results, model), state_per_token(results, results.original)
    if own is None or not original:
        return "a state of unknown size"
    return f"{format_share(own, original)}{whole} ({format_bytes(own)} {per_token(results)})"


def per_token(results: ConversionResults) -> str:
    """ "per token at 8k": the context counts, because a window's state does not grow with it."""
    context = state_context(results)
    return "per token" if context is None else f"per token at {format_context(context)}"


def format_signed_percent(share: float | None) -> str:
    """A share with its sign: "+5.9 %", "−0.3 %"; None gives "–"."""
    if share is None:
        return format_percent(None)
    text = f"{100 * share:+.1f} %".replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else text[1:]
