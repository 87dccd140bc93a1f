"""What follows from a report's numbers: what it can resolve, the verdict, and the gains and costs of each design."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from heddle.lab.compare.probes import solved_accuracy
from heddle.lab.compare.results import Design, Difference, NeededRuns, Report
from heddle.lab.compare.statistics import (
    Level,
    PairStatistics,
    finished_runs,
    fixed_level,
    moderated_degrees,
    pair_critical_value,
    ranges_overlap,
    widest,
)
from heddle.lab.compare.tables import (
    TextTable,
    baseline_design,
    difference_to_baseline,
    differences_to_leader,
    first_probe,
    format_bits,
    format_bound,
    format_bytes,
    format_context,
    format_difference,
    format_percent,
    format_share,
    half_width,
    join_names,
    judgment,
    mean_loss,
    missing_reason,
    range_at,
    ranked_designs,
    recall_accuracy,
    series_of,
    shared_context,
    value_at,
)
from heddle.progress import format_duration

# What differences a comparison can resolve, and what a narrower interval needs: seeds, time, or held-out text.
#
# The smallest difference that is resolved with probability 0.8 follows from the noncentral t distribution. Seeds narrow
# the part of an interval that is seed variance, and only text narrows the part that is sampling error of the text: with
# m times the text it is 1/√m as wide.


POWER = 0.8
MAX_SEEDS = 100


def detectable_difference(error: float, degrees_of_freedom: float, critical: float) -> float:
    """The difference whose |t| exceeds a critical value with probability `POWER`, from its standard error."""
    from scipy.special import nctdtr

    def exceeds(noncentrality: float) -> float:
        # t below −critical is as good as impossible where the power is not close to the level
        return float(1 - nctdtr(degrees_of_freedom, noncentrality, critical))

    low, high = 0.0, critical + 1.0
    while exceeds(high) < POWER:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) < POWER else (low, middle)
    return error * high


def smallest_resolvable(statistics: PairStatistics, row: int, column: int, level: Level = fixed_level) -> float | None:
    """The true difference of two designs that these seeds and this text resolve with probability 0.8.

    None where there is no interval. Seed variance and the sampling error of the text add up as in Welch's t.
    """
    half = statistics.half_width(row, column, level)
    if math.isnan(half):
        return None
    parts = []
    if not math.isnan(statistics.seed_half_width(row, column)):
        parts.append((float(statistics.seed_error[row, column]), float(statistics.degrees[row, column])))
    if not math.isnan(statistics.text_half_width(row, column)):
        parts.append((float(statistics.text_error[row, column]), statistics.text_degrees))
    error = math.hypot(*(part for part, _ in parts))
    if error == 0:
        return 0.0
    degrees = error**4 / sum(part**4 / part_degrees for part, part_degrees in parts)
    return detectable_difference(error, degrees, half / error)


def need_for(
    statistics: PairStatistics,
    row: int,
    column: int,
    half_width: float,
    level: Level = fixed_level,
    run_seconds: float = 0.0,
) -> NeededRuns | None:
    """What an interval of ± half_width needs; None with fewer than two seeds, which say nothing about the spread.

    run_seconds: of one run of both designs. Where the text makes up more than half of the wanted square, the need is
    split: more text, so that it is half.
    """
    if statistics.seeds[row, column] < 2:
        return None
    text = statistics.text_half_width(row, column)
    text = 0.0 if math.isnan(text) else text
    text_factor, seed_target = 1.0, math.sqrt(max(0.0, half_width**2 - text**2))
    if 2 * text**2 > half_width**2:
        text_factor, seed_target = 2 * text**2 / half_width**2, half_width / math.sqrt(2)
    seeds = seeds_for(statistics, row, column, seed_target, level)
    seconds = None if seeds is None else max(0, seeds - int(statistics.seeds[row, column])) * run_seconds
    return NeededRuns(half_width=half_width, seeds=seeds, text_factor=text_factor, seconds=seconds)


def seeds_for(
    statistics: PairStatistics, row: int, column: int, seed_half_width: float, level: Level = fixed_level
) -> int | None:
    """The fewest seeds (2 to 100) with which seed variance adds no more than this half-width, or None.

    Assumes that the spread does not change.
    """
    designs, variance = len(statistics.names), float(statistics.variance[row, column])

    def is_enough(seeds: int) -> bool:
        degrees = float(moderated_degrees(designs, seeds, (designs - 1) * (seeds - 1)))
        return pair_critical_value(designs, max(degrees, 1.0), level(seeds)) * math.sqrt(variance / seeds) <= (
            seed_half_width
        )

    choices = range(2, MAX_SEEDS + 1)
    first = bisect_left(choices, True, key=is_enough)
    return choices[first] if first < len(choices) else None


def round_widths_below(half_width: float) -> list[float]:
    """The next two numbers below a half-width in the series 1, 2, 5, 10: 0.015 gives 0.01 and 0.005."""
    if not half_width > 0 or not math.isfinite(half_width):
        return []
    power = math.floor(math.log10(half_width))
    series = [digit * 10.0**exponent for exponent in range(power, power - 3, -1) for digit in (5, 2, 1)]
    return [round(width, 12 - power) for width in series if width < half_width * (1 - 1e-9)][:2]


# Which seeds to buy next, and when to stop: repeated intervals that hold at any number of seeds.
#
# A look at n seeds uses the nominal level 0.006 · min(√(n/8), √(8/n)) in place of 5 %. Whatever the number of looks
# from 2 to 100 seeds, and whichever pairs of equal designs, the probability that any interval at any look misses the
# truth is at most 5 % (simulated: docs/compare/seeds.md). These are repeated confidence intervals (Jennison and
# Turnbull 1989) whose levels are spent as in Lan and DeMets (1983), at the significance level of each t (Jennison and
# Turnbull 2000, section 4.4). A mixture martingale (Lai 1976; Wang and Ramdas 2023) also holds without end; its
# intervals are wider from 6 seeds on. Seeds that share one text say nothing about other texts: the text's part of an
# interval keeps its own level, which looks do not spend.


LOOK_LEVEL, TYPICAL_SEEDS = 0.006, 8
LEADER, BEHIND, TIED, OPEN, TEXT_LIMITED, FAILED = "leader", "behind", "tied", "open", "text-limited", "failed"


def anytime_level(seeds: int) -> float:
    """The nominal level of a look at this number of seeds."""
    return LOOK_LEVEL * min(math.sqrt(seeds / TYPICAL_SEEDS), math.sqrt(TYPICAL_SEEDS / seeds))


class Decision(NamedTuple):
    """The runs to do next, (index of a design, seed), or none and the reason to stop, as a sentence.

    standings: of each design, one of LEADER, BEHIND (resolved), TIED, OPEN, TEXT_LIMITED (seeds do not help), FAILED.
    """

    runs: tuple[tuple[int, int], ...]
    reason: str | None
    standings: tuple[str, ...]


class Spending(NamedTuple):
    """What was run: the seeds of each design, the mean seconds of a run of each, and the seconds of all runs."""

    seeds: Sequence[int]
    run_seconds: Sequence[float]
    seconds: float


@dataclass(frozen=True)
class StoppingRule:
    """Buys seeds until each design is resolved from the leader, or a tie with it within ± half_width.

    A design that is resolved as worse is dropped. Seeds go to the open designs that the remaining budget can decide,
    the nearest to a decision first; if it can decide none, to the nearest alone. The rule keeps no state and is
    deterministic: equal results give equal decisions. budget_seconds: of training; None: up to 100 seeds.
    """

    half_width: float
    budget_seconds: float | None = None

    def decide(
        self, statistics: PairStatistics, spending: Spending, earlier: Sequence[PairStatistics] = ()
    ) -> Decision:
        """Choose the next runs. Each design must have been run before. earlier: as in `grown_statistics`."""
        names, leader = statistics.names, statistics.leader
        if leader is None:
            return Decision((), "No run finished, so no more seeds were bought.", (FAILED,) * len(names))
        standings = tuple(
            # more than half of its runs ended without a number
            FAILED
            if 2 * statistics.seeds[design, design] < spending.seeds[design]
            else self._standing([statistics, *earlier], names[design], names[leader])
            for design in range(len(names))
        )
        undecided = [design for design, standing in enumerate(standings) if standing == OPEN]
        if not undecided:
            return Decision((), self._final_reason(statistics, leader, standings), standings)
        needs = {design: self._seeds_needed(statistics, design, leader) for design in undecided}
        chosen = self._affordable(needs, leader, spending)
        runs = _next_runs([leader, *chosen], spending.seeds) if chosen else ()
        if not runs:
            reason = self._unfinished_reason([names[design] for design in undecided], names[leader], bool(chosen))
            return Decision((), reason, standings)
        return Decision(runs, None, standings)

    def _standing(self, candidates: Sequence[PairStatistics], name: str, leading: str) -> str:
        if name == leading:
            return LEADER
        statistics, design, leader = widest(candidates, name, leading, anytime_level)
        if math.isnan(statistics.mean[design, leader]):
            return FAILED
        difference = abs(float(statistics.mean[design, leader]))
        half = statistics.half_width(design, leader, anytime_level)
        if statistics.seeds[design, leader] >= 2:
            if half < difference:
                return BEHIND
            if difference + half <= self.half_width:
                return TIED
        text = statistics.text_half_width(design, leader)
        return TEXT_LIMITED if text >= self._sufficient(difference) else OPEN

    def _sufficient(self, difference: float) -> float:
        """The half-width that decides a design, if its difference does not change."""
        return max(difference, self.half_width - difference)

    def _seeds_needed(self, statistics: PairStatistics, design: int, leader: int) -> int:
        """Seeds of a design and the leader that decide it; over 100 where 100 are too few."""
        if statistics.seeds[design, leader] < 2:
            return 2
        text = statistics.text_half_width(design, leader)
        sufficient = self._sufficient(abs(float(statistics.mean[design, leader])))
        target = math.sqrt(sufficient**2 - (0.0 if math.isnan(text) else text) ** 2)
        # just below: an interval that touches 0 decides nothing
        return seeds_for(statistics, design, leader, target * (1 - 1e-9), anytime_level) or MAX_SEEDS + 1

    def _affordable(self, needs: dict[int, int], leader: int, spending: Spending) -> list[int]:
        """The designs to buy seeds for; empty if not even the nearest to a decision can afford another seed."""
        nearest_first = sorted(needs, key=lambda design: (needs[design], design))
        within = [design for design in nearest_first if spending.seeds[design] < MAX_SEEDS]
        if self.budget_seconds is None or not within:
            return within
        remaining, affordable, seconds = self.budget_seconds - spending.seconds, list[int](), 0.0
        for design in within:
            seconds += max(1, needs[design] - spending.seeds[design]) * spending.run_seconds[design]
            of_leader = max(1, needs[design] - spending.seeds[leader]) * spending.run_seconds[leader]
            if seconds + of_leader > remaining:
                break
            affordable.append(design)
        if affordable:
            return affordable
        nearest = within[:1]
        runs = _next_runs([leader, *nearest], spending.seeds)
        return nearest if sum(spending.run_seconds[design] for design, _ in runs) <= remaining else []

    def _final_reason(self, statistics: PairStatistics, leader: int, standings: Sequence[str]) -> str:
        names = statistics.names
        limited = [name for name, standing in zip(names, standings, strict=True) if standing == TEXT_LIMITED]
        if limited:
            return (
                f"More seeds cannot decide between {names[leader]} and {join_names(limited, 8)}: "
                "the sampling error of the held-out text is the larger part of the interval; give more held-out text."
            )
        tie = f"a tie within ± {self.half_width:g}"
        return f"Each design is resolved from {names[leader]} or {tie}, so no more seeds were bought."

    def _unfinished_reason(self, undecided: Sequence[str], leader: str, is_at_limit: bool) -> str:
        open_pairs = f"not decided from {leader}: {join_names(undecided, 8)}"
        if self.budget_seconds is None or is_at_limit:
            return f"All {MAX_SEEDS} seeds are used; {open_pairs}."
        return f"The rest of the budget of {format_duration(self.budget_seconds)} buys no further seed; {open_pairs}."


def _next_runs(group: Sequence[int], seeds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The next seed of each design in the group; designs with fewer seeds catch up first."""
    most, fewest = max(seeds[design] for design in group), min(seeds[design] for design in group)
    target = min(most + (most == fewest), MAX_SEEDS)
    return tuple((design, seed) for seed in range(fewest, target) for design in group if seeds[design] <= seed)


# What a comparison did not resolve, in words: ties, what it could resolve, and what a narrower interval needs.


MEANINGLESS_TIE = 0.1  # of the loss: a wider interval bounds nothing


def resolution_sentences(report: Report) -> list[str]:
    """The differences to the leader that are ruled out, and what would narrow them; empty where nothing is open."""
    rows = [row for row in differences_to_leader(report) if _is_unresolved(row) and row.pairs > 1]
    sentences = []
    if rows:
        widest = max(rows, key=lambda row: half_width(row) or 0.0)
        loss = min(mean_loss(design) or math.inf for design in report.designs)
        if (widest.tie_within or 0.0) > MEANINGLESS_TIE * loss:
            return [f"Seeds differ more than designs, so intervals say little; train more than {widest.pairs} of each."]
        bounds = format_bound(rows[0].tie_within or 0.0)
        if len(report.designs) > 2:
            bounds = join_names([f"{format_bound(row.tie_within or 0.0)} ({row.reference})" for row in rows], 8)
            bounds = f"{bounds} from {report.leader}"
        ties = f"Ruled out: a difference of more than {bounds}"
        power = f"80 % power to detect {format_bound(widest.resolvable or 0.0)}"
        sentences.append(f"{ties}; {power}.")
        sentences += [f"{need_words(need)}." for need in (widest.needs or ())[:1]]
    return sentences


def need_words(need: NeededRuns) -> str:
    """ "To narrow to ± 0.01, read 2.1 times the held-out text, the larger part, and train 9 seeds of each"."""
    start = f"To narrow to ± {need.half_width:g},"
    if need.seeds is None:
        seeds = f"more than {MAX_SEEDS} seeds of each"
    else:
        more = f", {format_duration(need.seconds)} more" if need.seconds else ""
        seeds = f"{need.seeds} seeds of each{more}"
    if need.text_factor == 1:
        return f"{start} train {seeds}"
    return f"{start} read {need.text_factor:.1f} times the held-out text, the larger part, and train {seeds}"


def _short_need(need: NeededRuns) -> str:
    """ "± 0.01: 9 seeds, 4 min, 2.1 × text"."""
    seeds = f"over {MAX_SEEDS} seeds" if need.seeds is None else f"{need.seeds} seeds"
    time = f", {format_duration(need.seconds)}" if need.seconds else ""
    text = "" if need.text_factor == 1 else f", {need.text_factor:.1f} × text"
    return f"± {need.half_width:g}: {seeds}{time}{text}"


def resolution_table(report: Report) -> TextTable | None:
    """A row for each unresolved pair with the leader or the baseline; None where there is none."""
    rows = [
        [
            f"{row.design} − {row.reference}",
            format_difference(row),
            f"± {format_bound(row.tie_within or 0.0)}",
            format_bound(row.resolvable or 0.0),
            "; ".join(map(_short_need, row.needs or ())) or "a second seed",
        ]
        for row in report.pairs
        if _is_unresolved(row) and {report.leader, report.baseline} & {row.design, row.reference}
    ]
    header = ["not resolved", "difference", "ruled out beyond", "80 % power at", "narrower"]
    return TextTable(header, rows, "What is not resolved, and what would resolve it") if rows else None


def _is_unresolved(row: Difference) -> bool:
    """Whether a pair was judged and is open; runs with equal numbers are not."""
    return bool(row.final and not row.resolved and row.tie_within)


SAME_SPEED = "no measured difference in {}: the measurements overlap"


def verdict_sentences(report: Report) -> list[str]:
    """A few sentences to read first: loss and its certainty, state, recall, longer sequences, failures.

    "Lowest" refers to the measured means, "resolved" to an interval for all pairs at once that excludes 0.
    """
    ranking = [design for design in ranked_designs(report) if mean_loss(design) is not None]
    if not ranking:
        return ["No design finished a run, so nothing can be compared."]
    sentences = [
        _lowest_loss(report, ranking),
        *resolution_sentences(report),
        *_single_seed_warning(ranking),
        *_state_costs(report, ranking),
    ]
    return [*sentences, *recall_verdict(report), *length_verdict(report), *_failures(report)]


def _lowest_loss(report: Report, ranking: list[Design]) -> str:
    best, *others = ranking
    loss = format_bits(mean_loss(best))
    if not others:
        return f"{best.name} reaches {loss} bits per byte; there is no second design to compare it with."
    if all(mean_loss(design) == mean_loss(best) for design in others):
        return f"{join_names([design.name for design in ranking], 8)} tie: each reaches {loss} bits per byte."
    by_name = {row.reference: row for row in differences_to_leader(report)}
    differences = {design.name: by_name[design.name] for design in others}
    most = max(row.pairs for row in differences.values())
    judged = [row for row in differences.values() if row.resolved and row.pairs >= min(2, most)]
    resolved = [row.reference for row in judged if (row.mean or 0.0) < 0]
    unresolved = [name for name in differences if name not in resolved]
    start, word = f"{best.name} has the lowest bits per byte, {loss}", "resolved"
    if most == 1:
        # one seed says nothing about seed variance, so the first sentence may not either
        start, word = f"{start}, on one seed", "resolved for the sampling error of the text only"
    if len(others) == 1 and differences[others[0].name].mean is not None:
        [(name, row)] = differences.items()
        if not resolved:
            return f"No clear winner: {_losses(ranking)} bits per byte, a difference of {format_difference(row)}."
        return f"{start}; its difference to {name}, {format_difference(row)}, is {word}."
    if not unresolved:
        return f"{start}, and the difference to each of the other {len(others)} is {word}."
    if not resolved:
        return f"No clear winner: {_losses(ranking)} bits per byte.{_resolved_pairs(report)}"
    tied = [design for design in ranking if design is best or design.name in unresolved]
    lead = f"The lead of {best.name} is {word} against {join_names(resolved, 8)}."
    return f"Lowest, and not resolved from each other: {_losses(tied)} bits per byte. {lead}"


def _resolved_pairs(report: Report) -> str:
    """Resolved pairs without the leader, as when the leader's runs vary more than theirs; on two seeds or more."""
    others = [row for row in report.pairs if report.leader not in (row.design, row.reference)]
    pairs = [row for row in others if row.resolved and row.pairs > 1]
    words = [f"{row.design} against {row.reference} ({format_difference(row)})" for row in pairs]
    return f" Resolved: {join_names(words, 4)}." if words else ""


def _losses(designs: list[Design]) -> str:
    return join_names([f"{design.name} {format_bits(mean_loss(design))}" for design in designs], 8)


def _single_seed_warning(ranking: list[Design]) -> list[str]:
    single = [design.name for design in ranking if len(finished_runs(design.runs)) == 1]
    if len(ranking) < 2 or not single:
        return []
    which = "With one seed" if len(single) == len(ranking) else f"With one seed of {join_names(single, 8)}"
    return [f"{which} no interval covers seed variance: another seed may change the order."]


def _state_costs(report: Report, ranking: list[Design]) -> list[str]:
    """The loss that the smallest state costs, and the smallest state whose cost is not resolved."""
    context = shared_context(ranking, "state_bytes")
    states = {design.name: value_at(design.state_bytes, context) for design in ranking}
    sizes = {name: size for name, size in states.items() if size is not None}
    baseline = report.baseline
    if context is None or len(sizes) < 2 or not sizes.get(baseline):
        return []
    position, baseline_size = format_context(context), sizes[baseline]
    smallest = min(sizes.values())
    if smallest == max(sizes.values()):
        return [f"All keep the same state: {format_bytes(baseline_size)} at {position}."]
    if smallest == baseline_size:
        return [f"No state is smaller than {baseline}'s: {format_bytes(baseline_size)} at {position}."]

    def sentence(name: str) -> str:
        alike = [other for other in sizes if sizes[other] == sizes[name]]
        costs = []
        for other in alike:
            difference = difference_to_baseline(report, other)
            owner = f" with {other}" if len(alike) > 1 else ""
            costs.append(f"{format_difference(difference)}{owner} ({judgment(difference)})")
        amounts = f"{format_bytes(sizes[name])} against {format_bytes(baseline_size)} at {position}"
        share = format_share(sizes[name], baseline_size)
        need = f"{name} needs" if len(alike) == 1 else f"{join_names(alike, 8)} need"
        return f"{need} {share} of the state of {baseline} ({amounts}); bits per byte: {join_names(costs, 8)}."

    cheapest = min(sizes, key=lambda name: sizes[name])
    not_worse = [
        name
        for name, size in sizes.items()
        if size < baseline_size and not judgment(difference_to_baseline(report, name)).startswith("worse")
    ]
    cheapest_not_worse = min(not_worse, key=lambda name: sizes[name], default=cheapest)
    return list(dict.fromkeys(map(sentence, (cheapest, cheapest_not_worse))))


def recall_verdict(report: Report) -> list[str]:
    """Which designs learned the first probe and which did not; empty where it was not measured."""
    probe = first_probe(report)
    if probe is None:
        return []
    probe_name, description = probe
    accuracies = {design.name: recall_accuracy(design, probe_name) for design in report.designs}
    measured = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    if not measured:
        return []
    solved = [name for name, accuracy in measured.items() if accuracy >= solved_accuracy(description.chance)]
    unsolved = sorted((name for name in measured if name not in solved), key=lambda name: -measured[name])
    chance = f"guessing gives {format_percent(description.chance)}"
    if not unsolved:
        lowest = format_percent(min(measured.values()))
        at_least = "" if lowest == format_percent(1.0) else "at least "
        everyone = f"each design answers {at_least}{lowest}" if len(measured) > 1 else f"{solved[0]} answers {lowest}"
        return [f"Recall ({description.title}): {everyone} correctly; {chance}."]
    rest = join_names([f"{name} {format_percent(measured[name])}" for name in unsolved], 6)
    start = f"{join_names(solved, 6)} learned it" if solved else "no design learned it"
    return [f"Recall ({description.title}): {start} within the budget; {rest} ({chance})."]


def length_verdict(report: Report) -> list[str]:
    """How bits per byte change at the longest length read; empty where no longer text was read."""
    largest = max(report.extrapolation.multiples, default=1)
    if largest == 1:
        return []
    rows = {design.name: design.extrapolation[-1] for design in report.designs}
    changed = [(name, row.change) for name, row in rows.items() if row.change is not None]
    changes = sorted(
        ((change.mean, name, change) for name, change in changed if change.mean is not None), key=lambda row: row[:2]
    )
    parts = [f"{name} {format_difference(change)}" for _, name, change in changes]
    measured = {name for _, name, _ in changes}
    parts += [f"{name} {missing_reason(row)}" for name, row in rows.items() if name not in measured]
    one_seed = ", on one seed" if max((change.pairs for _, _, change in changes), default=0) == 1 else ""
    start = f"At {largest} × the trained length bits per byte change, on the same text"
    return [f"{start}{one_seed}: {join_names(parts, 8)}."]


def _failures(report: Report) -> list[str]:
    counts = {design.name: (len(finished_runs(design.runs)), len(design.runs)) for design in report.designs}
    none = [name for name, (finished, _) in counts.items() if not finished]
    some = [f"{name} on {finished} of {total}" for name, (finished, total) in counts.items() if 0 < finished < total]
    sentences = []
    if some:
        sentences.append(f"Only some seeds finished: {join_names(some)}. A mean without the others looks too good.")
    return sentences + ([f"No run finished: {join_names(none)}."] if none else [])


def describe_state_growth(design: Design) -> str:
    """How the state grows with the context: with each token, up to a window, or not at all."""
    points = [(context, size) for context, size in design.state_bytes or () if size is not None]
    if len(points) < 3:
        return "Its state was not measured."
    slopes = [(b - a) / (y - x) for (x, a), (y, b) in pairwise(points)]
    fixed_bytes, last_slope = points[0][1] - slopes[0] * points[0][0], slopes[-1]
    final_size = format_bytes(points[-1][1])
    if max(slopes) == 0:
        return f"It keeps {final_size} at every context length."
    if last_slope == 0:
        return f"Its state grows up to {final_size} and then stays constant."
    fixed = f"{format_bytes(fixed_bytes)} and " if fixed_bytes > 0.02 * points[0][1] else ""
    growth = f"keeps {fixed}{format_bytes(last_slope)} for each token."
    return f"It {growth}" if slopes[0] == last_slope else f"Once its windows are full, it {growth}"


def compare_with_baseline(report: Report, design: Design) -> list[str]:
    """The design relative to the baseline: state, decoding, training, loss and recall. Empty for the baseline."""
    baseline = baseline_design(report)
    if design.name == baseline.name:
        return []
    phrases: list[str] = []
    for title, key, has_range in (("state", "state_bytes", False), ("decoding speed", "decode", True)):
        context = shared_context(report.designs, key)
        if context is not None:
            ours, theirs = series_of(design, key), series_of(baseline, key)
            overlap = has_range and ranges_overlap(range_at(ours, context), range_at(theirs, context))
            title = f"{title} at {format_context(context)}"
            phrases += _ratio(title, value_at(ours, context), value_at(theirs, context), overlap)
    speeds = design.train_tokens_per_second, baseline.train_tokens_per_second
    overlap = ranges_overlap(design.train_speed_range, baseline.train_speed_range)
    phrases += _ratio("training speed", *speeds, overlap)
    difference = difference_to_baseline(report, design.name)
    if difference is not None and difference.mean is not None:
        phrases.append(f"{format_difference(difference)} bits per byte: {judgment(difference)}")
    probe = first_probe(report)
    if probe is not None:
        value, reference = recall_accuracy(design, probe[0]), recall_accuracy(baseline, probe[0])
        if value is not None and reference is not None:
            title = probe[1].title
            phrases.append(f"{format_percent(value)} correct on {title}, against {format_percent(reference)}")
    return phrases


def _ratio(title: str, value: float | None, reference: float | None, overlap: bool) -> list[str]:
    """The value as a share of the baseline's, unless their measured ranges overlap. Empty without both values."""
    if value is None or not reference:
        return []
    share = format_share(value, reference)
    share = share if share.endswith("times") else f"{share} of"
    return [SAME_SPEED.format(title) if overlap else f"{share} its {title}"]
