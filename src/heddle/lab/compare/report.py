"""The report of a comparison as plain data: complete at the end, partial after each task until then."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations, product
from statistics import median_high
from typing import Any

import numpy as np
import torch

from heddle import __version__
from heddle.errors import ConfigError
from heddle.lab.compare.equal_size import parse_state_context
from heddle.lab.compare.plan import DesignEntry, plan_warnings, short_titles
from heddle.lab.compare.probes import (
    AUTO,
    Samples,
    TaskChoice,
    busy_warning,
    overhead_warning,
    summarize_abilities,
    summarize_speeds,
    window_sentences,
)
from heddle.lab.compare.results import (
    BaselineRow,
    Budget,
    Curve,
    Design,
    DesignFacts,
    Difference,
    Effects,
    Interaction,
    InteractionCell,
    MeanLoss,
    NeededRuns,
    PairReport,
    PairRow,
    ProbeResult,
    ProfileGroups,
    Progress,
    Report,
    Run,
    RunningCurve,
    ScoredRun,
    Series,
    Stage,
    TextRecallFacts,
    VariedField,
    VariedValue,
    Widths,
    WorkerFacts,
)
from heddle.lab.compare.statistics import (
    ALPHA,
    NO_PAIR,
    VALIDATION_WINDOWS,
    Level,
    PairStatistics,
    adjusted_means,
    describe_method,
    describe_unpaired,
    finished_runs,
    fixed_level,
    grown_statistics,
    mean_bits_per_byte,
    moderated_degrees,
    pair_statistics,
    paired_difference,
    pooling_weight,
    t_quantile,
    widest,
)
from heddle.lab.compare.tables import mean_loss
from heddle.lab.compare.tasks import Comparison
from heddle.lab.compare.text_profile import (
    data_facts,
    describe_text_recall,
    extrapolation_facts,
    length_changes,
    profile_rows,
    recall_in_text,
)
from heddle.lab.compare.tuning import Tuning, tuning_report
from heddle.lab.compare.verdict import (
    anytime_level,
    need_for,
    round_widths_below,
    smallest_resolvable,
    verdict_sentences,
)
from heddle.model.config import ModelConfig
from heddle.model.size import kernel_choices, size, state_bytes, summarize_design
from heddle.session import dtype_of

# The pairs of designs: differences with simultaneous intervals, and what would resolve the open ones.


@dataclass(frozen=True)
class Judging:
    """How a report judges its pairs.

    is_anytime: whether the number of seeds depended on results, so that intervals must hold at every number of seeds.
    is_final: whether all planned runs are finished; until then a fixed comparison resolves nothing. half_width: what
    the user asked for. workers: runs at the same time. earlier_designs: the designs before each addition of others.
    """

    is_anytime: bool = False
    is_final: bool = True
    half_width: float | None = None
    workers: int = 1
    earlier_designs: Sequence[Sequence[str]] = ()

    @property
    def level(self) -> Level:
        """The nominal level at a number of seeds."""
        return anytime_level if self.is_anytime else fixed_level


def pair_report(runs: Mapping[str, Sequence[ScoredRun]], baseline: str, judging: Judging | None = None) -> PairReport:
    """All pairs of designs with simultaneous 95 % intervals, in the order of the designs' losses."""
    judging = judging or Judging()
    statistics, *_ = candidates = grown_statistics(runs, judging.earlier_designs)
    effects = statistics.effects
    order = sorted(range(len(effects)), key=lambda design: (math.isnan(effects[design]), effects[design], design))
    names = statistics.names

    def row(design: int, reference: int) -> dict[str, Any]:
        return vars(_difference(candidates, names[design], names[reference], runs, judging))

    reference = names.index(baseline)
    return PairReport(
        leader=None if statistics.leader is None else names[statistics.leader],
        pairs=[
            PairRow(design=names[design], reference=names[other], **row(design, other))
            for position, design in enumerate(order)
            for other in order[position + 1 :]
        ],
        differences=[
            BaselineRow(design=name, baseline=baseline, **row(design, reference))
            for design, name in enumerate(names)
            if design != reference
        ],
    )


def _difference(
    candidates: Sequence[PairStatistics], name: str, other: str, runs: Mapping[str, Sequence[ScoredRun]],
    judging: Judging,
) -> Difference:  # fmt: skip
    statistics, design, reference = widest(candidates, name, other, judging.level)
    seeds = int(statistics.seeds[design, reference])
    if not seeds:
        return Difference(mean=None, final=judging.is_final, method=NO_PAIR)
    mean = float(statistics.mean[design, reference])
    half = statistics.half_width(design, reference, judging.level)
    has_interval = not math.isnan(half)
    resolved = has_interval and half < abs(mean) and judging.is_final
    row = Difference(
        mean=mean,
        low=mean - half if has_interval else None,
        high=mean + half if has_interval else None,
        resolved=resolved,
        pairs=seeds,
        final=judging.is_final,
        method=_method(statistics, design, reference, runs, judging),
    )
    if resolved or not has_interval:
        return row
    seconds = [_mean_seconds(runs[statistics.names[index]]) for index in (design, reference)]
    return replace(
        row,
        tie_within=abs(mean) + half,
        resolvable=smallest_resolvable(statistics, design, reference, judging.level),
        needs=_needs(statistics, design, reference, half, judging, sum(seconds) / judging.workers),
    )


def _needs(
    statistics: PairStatistics, design: int, reference: int, half: float, judging: Judging, seconds: float
) -> list[NeededRuns]:
    """What narrower intervals need, if the comparison grows in place. seconds: of one run of both designs."""
    widths = round_widths_below(half)
    if judging.half_width is not None and judging.half_width < half:
        widths = sorted({*widths, judging.half_width}, reverse=True)
    needs = (need_for(statistics, design, reference, width, anytime_level, seconds) for width in widths)
    return [need for need in needs if need is not None]


def _mean_seconds(runs: Sequence[ScoredRun]) -> float:
    """The mean time of a design's runs."""
    return sum(run.seconds_in_all for run in runs) / len(runs) if runs else 0.0


def _method(
    statistics: PairStatistics, design: int, reference: int, runs: Mapping[str, Sequence[ScoredRun]], judging: Judging
) -> str:
    """How the interval was computed, as sentences."""
    names, seeds = statistics.names, int(statistics.seeds[design, reference])
    has_text = not math.isnan(statistics.text_error[design, reference])
    method = describe_method(seeds, has_text, VALIDATION_WINDOWS, len(names))
    if len(names) < len(runs):
        method += " Designs that were added later do not narrow it."
    if judging.is_anytime and seeds > 1:
        method += " It holds at whatever number of seeds the comparison stops."
    sides = [runs[names[index]] for index in (design, reference)]
    given, finished = (
        set.intersection(*({run.seed for run in side} for side in chosen))
        for chosen in (sides, map(finished_runs, sides))
    )
    # a seed that only one side was given is not a failure
    return method + describe_unpaired(sorted(given - finished))


# Effects of varied fields on bits per byte: means over the other fields, paired differences, and interactions.
#
# The effect of a value is the difference between its designs and those with the baseline's value. Each design is paired
# with the one that is equal in every other field, on the same seed. For each seed the pairs are averaged, so the
# interval covers seed variance and sampling error of the text, but no other choice of the other fields. The interaction
# of two fields is what both changes together do beyond the sum of each alone:
#
#     (y[a, b] − y[a₀, b]) − (y[a, b₀] − y[a₀, b₀])       where a₀, b₀ are the baseline's values
#
# With one varied field the differences are the designs' own. With several, the rows of all fields and interactions hold
# at once: Student's t at the level 1 − 0.95^(1/rows) (Šidák 1967), with a spread estimated as in `pair_statistics`.


FieldLabels = Mapping[str, str]  # the value of each varied field, as its label


@dataclass(frozen=True)
class _Rows:
    """All rows of a report, judged at once. differences: of the only varied field, by design.

    candidates: statistics of all designs, and of the designs before each addition of others.
    """

    designs: Sequence[Design]
    base: FieldLabels
    judging: Judging
    candidates: Sequence[PairStatistics]
    count: int
    differences: Mapping[str, Difference]

    def half_width(self, contrast: PairStatistics, parts: float, names: Set[str]) -> tuple[float | None, bool]:
        """Half of the interval of a contrast between sums of designs; None where there is none.

        contrast: statistics of its two sides as if they were designs; parts: the sum of its squared weights. names: its
        designs; designs that were added later do not narrow it, as in `widest`. Also returns whether they would have.
        """
        halves = [self._half_width(each, contrast, parts) for each in self.candidates if names <= {*each.names}]
        widest = max(halves, key=lambda half: half or 0.0)
        return widest, widest != halves[0]

    def _half_width(self, statistics: PairStatistics, contrast: PairStatistics, parts: float) -> float | None:
        seeds = int(contrast.seeds[0, 1])
        text = contrast.text_error[0, 1] * self._critical(ALPHA, contrast.text_degrees)
        if seeds < 2:
            return None if math.isnan(text) else float(text)
        weight = float(pooling_weight(seeds))
        own, designs = float(contrast.variance[0, 1]), len(statistics.names)
        variance = weight * own + (1 - weight) * parts * statistics.run_variance
        degrees = float(moderated_degrees(designs, seeds, statistics.pooled_degrees))
        seed = self._critical(self.judging.level(seeds), degrees) * math.sqrt(variance / seeds)
        return math.hypot(seed, 0.0 if math.isnan(text) else text)

    def _critical(self, alpha: float, degrees: float) -> float:
        return math.nan if math.isnan(degrees) else t_quantile((1 - alpha) ** (1 / self.count), degrees)


def field_effects(designs: Sequence[Design], baseline: str, judging: Judging | None = None) -> Effects:
    """The effects from the designs' `varied_fields` and `runs`."""
    paths = list(dict.fromkeys(path for design in designs for path in design.varied_fields))
    title_of = short_titles(paths)
    base = next(design.varied_fields for design in designs if design.name == baseline)
    labels_of = {path: list(dict.fromkeys(design.varied_fields[path] for design in designs)) for path in paths}
    varied = [path for path in paths if len(labels_of[path]) > 1]
    if not varied:
        return Effects()
    judging, runs = judging or Judging(), {design.name: design.runs for design in designs}
    candidates, differences = grown_statistics(runs, judging.earlier_designs), dict[str, Difference]()
    if len(varied) == 1:
        others = (name for name in runs if name != baseline)
        differences = {name: _difference(candidates, name, baseline, runs, judging) for name in others}
    changes = [len(labels_of[path]) - 1 for path in varied]
    count = sum(changes) + sum(first * second for first, second in combinations(changes, 2))
    rows = _Rows(designs, base, judging, candidates, count, differences)
    fields = [
        VariedField(
            path=path,
            title=title_of[path],
            baseline=base[path],
            values=[_value_effect(rows, path, label) for label in labels_of[path]],
        )
        for path in varied
    ]
    interactions = [
        Interaction(
            paths=list(pair),
            titles=[title_of[path] for path in pair],
            cells=[
                _interaction_cell(rows, dict(zip(pair, labels, strict=True)))
                for labels in product(*(labels_of[path] for path in pair))
            ],
        )
        for pair in combinations(varied, 2)
    ]
    return Effects(fields=fields, interactions=interactions)


def parse_number(label: str) -> float | None:
    """The finite number that a label spells, or None."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value_effect(rows: _Rows, path: str, label: str) -> VariedValue:
    with_value = _with_labels(rows.designs, {path: label})
    reference = _with_labels(rows.designs, {path: rows.base[path]})
    difference = None
    if label != rows.base[path]:
        if rows.differences and len(with_value) == 1:
            difference = rows.differences[with_value[0].name]
        else:
            difference = _contrast(rows, [with_value], [reference])
    return VariedValue(
        label=label,
        number=parse_number(label),
        designs=[design.name for design in with_value],
        mean=_mean(with_value),
        difference=difference,
    )


def _interaction_cell(rows: _Rows, labels: FieldLabels) -> InteractionCell:
    (first, first_label), (second, second_label) = labels.items()
    designs, base = rows.designs, rows.base
    both = _with_labels(designs, labels)
    interaction = None
    if first_label != base[first] and second_label != base[second]:
        neither = _with_labels(designs, {first: base[first], second: base[second]})
        first_alone = _with_labels(designs, {first: first_label, second: base[second]})
        second_alone = _with_labels(designs, {first: base[first], second: second_label})
        interaction = _contrast(rows, [both, neither], [first_alone, second_alone])
    return InteractionCell(values=(first_label, second_label), mean=_mean(both), interaction=interaction)


def _with_labels(designs: Sequence[Design], labels: FieldLabels) -> list[Design]:
    """The designs with these values; the other fields come in the same order for every choice of values."""
    return [design for design in designs if labels.items() <= design.varied_fields.items()]


def _mean(designs: Sequence[Design]) -> float | None:
    means = [mean for mean in map(mean_loss, designs) if mean is not None]
    return float(np.mean(means)) if means else None


def _contrast(rows: _Rows, plus: Sequence[Sequence[Design]], minus: Sequence[Sequence[Design]]) -> Difference:
    """The paired difference between two sums of groups of designs, averaged over the other fields.

    The designs at one index of all groups are equal in the other fields; without one of their runs the seed is left
    out for that index.
    """
    groups = [[{run.seed: run for run in finished_runs(design.runs)} for design in group] for group in (*plus, *minus)]
    seeds = sorted({run.seed for group in (*plus, *minus) for design in group for run in design.runs})
    plus_runs: list[ScoredRun] = []
    minus_runs: list[ScoredRun] = []
    count, missing = len(groups[0]), 0
    for seed in seeds:
        complete = [index for index, runs in enumerate(zip(*groups, strict=True)) if all(seed in run for run in runs)]
        missing += count - len(complete)
        if complete:
            averages = [_average([group[index][seed] for index in complete]) for group in groups]
            plus_runs.append(_sum_as_run(seed, averages[: len(plus)]))
            minus_runs.append(_sum_as_run(seed, averages[len(plus) :]))
    difference = paired_difference(plus_runs, minus_runs)
    method = difference.method
    if rows.count > 1:
        method += f" It holds for all {rows.count} rows of the varied fields at once."
    if difference.mean is not None:
        sides = pair_statistics({"plus": plus_runs, "minus": minus_runs})
        names = {design.name for group in (*plus, *minus) for design in group}
        half, is_kept_wide = rows.half_width(sides, (len(plus) + len(minus)) / count, names)
        if is_kept_wide:
            method += " Designs that were added later do not narrow it."
        mean = difference.mean
        difference = replace(
            difference,
            low=None if half is None else mean - half,
            high=None if half is None else mean + half,
            resolved=half is not None and half < abs(mean) and rows.judging.is_final,
        )
    if count > 1:
        method += f" Averaged over {count} choices of the other fields."
    if missing:
        method += f" Left out, because a design did not finish: {missing} of {count * len(seeds)} pairs."
    return replace(difference, final=rows.judging.is_final, method=method)


def _average(runs: Sequence[ScoredRun]) -> tuple[float, Any]:
    """Bits per byte and the table of validation windows, averaged over runs of one seed; None without tables."""
    tables = [run.windows for run in runs]
    table = np.mean(np.asarray(tables, dtype=np.float64), axis=0) if all(tables) else None
    return float(np.mean([run.bits_per_byte for run in runs])), table


def _sum_as_run(seed: int, averages: Sequence[tuple[float, Any]]) -> ScoredRun:
    """The sum of averages in the form of a run; each window keeps its bytes."""
    tables = [table for _, table in averages]
    windows: list[Any] = []
    if all(table is not None for table in tables):
        windows = np.stack([sum(table[:, 0] for table in tables), tables[0][:, 1]], axis=1).tolist()
    return ScoredRun(seed=seed, status="done", bits_per_byte=sum(bits for bits, _ in averages), windows=windows)


# What a running comparison has so far, and what is pending.


@dataclass
class Results:
    """The results of each design by its name.

    speed_rounds, probes: how many are planned. facts: costs that need no training. steps: training steps by design, as
    far as they are known. pending: (design, seed) of planned runs without a result. speeds: the samples of each round.
    recall: results by probe. task_choices: the recall tasks, once they are chosen. loss_groups: of the loss profile.
    stop_reason: why no more runs were planned, unless the plan itself ended. tuning: the search for training fields.
    shared_runs: runs at values that all designs share, as in `tuning_report`. running: learning curves so far, by
    (design, seed). is_anytime, earlier_designs: as in `Judging`.
    """

    names: Sequence[str]
    speed_rounds: int
    probes: int
    facts: dict[str, DesignFacts] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(init=False)
    speeds: dict[str, list[dict[str, Samples]]] = field(init=False)
    recall: dict[str, dict[str, ProbeResult]] = field(init=False)
    pending: list[tuple[str, int]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    task_choices: list[TaskChoice] = field(default_factory=list)
    loss_groups: ProfileGroups | None = None
    is_complete: bool = False
    stop_reason: str | None = None
    is_anytime: bool = False
    earlier_designs: Sequence[Sequence[str]] = ()
    tuning: Tuning | None = None
    shared_runs: dict[str, list[Run]] | None = None
    running: dict[tuple[str, int], Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = {name: [] for name in self.names}
        self.speeds = {name: [] for name in self.names}
        self.recall = {name: {} for name in self.names}

    def add_run(self, name: str, run: Run) -> None:
        """Add a finished run; the runs of a design are in the order of their seeds."""
        self.runs[name] = sorted([*self.runs[name], run], key=lambda run: run.seed)
        self.pending = [pair for pair in self.pending if pair != (name, run.seed)]

    def comparable_runs(self, name: str) -> list[Run]:
        """The runs of a design on seeds that are pending for no design: a mean over other seeds misleads."""
        unfinished = {seed for _, seed in self.pending}
        return [run for run in self.runs[name] if run.seed not in unfinished]

    @property
    def finished_runs(self) -> int:
        """How many runs have ended, failed ones included."""
        return sum(map(len, self.runs.values()))

    def stages(self) -> list[Stage]:
        """The stages in their order, those without tasks left out."""
        designs = len(self.names)
        trials = [] if self.tuning is None else [*self.tuning.results, *self.tuning.state.pending]
        stages = [
            Stage("tuning runs", 0 if self.tuning is None else len(self.tuning.results), len(trials)),
            Stage("training runs", self.finished_runs, self.finished_runs + len(self.pending)),
            Stage("speed measurements", sum(map(len, self.speeds.values())), self.speed_rounds * designs),
            Stage("recall tests", sum(map(len, self.recall.values())), self.probes * designs),
        ]
        return [stage for stage in stages if stage.planned]


STATE_CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1k … 128k
SHARED_OPERATIONS = ("linear", "rms_norm", "rotary", "swiglu")  # in every layer, not only in its mixer


def comparison_report(comparison: Comparison, results: Results) -> Report:
    """The report on what is finished. Pending numbers are None, and the verdict then says "So far".

    While runs are pending, designs are compared on the seeds that all of them have finished.
    """
    plan, corpus, workers = comparison.plan, comparison.corpus, comparison.workers
    baseline = plan.baseline or plan.entries[0].name
    comparable = {name: results.comparable_runs(name) for name in results.names}
    multiples = comparison.extrapolation.multiples
    adjusted = adjusted_means(comparable)
    designs = [_design(name, comparable, baseline, results, multiples, adjusted.get(name)) for name in results.names]
    designs = [replace(design, reading_share=_reading_shares(comparison, results, design)) for design in designs]
    judging = Judging(
        results.is_anytime, not results.pending, plan.until_resolved, workers.total, results.earlier_designs
    )
    pairs = pair_report(comparable, baseline, judging)
    drawn, left_out = summarize_abilities(results.task_choices, results.recall, AUTO in plan.recall_probes)
    report = Report(
        heddle=__version__,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=comparison.command,
        hardware=comparison.runtime.describe_workers(comparison.workers.threads) | {"torch": torch.__version__},
        workers=WorkerFacts(count=workers.total, threads=workers.threads or comparison.runtime.threads),
        data=data_facts(plan.data, corpus, comparison.final_tokens),
        budget=Budget(
            kind=plan.budget_kind,
            value=plan.budget_value,
            batch_size=plan.batch_size,
            sequence_length=plan.sequence_length,
            seeds=list(plan.seeds),
        ),
        progress=Progress(
            is_complete=results.is_complete,
            stages=results.stages(),
            stop_reason=results.stop_reason,
        ),
        warnings=_warnings(comparison, results, designs),
        baseline=baseline,
        recall=drawn,
        recall_left_out=left_out,
        text_recall=_text_recall(comparison),
        loss_profile=results.loss_groups,
        extrapolation=extrapolation_facts(comparison.extrapolation, corpus),
        designs=designs,
        leader=pairs.leader,
        pairs=pairs.pairs,
        differences=pairs.differences,
        effects=field_effects(designs, baseline, judging),
        equal_size=plan.equal_size,
        tuning=None
        if results.tuning is None or results.tuning.state.pending
        else tuning_report(results.tuning, results.runs, results.shared_runs),
        running=[
            RunningCurve(design=name, seed=seed, curve=curve)
            for (name, seed), curve in results.running.items()
            if curve and (name, seed) in results.pending
        ]
        or None,
    )
    all_runs = [replace(design, runs=results.runs[design.name]) for design in designs]  # so far the comparable ones
    warnings = [*report.warnings, *window_sentences(report)]
    return replace(report, verdict=_verdict(report, results), designs=all_runs, warnings=warnings)


def _text_recall(comparison: Comparison) -> TextRecallFacts | None:
    """What is read to measure recall in the held-out text."""
    if comparison.corpus is None or not comparison.text_recall_rows:
        return None
    return describe_text_recall(comparison.corpus, comparison.plan.sequence_length, comparison.text_recall_rows)


def _verdict(report: Report, results: Results) -> list[str]:
    """The sentences of the verdict; while runs are pending, the first says how many are done."""
    if not results.pending:
        return verdict_sentences(report)
    planned = results.finished_runs + len(results.pending)
    if not results.finished_runs:
        return [f"Costs are below; losses appear as runs finish: 0 of {planned} are done."]
    count = f"{results.finished_runs} of {planned} runs are done"
    if not all(results.comparable_runs(name) for name in results.names):
        return [f"{count}; designs are compared once each has finished the same seed."]
    first, *others = verdict_sentences(report)
    return [f"So far ({count}): {first}", *others]


ADDED_SEEDS = "Seeds were added to a finished comparison: each interval holds at any number of seeds, and is wider."


def _warnings(comparison: Comparison, results: Results, designs: Sequence[Design]) -> list[str]:
    """Caveats, from the tokens that each run trains on or is planned to."""
    plan, corpus = comparison.plan, comparison.corpus
    trained_tokens = {}
    for name in results.names:
        planned = results.steps.get(name, 0) * plan.tokens_per_step
        is_done = results.runs[name] and not results.pending
        trained = max((run.train_tokens or 0 for run in results.runs[name]), default=0)
        trained_tokens[name] = trained if is_done else planned
    parameters = {design.name: design.parameters for design in designs}
    available = sum(trained_tokens.values()) if corpus is None else sum(len(file) for file in corpus.train)
    notes = "; ".join(sentence for _, sentence in plan.budget_notes)
    chosen = [f"Chosen to fit the time budget: {notes}."] if notes else []
    if results.is_anytime and plan.until_resolved is None:
        chosen.append(ADDED_SEEDS)
    expected = plan_warnings(plan, parameters, trained_tokens, available)
    return [*chosen, *expected, *overhead_warning(designs), *busy_warning(designs)]


def _reading_shares(comparison: Comparison, results: Results, design: Design) -> Series | None:
    """At each context length, the time to read weights and state as a share of a decode step."""
    samples = [sample for speeds in results.speeds[design.name] for sample in speeds.get("read", ())]
    rates = [rate for _, of_round in samples for rate in of_round]
    if not rates:
        return None
    config = comparison.config(next(entry for entry in comparison.plan.entries if entry.name == design.name))
    dtype = dtype_of(comparison.plan.precision)
    weights = dtype.itemsize * (design.active_parameters or design.parameters)
    return [
        (context, min(1.0, (weights + state_bytes(config, context, dtype=dtype)) * speed / median_high(rates)))
        for context, speed, _, _ in design.decode
    ]


def design_facts(comparison: Comparison, entry: DesignEntry) -> DesignFacts:
    """A design and its costs, as far as they need no training; with the vocabulary size known so far."""
    plan, config = comparison.plan, comparison.config(entry)
    try:
        model_size = size(config, plan.sequence_length)
    except ConfigError as error:  # its learned positions are shorter than the training sequence
        raise ConfigError(f"{entry.name}: {error}") from None
    dtype = dtype_of(plan.precision)
    equal_context = parse_state_context(plan.equal_size or "", plan.sequence_length)
    mixers = [layer.mixer for _, layer in config.expand() if layer.mixer is not None]
    return DesignFacts(
        name=entry.name,
        source=entry.source,
        varied_fields=dict(entry.varied_fields),
        width=Widths(original=entry.original_width or config.width, trained=config.width),
        scaled_fields=list(entry.scaled_fields),
        equal_state_bytes=None if equal_context is None else state_bytes(config, equal_context, dtype=dtype),
        summary=summarize_design(config, model_size),
        parameters=model_size.parameters,
        active_parameters=model_size.active_parameters,
        flops_per_token=model_size.flops_per_token,
        windows=sorted({window for mixer in mixers for window in mixer.windows}),
        kernels=_kernels(config, plan.sequence_length, dtype, comparison.runtime.device),
        state_bytes=[(context, state_bytes(config, context, dtype=dtype)) for context in STATE_CONTEXTS],
    )


def _design(
    name: str, comparable: Mapping[str, Sequence[Run]], baseline: str, results: Results, multiples: Sequence[int],
    adjusted: float | None,
) -> Design:  # fmt: skip
    """The facts of a design and its measurements so far, on its comparable runs."""
    runs, own, reference = results.runs[name], comparable[name], comparable[baseline]
    memory = [run.peak_memory_bytes for run in runs if run.status == "done" and run.peak_memory_bytes is not None]
    speeds = summarize_speeds(results.speeds[name])
    training_speed = next(iter(speeds["train"]), None)
    return Design(
        **vars(results.facts[name]),
        runs=own,
        bits_per_byte=_mean_so_far(runs, own, sum(1 for pair in results.pending if pair[0] == name), adjusted),
        train_tokens_per_second=None if training_speed is None else training_speed[1],
        train_speed_range=None if training_speed is None else training_speed[2:],
        peak_memory_bytes=median_high(memory) if memory else None,
        prefill=speeds["prefill"],
        decode=speeds["decode"],
        recall=results.recall[name],
        extrapolation=length_changes(own, multiples),
        loss_profile={group: profile_rows(own, reference, group) for group in ("positions", "frequencies")},
        text_recall=recall_in_text(own, reference),
    )


def _mean_so_far(runs: Sequence[Run], comparable: Sequence[Run], pending: int, adjusted: float | None) -> MeanLoss:
    """The mean of the comparable runs, or of all while there are none. adjusted: as in `adjusted_means`, or None."""
    mean = mean_bits_per_byte(comparable or runs)
    if adjusted is not None and mean.mean is not None:
        low, high = (None if end is None else end + adjusted - mean.mean for end in (mean.low, mean.high))
        basis = f"{mean.basis}, adjusted to the seeds of the others"
        mean = replace(mean, mean=adjusted, low=low, high=high, basis=basis)
    if not pending:
        return mean
    return replace(mean, basis=f"{mean.basis}, {pending} to come" if runs else f"{pending} runs to come")


def _kernels(config: ModelConfig, length: int, dtype: torch.dtype, device: str) -> dict[str, dict[str, list[str]]]:
    """The kernels of each operation of the mixers, in training and in decoding the last token of the trained length."""
    phases = {"training": (length, -1), "decoding": (1, length - 1)}
    kernels: dict[str, dict[str, list[str]]] = {}
    for phase, (queries, cached_tokens) in phases.items():
        operations = kernels[phase] = {}
        for choice in kernel_choices(config, queries, cached_tokens, dtype, device):
            if choice.operation not in SHARED_OPERATIONS:
                names = operations.setdefault(choice.operation, [])
                names += [choice.kernel] if choice.kernel not in names else []
    return kernels
