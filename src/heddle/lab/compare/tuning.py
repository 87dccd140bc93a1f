"""Tune training fields for each design before a comparison: run the search's trials, and choose the best values.

A trial is a separate run, as long as the comparison's or shorter, with a complete schedule. It is scored on the
tuning part of the held-out text; the comparison's runs, on seeds that no trial used, are scored on the rest.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations

from heddle import progress
from heddle.data.token_file import split_held_out
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.lab.compare.plan import (
    Candidate,
    ComparisonPlan,
    DesignEntry,
    TunedField,
    TuningPlan,
    Value,
    all_candidates,
    describe_candidate,
    format_value,
    planned_trials,
    tuned_settings,
)
from heddle.lab.compare.probes import plan_evaluations
from heddle.lab.compare.results import (
    Run,
    Rung,
    SharedPair,
    SharedRun,
    SharedValues,
    TrialResult,
    TunedDesign,
    TunedFieldReport,
    TuningBudget,
    TuningReport,
)
from heddle.lab.compare.statistics import paired_difference
from heddle.lab.compare.tables import format_difference, half_width, join_names, judgment
from heddle.lab.compare.tasks import Comparison, seconds_per_step, training_task
from heddle.lab.workers import Result, Task
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.training.settings import Settings

# A grid of training fields that is tried on every design with the same seed, as pure functions.
#
# Every candidate is trained once on each design, for the same fraction of the design's own run, with its own complete
# schedule. A best value needs results at both neighbors of the grid: a missing neighbor is run, beyond the ends of the
# grid too, and on all designs, so that any two can be compared at one value. A run that diverged counts as worse than
# any other. The search is a function of the losses so far, so that it resumes after an interrupt.

MAX_ADDED_VALUES = 4  # new values of a field's grid
TUNING_SEED = 1_000_000  # of every trial; the comparison's own seeds are smaller


@dataclass(frozen=True)
class Trial:
    """One run of the search."""

    design: str
    candidate: Candidate


Losses = Mapping[Trial, float]  # of finished runs; infinite where one diverged


@dataclass(frozen=True)
class Search:
    """A search to run.

    run_costs: cost of a full run of each design, in the unit of the budget. budget: the most that the search may cost.
    min_fraction: of a run; no trial is shorter. Raises BudgetTooSmall if the budget does not allow such trials.
    """

    fields: tuple[TunedField, ...]
    run_costs: Mapping[str, float]
    budget: float
    min_fraction: float

    def __post_init__(self) -> None:
        if self.fraction < self.min_fraction * (1 - 1e-9):
            raise BudgetTooSmall(self.min_fraction * planned_trials(self.fields) * self.round_cost)

    @property
    def designs(self) -> tuple[str, ...]:
        """The designs' names."""
        return tuple(self.run_costs)

    @property
    def round_cost(self) -> float:
        """The cost of one whole run of every design."""
        return sum(self.run_costs.values())

    @property
    def fraction(self) -> float:
        """Length of a trial as a fraction of the design's own run: the longest that the budget allows, up to 1."""
        return min(1.0, self.budget / (self.round_cost * planned_trials(self.fields)))

    def trials(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """The runs of these candidates, candidate by candidate."""
        return [Trial(name, candidate) for candidate in candidates for name in self.designs]


class BudgetTooSmall(ConfigError):
    """The budget is too small for the search. least_budget: the smallest that does."""

    def __init__(self, least_budget: float) -> None:
        super().__init__(f"the budget is too small; the smallest is {least_budget:g}")
        self.least_budget = least_budget


@dataclass(frozen=True)
class SearchState:
    """A search after some losses.

    candidates: all that are tried, added ones last. pending: the runs needed next; empty once the search is over.
    best: candidate by design. values: the grid of each field, with added values. open_ends: by design, the fields whose
    best value has no neighbor that was run.
    """

    candidates: tuple[Candidate, ...]
    pending: tuple[Trial, ...]
    best: Mapping[str, Candidate]
    values: tuple[tuple[Value, ...], ...]
    open_ends: Mapping[str, tuple[str, ...]]
    cost: float


def search_state(search: Search, losses: Losses) -> SearchState:
    """Replay the search on the losses so far: what to run next, or what is best."""
    candidates = tuple(all_candidates(search.fields))
    values = tuple(field.values for field in search.fields)
    cost_of_one = search.round_cost * search.fraction
    state = SearchState(candidates, (), {}, values, {}, cost_of_one * len(candidates))
    while True:
        pending = tuple(trial for trial in search.trials(state.candidates) if trial not in losses)
        if pending:
            return replace(state, pending=pending)
        state = replace(state, best={name: _best(state, name, losses) for name in search.designs})
        values, additions, open_ends = _missing_neighbors(search, state)
        additions = additions[: max(0, math.floor((search.budget - state.cost) / cost_of_one + 1e-9))]
        if not additions:
            return replace(state, open_ends=open_ends)
        values = tuple(
            tuple(value for value in grid if value in before or any(value == row[axis] for row in additions))
            for axis, (grid, before) in enumerate(zip(values, state.values, strict=True))
        )
        cost = state.cost + cost_of_one * len(additions)
        state = replace(state, candidates=(*state.candidates, *additions), values=values, cost=cost)


def _best(state: SearchState, design: str, losses: Losses) -> Candidate:
    """A design's candidate with the lowest loss; of several the first."""
    return min(state.candidates, key=lambda candidate: losses[Trial(design, candidate)])


def _missing_neighbors(
    search: Search, state: SearchState
) -> tuple[tuple[tuple[Value, ...], ...], list[Candidate], dict[str, tuple[str, ...]]]:
    """The grids with new ends, the untried neighbors of the best candidates, and where these lie."""
    grids = list(state.values)
    additions: list[Candidate] = []
    open_ends: dict[str, tuple[str, ...]] = {}
    for name, best in state.best.items():
        for side, neighbor in _neighbors(search, grids, best):
            if neighbor in state.candidates:
                continue
            open_ends[name] = (*open_ends.get(name, ()), side)
            new = [(axis, value) for axis, value in enumerate(neighbor) if value not in grids[axis]]
            if any(len(grids[axis]) >= len(search.fields[axis].values) + MAX_ADDED_VALUES for axis, _ in new):
                continue
            for axis, value in new:
                grids[axis] = tuple(sorted([*grids[axis], value], key=float))
            additions += [neighbor] if neighbor not in additions else []
    return tuple(grids), additions, open_ends


def _neighbors(
    search: Search, grids: Sequence[Sequence[Value]], candidate: Candidate
) -> Iterator[tuple[str, Candidate]]:
    """(where, candidate) of the next values of each grid, or of values that continue it: "lr above"."""
    for axis, tuned in enumerate(search.fields):
        for direction, word in ((-1, "below"), (1, "above")) if tuned.is_number else ():
            grid = grids[axis]
            index = grid.index(candidate[axis]) + direction
            value = grid[index] if 0 <= index < len(grid) else tuned.next_value(grid, direction)
            if value is not None:
                yield (
                    f"{tuned.name} {word} {format_value(candidate[axis])}",
                    (*candidate[:axis], value, *candidate[axis + 1 :]),
                )


def best_shared(search: Search, state: SearchState, losses: Losses) -> Candidate:
    """The candidate with the lowest mean loss over all designs."""
    return min(state.candidates, key=lambda values: sum(losses[Trial(name, values)] for name in search.designs))


TUNING_FILE = "tuning.json"
MIN_TRIAL_STEPS = 32  # with fewer, most of a run would be its warmup


# runs tasks, or reads their saved results, and calls the function with each result
RunTasks = Callable[[list[Task], Callable[[Task, Result], None]], None]


@dataclass
class Tuning:
    """A search and the results of its trials. steps: of each design's whole run, at the shared batch size."""

    plan: TuningPlan
    search: Search
    steps: Mapping[str, int]
    results: dict[Trial, Result] = field(default_factory=dict)

    @property
    def state(self) -> SearchState:
        """The search after the finished trials."""
        return search_state(self.search, self.losses())

    @property
    def field_names(self) -> list[str]:
        """The names of the tuned fields."""
        return [field.name for field in self.plan.fields]

    def losses(self) -> dict[Trial, float]:
        """Bits per byte of each finished trial; infinite where it diverged or failed."""
        return {
            trial: result["bits_per_byte"] if result["status"] == "done" else math.inf
            for trial, result in self.results.items()
        }


def start_tuning(comparison: Comparison, steps: Mapping[str, int]) -> Tuning:
    """The search of a comparison's plan, before its first trial.

    A comparison that gained seeds keeps the search that it started with. Raises ConfigError for a budget and DataError
    for a text that is too small.
    """
    plan, text, file = comparison.plan.tuning, comparison.text, comparison.out / TUNING_FILE
    assert plan is not None
    split_held_out(text.validation, comparison.plan.sequence_length, text.tokenizer.byte_lengths)
    seconds: dict[str, float] = {}
    if plan.budget_kind == "seconds":
        remedy = "a tuning budget that is a share of the training needs no timing"
        for entry in comparison.plan.entries:
            seconds[entry.name] = steps[entry.name] * seconds_per_step(comparison, entry, remedy)
    first_plan = comparison.plan
    if file.is_file():
        first_plan = replace(first_plan, seeds=tuple(read_json_file(file)["seeds"]))
    search = make_search(first_plan, plan, steps, seconds)
    write_json_file(file, {"seeds": list(first_plan.seeds)})
    return Tuning(plan, search, steps)


def finish_tuning(comparison: Comparison, tuning: Tuning, run: RunTasks) -> None:
    """Run the unfinished trials of the search.

    Raises MachineError if every trial of a design diverged, and CheckpointError if the folder's trials have
    another length: successive halving, since removed, began with shorter ones.
    """
    entries = {entry.name: entry for entry in comparison.plan.entries}
    while trials := tuning.state.pending:
        tasks = {_trial_task(comparison, tuning, entries[trial.design], trial): trial for trial in trials}
        if not all(task.result_file.is_file() for task in tasks):
            fraction = tuning.search.fraction
            length = "whole runs" if fraction > 0.999 else f"runs of {fraction:.0%} of the length"
            progress.print_status(f"tuning: {len(trials)} {length}")

        def add(task: Task, result: Result, tasks: dict[Task, Trial] = tasks) -> None:
            settings = Settings(**task.request["settings"])
            if result["status"] == "done" and result["train_tokens"] != settings.steps * settings.tokens_per_step:
                raise CheckpointError(
                    f"{comparison.out}: tuned by successive halving, now removed; compare in another folder, where "
                    "every value is tried on runs of one length"
                )
            tuning.results[tasks[task]] = result

        run(list(tasks), add)
    losses, state = tuning.losses(), tuning.state
    for name, best in state.best.items():
        if math.isinf(losses[Trial(name, best)]):
            tried = ", ".join(tuning.field_names)
            raise MachineError(f"tune {tried}: every run of {name} diverged or failed; give lower values")


def check_tuning(plan: ComparisonPlan) -> None:
    """Raise ConfigError for a budget that is too small, where that is known before the text is read and steps timed."""
    tuning, is_counted = plan.tuning, plan.budget_kind == "tokens" and plan.token_steps > 0
    if tuning is not None and tuning.budget_kind == "share" and is_counted:
        make_search(plan, tuning, {entry.name: plan.token_steps for entry in plan.entries}, {})


def make_search(
    plan: ComparisonPlan, tuning: TuningPlan, steps: Mapping[str, int], run_seconds: Mapping[str, float]
) -> Search:
    """The search of a plan. run_seconds: of each design's whole run, for a budget in seconds.

    Raises ConfigError for a budget that is too small, naming the smallest that is not.
    """
    names = ", ".join(field.name for field in tuning.fields)
    batches = [int(value) for field in tuning.fields if field.name == "batch_size" for value in field.values]
    fewest = min(steps.values()) * plan.batch_size // max([plan.batch_size, *batches])
    if fewest < MIN_TRIAL_STEPS:
        raise ConfigError(
            f"tune {names}: a run has {fewest} steps, and distinguishing values takes at least {MIN_TRIAL_STEPS}; "
            "train longer"
        )
    if tuning.budget_kind == "share":
        costs = dict.fromkeys(steps, 1.0)
        budget = tuning.budget_value * len(steps) * len(plan.seeds)
    else:
        costs, budget = dict(run_seconds), tuning.budget_value
    try:
        return Search(tuning.fields, costs, budget, MIN_TRIAL_STEPS / fewest)
    except BudgetTooSmall as error:
        least = error.least_budget * tuning.budget_value / budget
        unit = "times the comparison's training" if tuning.budget_kind == "share" else "seconds"
        raise ConfigError(
            f"tune {names}: a budget of {tuning.budget_value:g} {unit} is too small for its values; give at least "
            f"{_round_up(least)}, or fewer values"
        ) from None


def _round_up(value: float) -> str:
    """Two digits, rounded up: 1.31 → 1.4."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:.6g}"


def _trial_task(comparison: Comparison, tuning: Tuning, entry: DesignEntry, trial: Trial) -> Task:
    """The task of a trial: it saves and evaluates only at its end."""
    text = describe_candidate(tuning.field_names, trial.candidate)
    stem = f"{entry.name}-tune{TUNING_SEED}-{text.replace(', ', '-').replace(' ', '=').replace('/', '_')}"
    task = tuned_task(comparison, tuning, entry, trial.candidate, TUNING_SEED, fraction=tuning.search.fraction)
    settings = {**task.request["settings"], "save_every": None, "evaluate_every": None}
    task = _renamed(task, f"{entry.name}, {text}", stem)
    return replace(task, request={**task.request, "task": "loss", "held_out": "tuning", "settings": settings})


def tuned_task(
    comparison: Comparison,
    tuning: Tuning,
    entry: DesignEntry,
    candidate: Candidate,
    seed: int,
    *,
    fraction: float = 1.0,
) -> Task:
    """A training at a candidate's values. fraction: of the whole run's tokens."""
    plan = comparison.plan
    overrides = tuned_settings(tuning.plan.fields, candidate, plan.lr_scale)
    batch_size = int(overrides.get("batch_size", plan.batch_size))
    steps = max(1, int(fraction * tuning.steps[entry.name] * plan.batch_size / batch_size + 1e-9))
    task = training_task(comparison, entry, seed, steps)
    interval = plan_evaluations(steps, batch_size * plan.sequence_length).interval
    settings = Settings(**{**task.request["settings"], **overrides, "evaluate_every": interval})
    return replace(task, request={**task.request, "settings": asdict(settings), "held_out": "final"})


def final_task(comparison: Comparison, tuning: Tuning, entry: DesignEntry, seed: int) -> Task:
    """A run of the comparison at the design's own best values."""
    return tuned_task(comparison, tuning, entry, tuning.state.best[entry.name], seed)


def shared_task(comparison: Comparison, tuning: Tuning, entry: DesignEntry, seed: int) -> Task:
    """A run at the best shared values, on a seed of the comparison."""
    shared = best_shared(tuning.search, tuning.state, tuning.losses())
    task = tuned_task(comparison, tuning, entry, shared, seed)
    return _renamed(task, f"{entry.name}, shared values, seed {seed}", f"{entry.name}-shared-seed{seed}")


def _renamed(task: Task, label: str, stem: str) -> Task:
    """The same task with its own result and folder."""
    result_file = task.result_file.with_name(f"{stem}.json")
    return replace(
        task, label=label, result_file=result_file, request={**task.request, "out": str(result_file.with_suffix(""))}
    )


# The report on tuning: the curves, the chosen values, and whether a shared value would change the answer.


Runs = Mapping[str, Sequence[Run]]
MAX_PAIRS = 4  # in a sentence


def tuning_report(tuning: Tuning, runs: Runs, shared_runs: Runs | None) -> TuningReport:
    """The report on tuning. runs: of the comparison, at each design's own best values.

    shared_runs: same seeds, at the best shared values, by design; empty if the trials gave no reason to run
    them, None while that is undecided.
    """
    state, names = tuning.state, tuning.field_names
    shared = best_shared(tuning.search, state, tuning.losses())
    report = TuningReport(
        fields=[
            TunedFieldReport(
                name=field.name,
                is_number=field.is_number,
                values=list(values),
                added=[value for value in values if value not in field.values],
            )
            for field, values in zip(tuning.plan.fields, state.values, strict=True)
        ],
        budget=TuningBudget(
            kind=tuning.plan.budget_kind,
            value=tuning.plan.budget_value,
            runs=len(tuning.results),
            whole_runs=sum(tuning.search.fraction for _ in tuning.results),
            seconds=sum(result["seconds"] for result in tuning.results.values() if result["status"] == "done"),
        ),
        rungs=[Rung(fraction=tuning.search.fraction, seed=TUNING_SEED, candidates=list(map(list, state.candidates)))],
        designs=[_design_report(tuning, name) for name in tuning.search.designs],
        shared_values=SharedValues(
            values=list(shared),
            text=describe_candidate(names, shared),
            runs=None if shared_runs is None else _scores(shared_runs),
            pairs=_pairs(runs, shared_runs) if shared_runs else [],
        ),
    )
    return replace(report, sentences=_sentences(report))


def _design_report(tuning: Tuning, name: str) -> TunedDesign:
    state = tuning.state
    best = state.best[name]
    results = {candidate: tuning.results[Trial(name, candidate)] for candidate in state.candidates}
    return TunedDesign(
        name=name,
        best=list(best),
        text=describe_candidate(tuning.field_names, best),
        bits_per_byte=results[best].get("bits_per_byte"),
        open_ends=list(state.open_ends.get(name, ())),
        trials=[
            TrialResult(
                rung=0,
                values=list(candidate),
                status=result["status"],
                bits_per_byte=result["bits_per_byte"] if result["status"] == "done" else None,
                train_tokens=result.get("train_tokens"),
            )
            for candidate, result in results.items()
        ],
    )


def shared_value_matters(tuning: Tuning, runs: Runs) -> bool:
    """Whether the trials suggest that a shared value changes the answer, so that it is worth running.

    They do if the difference between two designs at the best shared values has another sign than at each design's own
    best, or differs from it by more than the half-width of the comparison's interval.
    """
    losses = tuning.losses()
    shared = best_shared(tuning.search, tuning.state, losses)

    def loss(name: str, values: Candidate) -> float:
        return losses[Trial(name, values)]

    for first, second in combinations(tuning.search.designs, 2):
        at_shared = loss(first, shared) - loss(second, shared)
        own = loss(first, tuning.state.best[first]) - loss(second, tuning.state.best[second])
        half = half_width(paired_difference(runs[first], runs[second]))
        if not math.isfinite(at_shared) or at_shared * own < 0 or abs(at_shared - own) > (half or 0.0):
            return True
    return False


def needs_shared_run(tuning: Tuning, name: str) -> bool:
    """Whether the best shared values differ from a design's own."""
    return best_shared(tuning.search, tuning.state, tuning.losses()) != tuning.state.best[name]


def _scores(runs: Runs) -> dict[str, list[SharedRun]]:
    """The seed, status and bits per byte of each run."""
    return {
        name: [SharedRun(seed=run.seed, status=run.status, bits_per_byte=run.bits_per_byte) for run in of_design]
        for name, of_design in runs.items()
    }


def _pairs(runs: Runs, shared_runs: Runs) -> list[SharedPair]:
    """For each pair of designs, the difference at their own best values and at the shared ones, on the same seeds."""
    return [
        SharedPair(
            designs=[first, second],
            own=paired_difference(runs[first], runs[second]),
            at_shared_values=paired_difference(shared_runs[first], shared_runs[second]),
        )
        for first, second in combinations(runs, 2)
    ]


def _sentences(report: TuningReport) -> list[str]:
    budget = report.budget
    chosen: dict[str, list[str]] = {}
    for design in report.designs:
        chosen.setdefault(design.text, []).append(design.name)
    parts = [f"{text} ({join_names(names, 8)})" for text, names in chosen.items()]
    cost = f"{budget.runs} runs, together as long as {budget.whole_runs:.1f} of the comparison's"
    sentences = [f"Each design was trained at its own best values, found by {cost}: {join_names(parts, 8)}."]
    for tuned in report.fields:
        if tuned.added:
            added = join_names([format_value(value) for value in tuned.added], 8)
            sentences.append(f"A best value of {tuned.name} was at an edge of its range, which was widened by {added}.")
    open_ends = {design.name: design.open_ends for design in report.designs if design.open_ends}
    if open_ends:
        parts = [f"{name} ({' and '.join(ends)})" for name, ends in open_ends.items()]
        sentences.append(
            f"Not tried next to the best value: {join_names(parts, 8)}. A larger budget may find a better one."
        )
    return sentences if report.shared_values.runs is None else [*sentences, _shared_sentence(report)]


def _shared_sentence(report: TuningReport) -> str:
    """Whether one shared value would have given another answer."""
    shared = report.shared_values
    if len(report.designs) == 1:
        return "There is no second design to share values with."
    if all(design.best == shared.values for design in report.designs):
        return "All designs have the same best values, so sharing them does not change the answer."
    if not shared.runs:
        return (
            f"The best shared values, {shared.text}, would likely give the same answer: in the "
            "one-seed trials they change neither the order nor any difference by more than its interval here."
        )
    changed = [pair for pair in shared.pairs if judgment(pair.own) != judgment(pair.at_shared_values)]
    start = f"All designs were run at the best shared values too, {shared.text}, on the same seeds"
    if not changed:
        return f"{start}: the answers do not change."
    parts = [
        f"{pair.designs[0]} − {pair.designs[1]} is {format_difference(pair.at_shared_values)} "
        f"({judgment(pair.at_shared_values)}) at shared values and {format_difference(pair.own)} "
        f"({judgment(pair.own)}) at their own best values"
        for pair in changed[:MAX_PAIRS]
    ]
    more = f"; and {len(changed) - MAX_PAIRS} more pairs" if len(changed) > MAX_PAIRS else ""
    return f"{start}, and the answers differ: {'; '.join(parts)}{more}."
