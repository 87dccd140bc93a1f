"""What a search found, as plain data for its page and convert.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoredReplacement:
    """The KL in nats per token of one layer replaced alone, with its 95 % interval over sequences."""

    layer: int
    target: str
    kl: float
    low: float
    high: float


@dataclass(frozen=True)
class FrontierPoint:
    """The best choice within a share of the axis' cost. gap: proven, as a share of predicted."""

    share: float
    predicted: float
    gap: float
    choice: list[str]


@dataclass(frozen=True)
class MeasuredChoice:
    """A whole model on text that no score read.

    choice: of each layer, "" as it is. share: of the axis' cost. kl: in nats per token. difference: to the chosen one,
    paired over sequences, with its interval. added_bits: per byte.
    """

    name: str
    choice: list[str]
    share: float
    predicted: float
    kl: float
    difference: float
    low: float
    high: float
    added_bits: float
    is_baseline: bool


@dataclass(frozen=True)
class PairCheck:
    """Measured KL of pairs against what single scores predict: median relative error with and without interactions."""

    pairs: int
    with_interactions: float
    without: float


@dataclass(frozen=True)
class SearchResults:
    """goals: as written. axis: the cost of the frontier. left_out: why a target replaces no layer. seconds: spent.

    fit_tokens, score_tokens, check_tokens: of the texts, which share nothing.
    """

    goals: list[str]
    axis: str
    targets: list[str]
    left_out: dict[str, str]
    fit_tokens: int
    score_tokens: int
    check_tokens: int
    chosen: list[str]
    scores: list[ScoredReplacement]
    pair_check: PairCheck
    frontier: list[FrontierPoint]
    measured: list[MeasuredChoice]
    evaluations: int
    seconds: float
