"""A ladder that fits a budget of time on this machine, from timed steps, and what it will be able to tell."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heddle.errors import ConfigError, DataError
from heddle.lab.compare.budget import MIN_SEEDS, TRAINED_SHARE, TimeBudget, format_seconds, least_budget, text_seconds
from heddle.lab.compare.tables import format_number, format_percent
from heddle.lab.ladder.fit import MAX_EXTRAPOLATION, SizeLosses
from heddle.lab.ladder.plan import SIZE_STEP, DesignScale, LadderPlan
from heddle.lab.ladder.predictions import LadderPoints, interval
from heddle.lab.ladder.run import Ladder, StepTimes, ladder_seconds, open_ladder, time_steps

SMALLER_RATIOS = (10.0, 5.0)  # tokens per parameter that a budget may choose where 20 leave the target out of reach
LARGEST_STEP = 2**0.25  # between the sizes that are tried
TIMED_SIZES = (1.0, 1 / 8)  # of the least size that reaches the target, twice
TYPICAL_DEVIATION = 0.005  # of the log loss of small models between seeds
TYPICAL_LOSS = (0.8, 0.5, 0.25)  # E, C and γ of E + C·(N / the target)^−γ


@dataclass(frozen=True)
class Choice:
    """A ladder that fits, its timed steps, and its seconds of training."""

    ladder: Ladder
    times: StepTimes
    seconds: float


def fit_ladder_plan(
    ladder: Ladder, budget: TimeBudget, *, chooses_sizes: bool, chooses_ratio: bool, chooses_seeds: bool
) -> Choice:
    """The ladder whose sizes, tokens per parameter and seeds the budget allows; what was asked for stays.

    The largest size is as large as fits, and no more than the target needs. Raises ConfigError where no ladder fits
    that reaches the target, saying what would.
    """
    plan = ladder.plan
    count = plan.sizes if isinstance(plan.sizes, int) else len(plan.sizes)
    seeds = [plan.seeds, *range(plan.seeds - 1, MIN_SEEDS - 1, -1)] if chooses_seeds else [plan.seeds]
    ratios = [plan.settings.tokens_per_parameter]
    if chooses_ratio:
        ratios += [(ratio,) for ratio in SMALLER_RATIOS]
    largest = max(ladder.sizes) if plan.target is None else plan.target / 2
    if not chooses_sizes:
        times = time_steps(ladder)
        for ratio, number in ((ratio, number) for ratio in ratios for number in seeds):
            candidate = _with(ladder, plan.sizes, ratio, number)
            seconds = ladder_seconds(candidate, times)
            if seconds <= _available(budget):
                return Choice(candidate, times, seconds)
        needed = format_seconds(least_budget(time.monotonic() - budget.started + seconds / TRAINED_SHARE))
        raise ConfigError(
            f"--budget {format_seconds(budget.seconds)}: this ladder takes about {needed} here; give at least that, or "
            "smaller sizes"
        )
    least = 0.0 if plan.target is None else plan.target / MAX_EXTRAPOLATION
    timed = min(largest, 2 * least) if least else largest  # larger steps take long to time
    times = time_steps(_at_sizes(ladder, tuple(timed * share for share in TIMED_SIZES)))
    best: Choice | None = None
    for ratio, number in ((ratio, number) for ratio in ratios for number in seeds):
        choice = _largest_that_fits(ladder, times, budget, count, largest, ratio, number)
        if choice is None:
            continue
        if max(choice.ladder.sizes) >= least * (1 - 1e-9):
            return choice
        if best is None or max(choice.ladder.sizes) > max(best.ladder.sizes):
            best = choice
    if best is None:
        raise ConfigError(
            f"--budget {format_seconds(budget.seconds)}: has no time for {count} sizes of these designs here; give "
            "more time, fewer designs, or a smaller vocabulary with --vocab-size"
        )
    reached, within = max(best.ladder.sizes), format_seconds(budget.seconds)
    raise ConfigError(
        f"--target {format_number(plan.target or 0)}: in {within} this machine trains ladders up to "
        f"{format_number(reached)} parameters, and nothing is predicted beyond {MAX_EXTRAPOLATION} times that; give "
        f"--target {format_number(MAX_EXTRAPOLATION * reached)}, more time, fewer designs or a faster machine"
    )


def describe_ladder(choice: Choice) -> list[str]:
    """What the ladder does, how long it takes, and what it will be able to tell, as sentences."""
    ladder, plan = choice.ladder, choice.ladder.plan
    sizes = ", ".join(format_number(size) for size in ladder.sizes)
    ratios = " and ".join(f"{ratio:g}" for ratio in ladder.ratios)
    workers = ladder.workers.count
    sentences = [
        f"plan: {len(ladder.rungs)} design{'s' * (len(ladder.rungs) > 1)} × {len(ladder.sizes)} sizes ({sizes}) × "
        f"{plan.seeds} seed{'s' * (plan.seeds > 1)} on {ratios} tokens per parameter"
        f"{f', {workers} at a time' if workers > 1 else ''}: about {format_seconds(choice.seconds)}"
    ]
    if (sentence := _resolution(choice)) is not None:
        sentences.append(sentence)
    return sentences


def _resolution(choice: Choice) -> str | None:
    """How small a difference at the target stays open, from the fit of a typical curve with a typical spread."""
    ladder, names = choice.ladder, list(choice.ladder.rungs)
    target = ladder.plan.target or 10 * max(ladder.sizes)
    if len(names) < 2 or ladder.plan.settings.shares_trunk:
        return None
    deviation = TYPICAL_DEVIATION / math.sqrt(ladder.plan.seeds)
    floor, scale, power = TYPICAL_LOSS
    random = np.random.default_rng(0)
    losses = {}
    for name in names[:2]:
        sizes = [float(rung.parameters) for rung in ladder.rungs[name]]
        noise = np.exp(deviation * random.standard_normal(len(sizes)))
        values = [
            (floor + scale * (size / target) ** -power) * factor for size, factor in zip(sizes, noise, strict=True)
        ]
        losses[name] = SizeLosses(sizes, values, [ladder.plan.seeds] * len(sizes))
    try:
        fit = LadderPoints(losses, {}, deviation).fit(ladder.plan.share_irreducible)
        first, second = (fit.losses(name, target, 0.0) for name in names[:2])
    except DataError:
        return None
    _, low, high = interval(first / second)
    factor, spread = target / max(ladder.sizes), format_percent(TYPICAL_DEVIATION)
    return (
        f"it predicts {format_number(target)} parameters, {factor:.0f} times the largest size; with seeds that spread "
        f"by {spread} of the loss, designs whose losses there differ by less than about "
        f"{format_percent((high - low) / 2)} cannot be told apart"
    )


def _largest_that_fits(
    ladder: Ladder,
    times: StepTimes,
    budget: TimeBudget,
    count: int,
    largest: float,
    ratio: Sequence[float],
    seeds: int,
) -> Choice | None:
    for size in _descending(largest, ladder.scales):
        sizes = tuple(size / SIZE_STEP**index for index in reversed(range(count)))
        try:
            candidate = _with(ladder, sizes, ratio, seeds)
        except ConfigError:  # the smallest is too small to be built, or to be trained
            continue
        seconds = ladder_seconds(candidate, times)
        if seconds <= _available(budget):
            return Choice(candidate, times, seconds)
    return None


def _descending(largest: float, scales: Mapping[str, DesignScale]) -> Iterator[float]:
    """Sizes from the largest down to those at which nothing is left but the embedding."""
    smallest = min(scale.config.vocab_size or 1 for scale in scales.values())
    while largest > smallest:
        yield largest
        largest /= LARGEST_STEP


def _with(ladder: Ladder, sizes: int | tuple[float, ...], ratio: Sequence[float], seeds: int) -> Ladder:
    plan: LadderPlan = ladder.plan
    settings = replace(plan.settings, tokens_per_parameter=tuple(ratio))
    changed = replace(plan, sizes=sizes, settings=settings, seeds=seeds)
    opened = open_ladder(changed, ladder.out, ladder.runtime, ladder.command, ladder.scales)
    opened.plan.settings.check_steps([rung.parameters for each in opened.rungs.values() for rung in each])
    return opened


def _at_sizes(ladder: Ladder, sizes: tuple[float, ...]) -> Ladder:
    """The ladder at other sizes, of which its steps are timed."""
    rungs = {name: [scale.nearest_rung(size) for size in sorted(sizes)] for name, scale in ladder.scales.items()}
    return replace(ladder, sizes=tuple(sorted(sizes)), rungs=rungs)


def _available(budget: TimeBudget) -> float:
    """Seconds of training that the budget has left."""
    return TRAINED_SHARE * (budget.remaining - text_seconds(budget.seconds))
