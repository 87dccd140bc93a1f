"""The pairs of designs in a report: differences with simultaneous intervals, and what would resolve the open ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from heddle.lab.compare.plan import short_titles
from heddle.lab.compare.power import anytime_level, need_for, round_widths_below, smallest_resolvable
from heddle.lab.compare.results import (
    BaselineRow,
    Design,
    Difference,
    Effects,
    Interaction,
    InteractionCell,
    NeededRuns,
    PairReport,
    PairRow,
    ScoredRun,
    VariedField,
    VariedValue,
)
from heddle.lab.compare.statistics import (
    ALPHA,
    NO_PAIR,
    VALIDATION_WINDOWS,
    Level,
    PairStatistics,
    describe_method,
    describe_unpaired,
    finished_runs,
    fixed_level,
    moderated_degrees,
    pair_statistics,
    paired_difference,
    pooling_weight,
    t_quantile,
)
from heddle.lab.compare.tables import mean_loss


@dataclass(frozen=True)
class Judging:
    """How a report judges its pairs.

    is_anytime: whether the number of seeds depended on results, so that intervals must hold at every number of seeds.
    is_final: whether all planned runs are finished; until then a fixed comparison resolves nothing. half_width: what
    the user asked for. workers: runs at the same time.
    """

    is_anytime: bool = False
    is_final: bool = True
    half_width: float | None = None
    workers: int = 1

    @property
    def level(self) -> Level:
        """The nominal level at a number of seeds."""
        return anytime_level if self.is_anytime else fixed_level


def pair_report(runs: Mapping[str, Sequence[ScoredRun]], baseline: str, judging: Judging | None = None) -> PairReport:
    """All pairs of designs with simultaneous 95 % intervals, in the order of the designs' losses."""
    judging = judging or Judging()
    statistics = pair_statistics(runs)
    effects = statistics.effects
    order = sorted(range(len(effects)), key=lambda design: (math.isnan(effects[design]), effects[design], design))
    names = statistics.names

    def row(design: int, reference: int) -> dict[str, Any]:
        return vars(_difference(statistics, design, reference, runs, judging))

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
    statistics: PairStatistics, design: int, reference: int, runs: Mapping[str, Sequence[ScoredRun]], judging: Judging
) -> Difference:
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
    rows = []
    for width in widths:
        need = need_for(statistics, design, reference, width, anytime_level)
        if need is not None:
            more = None if need.seeds is None else max(0, need.seeds - int(statistics.seeds[design, reference]))
            rows.append(NeededRuns(**need._asdict(), seconds=None if more is None else more * seconds))
    return rows


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
    """All rows of a report, judged at once. statistics: of the designs; differences: of one field, by design."""

    designs: Sequence[Design]
    base: FieldLabels
    judging: Judging
    statistics: PairStatistics
    count: int
    differences: dict[str, Difference] | None

    def half_width(self, contrast: PairStatistics, parts: float) -> float | None:
        """Half of the interval of a contrast between sums of designs; None where there is none.

        contrast: of its two sides as if they were designs; parts: the sum of its squared weights.
        """
        seeds = int(contrast.seeds[0, 1])
        text = contrast.text_error[0, 1] * self._critical(ALPHA, contrast.text_degrees)
        if seeds < 2:
            return None if math.isnan(text) else float(text)
        weight = float(pooling_weight(seeds))
        own, designs = float(contrast.variance[0, 1]), len(self.statistics.names)
        variance = weight * own + (1 - weight) * parts * self.statistics.run_variance
        degrees = float(moderated_degrees(designs, seeds, self.statistics.pooled_degrees))
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
    rows = _all_rows(designs, baseline, {path: labels_of[path] for path in varied}, judging or Judging())
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


def _all_rows(designs: Sequence[Design], baseline: str, labels_of: dict[str, list[str]], judging: Judging) -> _Rows:
    changes = [len(labels) - 1 for labels in labels_of.values()]
    count = sum(changes) + sum(first * second for first, second in combinations(changes, 2))
    runs = {design.name: design.runs for design in designs}
    differences = None
    if len(changes) == 1:
        names, statistics = list(runs), pair_statistics(runs)
        differences = {
            name: _difference(statistics, index, names.index(baseline), runs, judging)
            for index, name in enumerate(names)
            if name != baseline
        }
    base = next(design.varied_fields for design in designs if design.name == baseline)
    return _Rows(designs, base, judging, pair_statistics(runs), count, differences)


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
        if rows.differences is not None and len(with_value) == 1:
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
        half = rows.half_width(
            pair_statistics({"plus": plus_runs, "minus": minus_runs}), (len(plus) + len(minus)) / count
        )
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
