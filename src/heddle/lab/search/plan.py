"""What a search may replace, what that saves, the goals, and how long the search takes: nothing is fitted yet."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from heddle.conversion.convert import ConversionSource
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, Weights
from heddle.data.corpus import Corpus
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.budget import TimeBudget, format_seconds
from heddle.lab.conversion.budget import least_calibration, text_of_size
from heddle.lab.search.goals import (
    DECODE_ROUNDS,
    DEFAULT_LENGTH,
    MEASURED,
    DecodeTimer,
    Goal,
    check_recall_length,
    decode_speed,
    recall_rows,
)
from heddle.lab.search.scores import Evaluator, Replacement, Replacements, chosen_targets, fit_seconds, saved_costs
from heddle.lab.search.solve import FloatArray, ScoreTable, solve
from heddle.model.config import ModelConfig
from heddle.progress import format_duration, print_status, progress_bar
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import first_difference

SEARCH_FILE = "search.json"
SCORE_TOKENS, CHECK_TOKENS = 2**12, 2**14  # at most
TIMED_TOKENS = 2**13  # of the part of a text on which fits are timed
CHECKED_PAIRS = 60
CANDIDATES = 4  # of the solver, checked on whole models
FRONTIER_POINTS = 8
REFINEMENTS = 3  # budgets that are tried between the last that misses a goal and the first that meets all


def search_tokens(calibration_tokens: int) -> int:
    """The tokens that a search reads: to calibrate on, and others for scores and for checks of whole models."""
    return calibration_tokens + min(SCORE_TOKENS, calibration_tokens // 2) + min(CHECK_TOKENS, calibration_tokens)


def kept_layers(text: str | None, design: ModelConfig) -> tuple[int, ...]:
    """`0,5` -> (0, 5). Raises ConfigError for anything but layers of the design."""
    try:
        layers = tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--keep {text}: is not a list of layers; write their numbers, such as 0,5") from None
    if wrong := [layer for layer in layers if not 0 <= layer < design.depth]:
        raise ConfigError(f"--keep {text}: the model has layers 0 to {design.depth - 1}, and no {wrong[0]}")
    if len({*layers}) == design.depth:
        raise ConfigError(f"--keep {text}: leaves no layer to change; keep fewer of the {design.depth} layers")
    return layers


def split_text(text: CalibrationText) -> tuple[CalibrationText, CalibrationText, CalibrationText]:
    """A text of `search_tokens` in whole batches: to fit on, to score on, and to check whole models on."""
    counts = [batch.numel() for batch in text.batches]
    score, check = (max(1, round(tokens / counts[0])) for tokens in (SCORE_TOKENS, CHECK_TOKENS))
    score, check = (min(each, max(1, len(counts) // 4)) for each in (score, check))
    if len(counts) < 3:
        raise ConfigError("--calibration-tokens: too few for a search, which fits, scores and checks on three texts")
    ends = np.cumsum([0, len(counts) - score - check, score, check]).tolist()
    samples = text.samples // len(counts)
    parts = [
        replace(text, batches=text.batches[a:b], layouts=text.layouts[a:b], samples=samples * (b - a))
        for a, b in itertools.pairwise(ends)
    ]
    return parts[0], parts[1], parts[2]


def _axis(goals: Sequence[Goal]) -> str:
    """The cost of the frontier: the one to minimize, or the bytes that decoding reads, or the first with a limit."""
    priced = [goal for goal in goals if not goal.is_measured]
    least = [goal.cost for goal in priced if goal.limit is None]
    read = [f"reads@{goal.length}" for goal in goals if goal.name == "decode"]
    return [*least, *read, *(goal.cost for goal in priced)][0]


class Plan:
    """The possible replacements of each layer, what each would save, and the goals; no weights are read or fitted.

    text: that replacements are fitted to, or one of its size. axis: the cost of the frontier. limits: of costs.
    """

    def __init__(
        self, weights: Weights, text: CalibrationText, goals: Sequence[Goal], only: Sequence[str], keep: Sequence[int],
        sequence_length: int,
    ) -> None:  # fmt: skip
        """Raises ConfigError for goals that no choice meets, with what is possible."""
        self.weights = weights
        targets = chosen_targets(weights.design, sequence_length, only)
        self.replacements = Replacements(weights, text, targets, keep)
        order = list(MEASURED)
        self.measured_goals = sorted(
            (goal for goal in goals if goal.is_measured), key=lambda goal: order.index(goal.name)
        )
        priced = [goal for goal in goals if not goal.is_measured]
        lengths = sorted({goal.length for goal in goals if goal.length} or {DEFAULT_LENGTH})
        self.axis = _axis(goals)
        costs, self.totals = saved_costs(weights, self.replacements.items, lengths)
        self.limits = {goal.cost: goal.limit * self.totals[goal.cost] for goal in priced if goal.limit is not None}
        saved = np.stack([costs[name] for name in {self.axis: 0, **self.limits}]).min(0)
        useful = np.flatnonzero(saved < 0)
        self.replacements.keep_only(useful.tolist())
        self.items, self.costs = self.replacements.items, {name: row[useful] for name, row in costs.items()}
        self.targets = [target for target in targets if any(item.target == target for item in self.items)]
        table = self._table(np.zeros(len(self.items)), np.zeros((len(self.items), len(self.items))))
        if solve(table, self.limits, pairs=False) is None:
            least = {goal.text: self._least(replace(table, kl=self.costs[goal.cost]), goal.cost) for goal in priced}
            shown = ", ".join(f"{text} reaches {share:.1%}" for text, share in least.items())
            raise ConfigError(f"--search: no choice of these layers meets the goals ({shown} alone); give larger ones")

    def _least(self, table: ScoreTable, cost: str) -> float:
        """The least share of a cost."""
        found = solve(table, {}, pairs=False)
        assert found is not None
        return table.cost(cost, found.choice) / self.totals[cost]

    def _table(self, kl: FloatArray, gram: FloatArray) -> ScoreTable:
        items, depth = self.items, self.weights.design.depth
        needs = {number: item.needs for number, item in enumerate(items) if item.needs}
        layers, names = tuple(item.layer for item in items), tuple(item.target for item in items)
        return ScoreTable(depth, layers, names, kl, gram, self.costs, self.totals, needs)


def sizes_on_text(targets: Sequence[str]) -> bool:
    """Whether a text decides the sizes of one of these."""
    return any(parse_rewrite(f"layers.0.{target}").sizes_on_text for target in targets)


def check_goals(
    weights: Weights,
    text: CalibrationText,
    goals: Sequence[Goal],
    only: Sequence[str],
    keep: Sequence[int],
    length: int,
) -> None:
    """Raises ConfigError for goals that no choice meets, before the text is read, unless the text decides sizes.

    text: of the text's size. length: of its sequences.
    """
    check_recall_length(goals, length)
    if not sizes_on_text(chosen_targets(weights.design, length, only)):
        Plan(weights, text, goals, only, keep, length)


@dataclass(frozen=True)
class SearchInput:
    """What a search reads. folder: of its work, which the same search continues from. corpus: of the text.

    second: another text, of the same number of tokens, and its name. timer: measures tokens per second.
    """

    source: ConversionSource
    text: CalibrationText
    goals: Sequence[Goal]
    only: Sequence[str]
    keep: Sequence[int]
    sequence_length: int
    folder: Path
    corpus: Corpus
    budget: TimeBudget | None = None
    second: CalibrationText | None = None
    timer: DecodeTimer = decode_speed


def checked_identity(given: SearchInput, items: Sequence[Replacement]) -> dict[str, Any]:
    """What a search is recognized by in its folder. Raises CheckpointError if the folder has another search."""
    texts = [{"sha256": text.sha256, "tokens": text.tokens} for text in split_text(given.text)]
    names = [item.file_name for item in items]
    identity = {"source": given.source.weights_sha256, "texts": texts, "replacements": names} | given.text.rows.record()
    path = given.folder / SEARCH_FILE
    if path.is_file() and (difference := first_difference(read_json_file(path), identity)):
        raise CheckpointError(f"{path.parent}: has another search: {difference}; remove it, or choose another name")
    return identity


def expected_seconds(given: SearchInput) -> tuple[Plan, float]:
    """Print and return what a search tries, and about how many seconds it takes, without the fits in its folder.

    Of each kind of replacement one is fitted with a few steps, and a whole model is read, on a part of the text. Raises
    ConfigError for goals that no choice meets, or if the budget leaves less time, and CheckpointError if the folder has
    another search.
    """
    source, (fit, score, check) = given.source.weights, split_text(given.text)
    part = _beginning(fit, max(TIMED_TOKENS, least_calibration(source.design, given.sequence_length)))
    targets = chosen_targets(source.design, given.sequence_length, given.only)
    planned = part if sizes_on_text(targets) else text_of_size(fit.tokens, given.sequence_length)
    plan = Plan(source, planned, given.goals, given.only, given.keep, given.sequence_length)
    checked_identity(given, plan.items)
    for target, reason in plan.replacements.left_out.items():
        print_status(f"search: without {target}: {reason}")
    seconds = 0.0
    with progress_bar("timing", len(plan.targets), "kinds of replacements") as bar:
        for target in plan.targets:
            own = [item for item in plan.items if item.target == target]
            left = [item for item in own if not (given.folder / item.file_name).is_file()]
            if left:
                seconds += len(left) * fit_seconds(source, left[0], part, fit.tokens)
            bar.advance(1)
    sample = _beginning(score, TIMED_TOKENS // 4)
    began = time.monotonic()
    evaluator = Evaluator(source, sample, given.folder)
    evaluator.measure([evaluator.reference.cpu().numpy()])
    per_token = (time.monotonic() - began) / sample.tokens
    walked = FRONTIER_POINTS + CANDIDATES + (REFINEMENTS if plan.measured_goals else 0)
    read = 2 * check.tokens  # of a whole model: KL, and losses
    for goal in plan.measured_goals:
        if goal.name == "recall":
            with TemporaryDirectory() as folder:
                needles = recall_rows(given.corpus, check, Path(folder) / "recall.tokens")
                read += sum(batch.targets.size for _, batches in needles for batch in batches)
        elif goal.length is not None:
            began = time.monotonic()
            given.timer(source.design, goal.length, str(fit.device), source.dtype)
            seconds += 2 * DECODE_ROUNDS * walked * (time.monotonic() - began)
    seconds += per_token * (2 * len(plan.items) + CHECKED_PAIRS) * score.tokens
    seconds *= 1 if given.second is None else 2
    seconds += per_token * (walked + 2 * len(plan.targets)) * read
    kinds = f"{len(plan.items)} replacements of {len(plan.targets)} kinds"
    print_status(f"search: {kinds}, about {format_duration(seconds)}")
    budget = given.budget
    if budget is not None and seconds > budget.remaining:
        needed = format_seconds(budget.seconds - budget.remaining + seconds)
        raise ConfigError(
            f"--budget {format_seconds(budget.seconds)}: the search takes about {needed}; give more time, fewer "
            "alternatives with --only, or fewer --calibration-tokens"
        )
    return plan, seconds


def _beginning(text: CalibrationText, tokens: int) -> CalibrationText:
    """The first batches of a text, with at least so many tokens if it has them."""
    ends = np.cumsum([batch.numel() for batch in text.batches])
    count = min(len(ends), int(np.searchsorted(ends, tokens)) + 1)
    return replace(text, batches=text.batches[:count], layouts=text.layouts[:count])
