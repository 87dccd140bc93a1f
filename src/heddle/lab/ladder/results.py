"""What a ladder found: its runs, the fit, and what it predicts. `lab.compare.results` writes it as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.lab.ladder.fit import FormFit

Ends = tuple[float, float]  # of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class LadderRun:
    """A run. status: done, diverged or failed."""

    seed: int
    status: str
    message: str | None
    bits_per_byte: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """A design at a size. seeds: runs that finished. loss: their mean, with its 95 % interval."""

    width: int
    parameters: int
    flops_per_token: float
    tokens: int
    tokens_per_parameter: float
    training_flops: float
    learning_rate: float
    runs: Sequence[LadderRun]
    seeds: int
    loss: float | None
    interval: Ends | None = None


@dataclass(frozen=True, kw_only=True)
class LadderDesign:
    """A design at all its sizes. width: its own."""

    name: str
    source: str
    width: int
    rungs: Sequence[SizeResult]


@dataclass(frozen=True, kw_only=True)
class LadderData:
    """The text."""

    name: str
    hash: str
    train_tokens: int
    validation_bytes: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The fit. center: the size at which log(N / center) is 0. seed_deviation: of log loss between seeds of one size.

    correlation: of two branches of a trunk. parameters: by design, (median, low, high) of E and of the exponents.
    """

    center: float
    seed_deviation: float
    seed_degrees_of_freedom: int
    correlation: float
    forms: Sequence[FormFit]
    parameters: Mapping[str, Mapping[str, tuple[float, float, float] | None]]


@dataclass(frozen=True, kw_only=True)
class FormPrediction:
    """What one form of the fit predicts. weight: its share of the draws."""

    form: str
    loss: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The loss of a design at a size: the median, and the 95 % intervals of the curve and of a measurement.

    reason: why there is no number, or None.
    """

    design: str
    size: float
    loss: float | None = None
    curve: Ends | None = None
    measurement: Ends | None = None
    forms: Sequence[FormPrediction] = ()
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class HeldOut(Prediction):
    """The self-test: the largest size predicted from the others, and the measurement there."""

    measured: float
    within: bool


@dataclass(frozen=True, kw_only=True)
class EqualLoss:
    """The training FLOPs that a design needs for the baseline's loss at `size`, relative to the baseline's.

    low, high: None if the interval has no end between the design's smallest size and 30 times its largest; `least`
    and `most` are the ratios there. is_less: whether the smallest size has that loss already.
    """

    design: str
    baseline: str
    size: float
    ratio: float | None
    low: float | None
    high: float | None
    least: float
    most: float
    is_less: bool


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where the curves of two designs cross, in training FLOPs.

    costs: the range that was searched. better, worse, crosses: shares of the draws in which the design is better
    (worse) at every cost, or becomes so at one; None without a common cost. cost, low, high: of the first crossing
    among the draws that cross; an end is None if too many draws have no crossing.
    """

    design: str
    baseline: str
    costs: Ends
    better: float | None = None
    worse: float | None = None
    crosses: float | None = None
    cost: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class BestSize:
    """The size of a design with the lowest loss for a budget of training FLOPs, its interval, and the loss there.

    Only sizes with tokens per parameter in the trained range count: from `least` to `most`. low, high: None if the
    interval has no end between them. size: None if the best one lies outside; then `is_less` says on which side. If
    there are no such sizes, `reason` says so.
    """

    design: str
    flops: float
    least: float
    most: float
    size: float | None = None
    low: float | None = None
    high: float | None = None
    tokens: float | None = None
    loss: float | None = None
    curve: Ends | None = None
    is_less: bool | None = None
    reason: str | None = None

    @property
    def tokens_per_parameter(self) -> float | None:
        """Tokens per parameter of the best size, if there is one."""
        return None if self.size is None or self.tokens is None else self.tokens / self.size


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of a design's curve with its 95 % interval."""

    parameters: float
    training_flops: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class EstimatedRun:
    """A run that is planned in a dry run. learning_rate: its peak. seconds: of its steps."""

    design: str
    parameters: int
    width: int
    tokens: int
    learning_rate: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LadderEstimate:
    """The result of a dry run: each run once, seeds per run, runs at a time, and seconds of all that are left."""

    runs: Sequence[EstimatedRun]
    seeds: int
    workers: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """The report of a ladder after its runs have ended.

    target_note: why the target is smaller than what was asked for, if so. reason: why nothing could be fitted, if so.
    """

    heddle: str
    created: str
    command: str
    hardware: Mapping[str, Any]
    data: LadderData
    settings: Mapping[str, Any]
    law: str
    sizes: Sequence[float]
    seeds: int
    share_irreducible: bool
    baseline: str
    target: float
    target_tokens: float
    target_flops: float
    target_note: str | None = None
    tokens_per_parameter: float
    warnings: Sequence[str] = ()
    designs: Sequence[LadderDesign]
    reason: str | None = None
    fit: FitResult | None = None
    predictions: Sequence[Prediction] = ()
    best_sizes: Sequence[BestSize] = ()
    equal_loss: Sequence[EqualLoss] = ()
    crossings: Sequence[Crossing] = ()
    held_out: Sequence[HeldOut] = ()
    curves: Mapping[str, Sequence[CurvePoint]]
    verdict: Sequence[str] = ()
