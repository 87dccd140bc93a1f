"""Sentences that follow from a report's numbers: the verdict, and the gains and costs of each design."""

import math
from itertools import pairwise

from heddle.lab.compare.power import MAX_SEEDS
from heddle.lab.compare.probes import solved_accuracy
from heddle.lab.compare.results import Design, Difference, NeededRuns, Report
from heddle.lab.compare.statistics import finished_runs, ranges_overlap
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
