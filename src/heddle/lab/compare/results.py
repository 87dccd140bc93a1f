"""What a comparison finds, from the worker of a run to the page. `plain` and `parse` write and read it as JSON."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter

from heddle.training.evaluation.scores import FiniteScores
from heddle.training.evaluation.text_recall import TextRecallScores

T = TypeVar("T")
SCALARS = {str, int, float, bool, type(None)}  # looked for first: most values are one
_adapters: dict[Any, TypeAdapter[Any]] = {}

Curve = Sequence[tuple[int, float | None]]  # tokens, bits per byte or accuracy
Series = Sequence[tuple[int, float]]  # context, value
SpeedSeries = Sequence[tuple[int, float, float, float]]  # context, tokens per second, low, high


def left_out(default: Any = None) -> Any:
    """A field that JSON omits at its default."""
    return field(default=default, metadata={"left_out": True})


def plain(value: Any) -> Any:
    """Convert a result to JSON values."""
    if type(value) in SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((each, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {
            each.name: plain(item)
            for each, item in fields
            if not (each.metadata.get("left_out") and item == each.default)
        }
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def parse(kind: type[T], data: Any) -> T:
    """Read a result that `plain` wrote; fields that an older file lacks get their defaults."""
    if kind not in _adapters:  # building one is slow
        _adapters[kind] = TypeAdapter(kind)
    result: T = _adapters[kind].validate_python(data)
    return result


def finite(value: T) -> T:
    """The same result with None for every number that JSON cannot express."""
    result: Any = value
    if isinstance(value, float):
        result = value if math.isfinite(value) else None
    elif type(value) in SCALARS:
        pass
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        result = dataclasses.replace(value, **{name: finite(item) for name, item in values.items()})
    elif isinstance(value, Mapping):
        result = {key: finite(item) for key, item in value.items()}
    elif type(result) in (list, tuple):
        result = type(result)(map(finite, result))
    return result  # type: ignore[no-any-return]


# Statistics


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval; None where unknown."""

    mean: float | None
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> list[float]:
        """The mean and the ends that are known."""
        return [number for number in (self.mean, self.low, self.high) if number is not None]


@dataclass(frozen=True, kw_only=True)
class MeanLoss(Interval):
    """Mean bits per byte of a design. basis: which runs it is a mean of, in words."""

    basis: str = ""


@dataclass(frozen=True, kw_only=True)
class NeededRuns:
    """What an interval of ± half_width needs.

    seeds: of each design in total; None if 100 are too few. text_factor: how many times the held-out text; 1 if the
    present text is enough. seconds: of the runs that are missing.
    """

    half_width: float
    seeds: int | None
    text_factor: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Difference(Interval):
    """Bits per byte of a design minus another's.

    resolved: whether the interval excludes 0. pairs: seeds that both sides finished. final: whether it may be judged;
    None: it always may. method: how the interval was computed. If it is not resolved: tie_within, the largest
    difference that the interval allows; resolvable, the smallest difference that has 80 % power to be resolved; needs,
    what narrower intervals need.
    """

    resolved: bool = False
    pairs: int = 0
    final: bool | None = left_out()
    method: str = ""
    tie_within: float | None = left_out()
    resolvable: float | None = left_out()
    needs: Sequence[NeededRuns] | None = left_out()


@dataclass(frozen=True, kw_only=True)
class _Pair:
    design: str
    reference: str


@dataclass(frozen=True, kw_only=True)
class PairRow(Difference, _Pair):
    """The difference of `design` to `reference`."""


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    design: str
    baseline: str


@dataclass(frozen=True, kw_only=True)
class BaselineRow(Difference, _Baseline):
    """The difference of `design` to the baseline."""


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """leader: the design with the lowest loss, if any finished. pairs: one row per pair of designs.

    differences: each design minus the baseline.
    """

    leader: str | None
    pairs: Sequence[PairRow]
    differences: Sequence[BaselineRow]


# Runs


@dataclass(frozen=True, kw_only=True)
class ScoredRun:
    """What statistics read of a run. status: done, diverged or failed. windows: (bits, bytes) of each piece of text."""

    seed: int
    status: str
    message: str | None = left_out()
    bits_per_byte: float | None
    windows: Sequence[tuple[float | None, int | float]] = ()

    @property
    def seconds_in_all(self) -> float:
        """Seconds of the run; 0 if unknown."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class LengthResult:
    """A run at a multiple of the trained length. status: done or refused; message: why it was refused."""

    multiple: int
    status: str
    message: str | None
    bits_per_byte: float | None
    windows: Sequence[tuple[float | None, int | float]]


@dataclass(frozen=True, kw_only=True)
class Run(ScoredRun):
    """A training run; its numbers are None if it diverged or failed.

    seconds: of its steps; wall_seconds: of its last process. train_speed_range: quartiles, tokens per second. experts:
    the summary of each router, by path. curve: (tokens, bits per byte). loss_profile: scores by position and frequency.
    """

    train_tokens: int | None = None
    seconds: float | None = None
    train_tokens_per_second: float | None = None
    train_speed_range: tuple[float, float] | None = None
    peak_memory_bytes: float | None = None
    skipped_steps: int | None = None
    experts: Mapping[str, Mapping[str, Any]] | None = None
    curve: Curve = ()
    loss_profile: Mapping[str, Sequence[FiniteScores]] | None = None
    text_recall: TextRecallScores | None = None
    extrapolation: Sequence[LengthResult] = ()
    sample: str | None = ""
    wall_seconds: float | None = left_out()

    @property
    def seconds_in_all(self) -> float:
        """Wall-clock seconds of its last process, or else of its steps; 0 if neither is known."""
        return float(self.wall_seconds or self.seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """A design on a recall probe. accuracy: the share of correct answers. curve: (tokens, accuracy)."""

    status: str
    accuracy: float | None = None
    steps: int | None = None
    scored: int | None = None
    seconds: float | None = None
    curve: Curve = ()
    message: str | None = left_out()
    wall_seconds: float | None = left_out()


@dataclass(frozen=True, kw_only=True)
class LengthChange:
    """A design at a multiple of the trained length: mean bits per byte, and the change from 1 ×, paired by seed.

    not_finite: seeds without a finite number. refusal: why the design has no number at this multiple.
    """

    multiple: int
    bits_per_byte: float | None
    change: Difference | None
    not_finite: int
    refusal: str | None


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """A design's loss in a group of tokens, and its difference to the baseline's."""

    bits_per_byte: float | None
    difference: Difference


@dataclass(frozen=True, kw_only=True)
class RecallGain:
    """A score with and without (`control`) the text to recall, its gain, and the gain minus the baseline's."""

    value: float | None
    control: float | None
    gain: Difference
    difference: Difference


@dataclass(frozen=True, kw_only=True)
class TextRecallRow:
    """A design's recall in held-out text: correct tokens and bits per byte of needles, and of repeated spans."""

    needle: RecallGain
    needle_loss: RecallGain
    span: RecallGain


# The report


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The width of a design as given, and as trained."""

    original: int
    trained: int


@dataclass(frozen=True, kw_only=True)
class DesignFacts:
    """A design, and its costs that can be computed without training. kernels: by phase and operation.

    state_bytes: by context.
    """

    name: str
    source: str
    varied_fields: Mapping[str, str]
    width: Widths
    scaled_fields: Sequence[str] = ()
    equal_state_bytes: float | None = None
    summary: str
    parameters: int
    active_parameters: int | None
    flops_per_token: float | None
    windows: Sequence[int]
    kernels: Mapping[str, Mapping[str, Sequence[str]]]
    state_bytes: Series


@dataclass(frozen=True, kw_only=True)
class Design(DesignFacts):
    """A design and its measurements so far.

    reading_share: (context, share) of a decoded token's time in which this machine reads weights and state; the rest
    is mostly the overhead of small operations.
    """

    runs: Sequence[Run]
    bits_per_byte: MeanLoss | None
    train_tokens_per_second: float | None
    train_speed_range: tuple[float, float] | None
    peak_memory_bytes: float | None
    prefill: SpeedSeries
    decode: SpeedSeries
    recall: Mapping[str, ProbeResult]
    extrapolation: Sequence[LengthChange]
    loss_profile: Mapping[str, Sequence[ProfileRow]] | None = None
    text_recall: TextRecallRow | None = None
    reading_share: Series | None = field(default=None, metadata={"left_out": True})

    def profile(self, name: str) -> Sequence[ProfileRow]:
        """The loss in each group of "positions" or "frequencies"; empty where it was not measured."""
        return (self.loss_profile or {}).get(name, ())


@dataclass(frozen=True)
class Stage:
    """A part of a comparison: how many of its tasks are finished, of how many planned so far."""

    title: str
    finished: int
    planned: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """stop_reason: why no more runs were planned, unless the plan itself ended."""

    is_complete: bool
    stages: Sequence[Stage]
    stop_reason: str | None


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Processes that train at the same time, and threads per process."""

    count: int
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The text; its numbers are None while it is prepared. report: the corpus report.

    final_tokens: held-out tokens that each run is scored on.
    """

    name: str
    hash: str | None = None
    train_bytes: int | None = None
    train_tokens: int | None = None
    validation_bytes: int | None = None
    final_tokens: int | None = None
    vocab_size: int | None = None
    report: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The training budget of each run. kind: tokens, seconds or flops."""

    kind: str
    value: float
    batch_size: int
    sequence_length: int
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ProbeSummary:
    """A recall probe. chance: the accuracy of guessing."""

    title: str
    source: str
    question: str
    chance: float
    sequence_length: int
    steps: int
    batch_size: int
    train_tokens: int


@dataclass(frozen=True, kw_only=True)
class LeftOutProbe:
    """A recall probe that is not plotted, and why. accuracies: by design, empty if it was not trained."""

    name: str
    title: str
    reason: str
    accuracies: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class TextRecallFacts:
    """What was read to measure recall in held-out text. note: why nothing was read, or ""."""

    row_length: int
    spans: int
    needles: int
    depths: Sequence[float]
    span_length: int
    query_tokens: int
    note: str


@dataclass(frozen=True, kw_only=True)
class FrequencyGroup:
    """Tokens of about the same frequency: share of the training text, count, and the most frequent ones."""

    share: float
    tokens: int
    examples: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ProfileGroups:
    """The groups of the loss profile: ranges of positions [first, end), and tokens by frequency."""

    positions: Sequence[tuple[int, int]]
    frequencies: Sequence[FrequencyGroup]


@dataclass(frozen=True, kw_only=True)
class ExtrapolationFacts:
    """What was read at multiples of the trained length, and why less than requested (note)."""

    sequence_length: int
    multiples: Sequence[int]
    spans: int = 0
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class VariedValue:
    """A value of a varied field: its label, its number, its designs, their mean, and the difference to the baseline's.

    difference: None for the baseline's own value.
    """

    label: str
    number: float | None
    designs: Sequence[str]
    mean: float | None
    difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class VariedField:
    """A varied field. baseline: the label of the baseline's value."""

    path: str
    title: str
    baseline: str
    values: Sequence[VariedValue]


@dataclass(frozen=True, kw_only=True)
class InteractionCell:
    """A pair of values, its mean, and its interaction; None where one of the values is the baseline's."""

    values: tuple[str, str]
    mean: float | None
    interaction: Difference | None


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """Two varied fields together."""

    paths: Sequence[str]
    titles: Sequence[str]
    cells: Sequence[InteractionCell]


@dataclass(frozen=True, kw_only=True)
class Effects:
    """The effects of varied fields; empty where nothing was varied."""

    fields: Sequence[VariedField] = ()
    interactions: Sequence[Interaction] = ()


@dataclass(frozen=True, kw_only=True)
class TunedFieldReport:
    """A tuned field. added: values beyond its range that were tried too."""

    name: str
    is_number: bool
    values: Sequence[Any]
    added: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class TuningBudget:
    """runs: number of trials. whole_runs: their total length, in runs of the comparison."""

    kind: str
    value: float
    runs: int
    whole_runs: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Trials of one length. fraction: of a whole run."""

    fraction: float
    seed: int
    candidates: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial: the values of the tuned fields, how it ended, and its bits per byte."""

    rung: int
    values: Sequence[Any]
    status: str
    bits_per_byte: float | None
    train_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class TunedDesign:
    """A design's best values. open_ends: fields whose best value lies at an edge that was not widened."""

    name: str
    best: Sequence[Any]
    text: str
    bits_per_byte: float | None
    open_ends: Sequence[str]
    trials: Sequence[TrialResult]


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A run at the values that all designs share."""

    seed: int
    status: str
    bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True)
class SharedPair:
    """The difference of two designs at each design's own best values, and at shared ones, on the same seeds."""

    designs: Sequence[str]
    own: Difference
    at_shared_values: Difference


@dataclass(frozen=True, kw_only=True)
class SharedValues:
    """The best values that all designs can share. runs: by design; None while their need is undecided."""

    values: Sequence[Any]
    text: str
    runs: Mapping[str, Sequence[SharedRun]] | None
    pairs: Sequence[SharedPair]


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """The search for each design's training fields."""

    fields: Sequence[TunedFieldReport]
    budget: TuningBudget
    rungs: Sequence[Rung]
    designs: Sequence[TunedDesign]
    shared_values: SharedValues
    sentences: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunningCurve:
    """The learning curve so far of a run that is not done."""

    design: str
    seed: int
    curve: Curve


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is known about a comparison; pending numbers are None."""

    heddle: str
    created: str
    command: str
    hardware: Mapping[str, Any]
    workers: WorkerFacts
    data: DataFacts
    budget: Budget
    progress: Progress
    warnings: Sequence[str]
    baseline: str
    recall: Mapping[str, ProbeSummary]
    recall_left_out: Sequence[LeftOutProbe] = ()
    text_recall: TextRecallFacts | None = None
    loss_profile: ProfileGroups | None = None
    extrapolation: ExtrapolationFacts
    designs: Sequence[Design]
    leader: str | None
    pairs: Sequence[PairRow]
    differences: Sequence[BaselineRow]
    effects: Effects
    equal_size: str | None = None
    tuning: TuningReport | None = None
    verdict: Sequence[str] = ()
    running: Sequence[RunningCurve] | None = left_out()
