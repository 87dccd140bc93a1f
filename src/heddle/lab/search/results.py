"""The results of a search, as plain data for its page and convert.json."""

from dataclasses import dataclass

Interval = tuple[float, float]  # a mean, and half of its 95 % interval


@dataclass(frozen=True)
class ScoredReplacement:
    """The KL in nats per token of one layer replaced alone, with its 95 % interval over sequences."""

    layer: int
    target: str
    kl: float
    low: float
    high: float


@dataclass(frozen=True)
class WholeModel:
    """A whole model, measured on text that no score used.

    choice: the target of each layer, "" if unchanged. shares: of MODEL's costs, by name; share: of the axis' cost. kl,
    predicted: in nats per token. added_bits: per byte; positions, frequencies: the same for tokens in each range of
    positions, and in each group, the most frequent first; None where the text has none. recall: accuracy at each depth;
    [] unless a goal asks. decode: speed as a multiple of MODEL's; None unless a goal asks.
    """

    choice: list[str]
    share: float
    shares: dict[str, float]
    predicted: float
    kl: float
    added_bits: float
    positions: list[Interval | None]
    frequencies: list[Interval | None]
    recall: list[float]
    decode: float | None


@dataclass(frozen=True)
class FrontierPoint(WholeModel):
    """The best choice within a budget, a share of the axis' cost. gap: proven, as a share of predicted."""

    budget: float
    gap: float


@dataclass(frozen=True)
class MeasuredChoice(WholeModel):
    """A choice and its difference in KL to the chosen one, paired over sequences, with its interval."""

    name: str
    difference: float
    low: float
    high: float
    is_baseline: bool


@dataclass(frozen=True)
class TriedChoice:
    """A choice that was measured for the goals.

    measured: by goal, up to the first one that is missed, named by `missed`.
    """

    budget: float
    choice: list[str]
    measured: dict[str, str]
    missed: str


@dataclass(frozen=True)
class PairCheck:
    """Measured KL of pairs against what single scores predict: median relative error with and without interactions."""

    pairs: int
    with_interactions: float
    without: float


@dataclass(frozen=True)
class SecondText:
    """The same search on another calibration text.

    choice: the best on this text. same_layers: in how many layers it equals the best on the first text. correlation: of
    the ranks of the scores on both texts.
    """

    name: str
    tokens: int
    choice: list[str]
    same_layers: int
    correlation: float


@dataclass(frozen=True)
class RecallProbe:
    """Needles at each depth of sequences of `length` tokens. accuracy: of MODEL; guessed: without the needles."""

    length: int
    depths: list[float]
    accuracy: list[float]
    guessed: float


@dataclass(frozen=True)
class SearchResults:
    """goals: as written. axis: the cost of the frontier. left_out: why a target replaces no layer. seconds: spent.

    fit_tokens, score_tokens, check_tokens: of the texts, which share nothing. positions: ranges [first, end).
    decode_speed: of MODEL, in tokens per second.
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
    tried: list[TriedChoice]
    positions: list[tuple[int, int]]
    recall: RecallProbe | None
    decode_context: int | None
    decode_speed: float | None
    second: SecondText | None
    evaluations: int
    seconds: float
