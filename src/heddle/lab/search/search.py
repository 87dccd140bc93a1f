"""Search a design inside a trained model: fit and score each layer's alternatives, solve, check whole models."""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from heddle.conversion.convert import ConversionSource
from heddle.conversion.rewrites.layerwise import Layerwise
from heddle.conversion.weights import CalibrationText
from heddle.errors import CheckpointError, ConfigError
from heddle.lab.compare.budget import TimeBudget, format_seconds
from heddle.lab.compare.statistics import seed_half_width
from heddle.lab.search.results import FrontierPoint, MeasuredChoice, PairCheck, ScoredReplacement, SearchResults
from heddle.lab.search.scores import (
    Evaluator,
    Replacements,
    SearchedConversion,
    chosen_targets,
    measure_singles,
    saved_costs,
    single_scores,
)
from heddle.lab.search.solve import (
    SLACK,
    Choice,
    FloatArray,
    ScoreTable,
    Solution,
    frontier,
    greedy,
    random_choice,
    single_kind,
    solve,
)
from heddle.model.config import ModelConfig
from heddle.progress import format_duration, print_status, progress_bar
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.run_log import first_difference

# What a search is asked for: goals such as `state@32k=25%`, and layers that stay.

SCORE_TOKENS, CHECK_TOKENS = 2**12, 2**14  # at most
FLOPS_LENGTH = 2048  # where no goal names a length
GOAL = re.compile(
    r"(state@(\d+)(k?)|flops|parameters|quality)(?:(?:<=|=)\+?(\d*\.?\d+)(%?))?"  # cost, length, k, limit, percent
)
EXAMPLE = "state@32k=25%, flops=80%, parameters=90% or quality<=0.02"


@dataclass(frozen=True)
class Goal:
    """A limit of a cost or of quality. limit: a share of MODEL's cost, or added bits per byte; None: the least.

    cost: as in `costs_of`, or "quality".
    """

    text: str
    cost: str
    limit: float | None


def parse_goals(texts: Sequence[str]) -> list[Goal]:
    """Read goals such as `state@32k=25%`. Raises ConfigError."""
    found = [(text, GOAL.fullmatch(text)) for text in texts]
    for text, match in found:
        if match is None:
            raise ConfigError(f"--search {text}: is not a goal; write {EXAMPLE}")
    lengths = [int(m[2]) * (1024 if m[3] else 1) for _, m in found if m is not None and m[2]]
    if not all(lengths):
        raise ConfigError(f"--search {' '.join(texts)}: a context of 0 tokens has no state; write {EXAMPLE}")
    goals = [_goal(text, match, max(lengths, default=FLOPS_LENGTH)) for text, match in found if match is not None]
    costs = [goal.cost for goal in goals]
    if len(set(costs)) < len(costs):
        raise ConfigError(f"--search {' '.join(texts)}: two goals limit the same; give one of them")
    if costs == ["quality"]:
        raise ConfigError(f"--search {texts[0]}: says nothing to save; add another goal, such as state@32k")
    if goals and "quality" not in costs and all(goal.limit is None for goal in goals):
        raise ConfigError(f"--search {texts[0]}: has no limit; write {EXAMPLE}")
    return goals


def _goal(text: str, match: re.Match[str], longest: int) -> Goal:
    limit = None if match[4] is None else float(match[4]) / (100 if match[5] else 1)
    if match[1] == "quality":
        if limit is None or match[5]:
            raise ConfigError(f"--search {text}: needs added bits per byte; write quality<=0.02")
        return Goal(text, "quality", limit)
    if limit is not None and not 0 < limit <= 1:
        raise ConfigError(f"--search {text}: is not a share of MODEL's; write {EXAMPLE}")
    length = longest if match[2] is None else int(match[2]) * (1024 if match[3] else 1)
    cost = match[1].split("@")[0]
    return Goal(text, cost if cost == "parameters" else f"{cost}@{length}", limit)


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
    return layers


CHECKED_PAIRS = 60
CANDIDATES = 4  # of the solver, checked on whole models
FRONTIER_POINTS = 8
WORST_KL = 1e3  # of a replacement whose logits are not finite: it is never chosen where there is another


def split_text(text: CalibrationText) -> tuple[CalibrationText, CalibrationText, CalibrationText]:
    """A text of `search_tokens` in whole batches: to fit on, to score on, and to check whole models on."""
    counts = [batch.numel() for batch in text.batches]
    score, check = (max(1, round(tokens / counts[0])) for tokens in (SCORE_TOKENS, CHECK_TOKENS))
    score, check = (min(each, max(1, len(counts) // 4)) for each in (score, check))
    if len(counts) < 3:
        raise ConfigError(
            "--calibration-tokens: are too few for a search, which fits, scores and checks on three texts"
        )
    ends = np.cumsum([0, len(counts) - score - check, score, check]).tolist()
    samples = text.samples // len(counts)
    parts = [
        replace(text, batches=text.batches[a:b], layouts=text.layouts[a:b], samples=samples * (b - a))
        for a, b in itertools.pairwise(ends)
    ]
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True)
class SearchInput:
    """What a search reads. folder: of its work, which the same search continues from. byte_lengths: of the tokens."""

    source: ConversionSource
    text: CalibrationText
    goals: Sequence[Goal]
    only: Sequence[str]
    keep: Sequence[int]
    sequence_length: int
    folder: Path
    byte_lengths: np.ndarray
    budget: TimeBudget | None = None


class Search:
    """One search. fit, score, check: the three texts."""

    def __init__(self, given: SearchInput) -> None:
        self.given, self.began = given, time.monotonic()
        self.weights = given.source.weights
        self.fit, self.score, self.check = split_text(given.text)
        targets = chosen_targets(self.weights.design, given.sequence_length, given.only)
        self.replacements = Replacements(self.weights, self.fit, targets, given.keep)
        self.items = self.replacements.items
        self.targets = [target for target in targets if any(item.target == target for item in self.items)]
        for target, reason in self.replacements.left_out.items():
            print_status(f"search: without {target}: {reason}")
        priced = [goal for goal in given.goals if goal.cost != "quality"]
        lengths = sorted({int(goal.cost.split("@")[1]) for goal in priced if "@" in goal.cost} or {FLOPS_LENGTH})
        self.axis = priced[0].cost
        self.costs, self.totals = saved_costs(self.weights, self.items, lengths)
        self.quality = next((goal.limit for goal in given.goals if goal.cost == "quality"), None)
        self.limits = {goal.cost: goal.limit * self.totals[goal.cost] for goal in priced if goal.limit is not None}
        self._check_limits(priced)
        self._check_folder()

    def _check_limits(self, priced: Sequence[Goal]) -> None:
        """Raises ConfigError, with what is possible, before anything is fitted."""
        zeros = np.zeros(len(self.items))
        table = self._table(zeros, np.zeros((len(self.items), len(self.items))))
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

    def _check_folder(self) -> None:
        """Raises CheckpointError if the folder has another search."""
        path = self.given.folder / "search.json"
        texts = [{"sha256": text.sha256, "tokens": text.tokens} for text in (self.fit, self.score, self.check)]
        identity = {
            "source": self.given.source.weights_sha256,
            "texts": texts,
            "replacements": [item.file_name for item in self.items],
        } | self.fit.rows.record()
        if path.is_file() and (difference := first_difference(read_json_file(path), identity)):
            raise CheckpointError(f"{path.parent}: has another search: {difference}; remove it, or choose another name")
        write_json_file(path, identity)

    @cached_property
    def scoring(self) -> Evaluator:
        """On the text of the scores."""
        return Evaluator(self.weights, self.score, self.given.folder)

    @cached_property
    def checking(self) -> Evaluator:
        """On the text that no score read."""
        return Evaluator(self.weights, self.check, self.given.folder, self.scoring.model)

    @cached_property
    def _measured(self) -> dict[str, list[float]]:
        path = self.given.folder / "evaluations.json"
        return read_json_file(path) if path.is_file() else {}

    def _once(self, key: str, measure: Callable[[], Iterable[float]]) -> FloatArray:
        """A measurement, read from the folder if it was made."""
        if key not in self._measured:
            self._measured[key] = [float(value) for value in measure()]
            write_json_file(self.given.folder / "evaluations.json", self._measured)
        values: FloatArray = np.array(self._measured[key])
        return values

    def kl(self, choice: Choice, on_check: bool = False) -> FloatArray:
        """KL by sequence of a whole model, on the text of the scores or the one of the checks."""
        items, evaluator = [self.items[item] for item in choice], self.checking if on_check else self.scoring
        key = f"{'check' if on_check else 'score'} {' '.join(map(str, choice))}"
        return self._once(key, lambda: evaluator.divergence(items))

    def added_bits(self, choice: Choice) -> float:
        """The added bits per byte of a whole model on the text of the checks."""

        def bits(of: Choice) -> tuple[float, int]:
            return self.checking.bits([self.items[item] for item in of], self.given.byte_lengths)

        before, after = (self._once(f"bits {' '.join(map(str, of))}", partial(bits, of)) for of in ((), choice))
        return float((after[0] - before[0]) / max(1.0, before[1]))

    def scores(self) -> tuple[FloatArray, ScoreTable]:
        """Fit and score all replacements: the KL of each by sequence, and the table to solve."""
        self._fit()
        with progress_bar("scoring", len(self.items), "replacements") as bar:
            for _ in single_scores(self.scoring, self.items, self.given.folder):
                bar.advance(1)
        by_row, gram = measure_singles(self.scoring, self.items, self.given.folder)
        broken = ~np.isfinite(by_row).all(1)  # such as a fit that diverged
        by_row[broken], gram[broken], gram[:, broken] = WORST_KL, 0.0, 0.0
        return by_row, self._table(by_row.mean(1), gram)

    def _fit(self) -> None:
        """Fit all replacements, after the time of the first ones of each target has been told."""
        left, folder = 0.0, self.given.folder
        for target in self.targets:
            own = [item for item in self.items if item.target == target and not (folder / item.file_name).is_file()]
            if own:
                began = time.monotonic()
                self.replacements.fit_one(own[0], folder)
                left += (len(own) - 1) * (time.monotonic() - began)
        began = time.monotonic()
        self.scoring.divergence(self.items[:1])
        seconds = time.monotonic() - began
        left += seconds * (2 * len(self.items) + CHECKED_PAIRS + len(self.targets) * CHECK_TOKENS / SCORE_TOKENS)
        print_status(
            f"search: {len(self.items)} replacements of {len(self.targets)} kinds, about {format_duration(left)}"
        )
        budget = self.given.budget
        if budget is not None and left > budget.remaining:
            takes, given = format_seconds(left), format_seconds(budget.remaining)
            raise ConfigError(
                f"--budget: leaves {given}, and the search takes about {takes} more; give more time, fewer "
                "alternatives with --only, or fewer --calibration-tokens; what was fitted is kept"
            )
        with progress_bar("fitting", len(self.items), "replacements") as bar:
            for _ in self.replacements.fit_all(folder):
                bar.advance(1)

    def check_pairs(self, table: ScoreTable) -> PairCheck:
        """Measure pairs of replacements on the text of the scores, and compare with both predictions."""
        pairs = [pair for pair in itertools.combinations(range(len(self.items)), 2) if table.is_allowed(pair, {})]
        order = np.random.default_rng(0).permutation(len(pairs))[:CHECKED_PAIRS]
        chosen = [pairs[number] for number in sorted(order.tolist())]
        if not chosen:
            return PairCheck(0, 0.0, 0.0)
        measured = np.array([max(float(self.kl(pair).mean()), 1e-12) for pair in chosen])
        predicted = ([table.value(pair, with_pairs) for pair in chosen] for with_pairs in (True, False))
        return PairCheck(len(chosen), *(float(np.median(np.abs(np.array(each) / measured - 1))) for each in predicted))

    def run(self) -> tuple[SearchedConversion, SearchResults]:
        """Search. Raises ConfigError for goals that cannot be met, CheckpointError for another search's folder."""
        by_row, table = self.scores()
        pair_check = self.check_pairs(table)
        points = frontier(table, self.axis, self._shares(table), self._other_limits())
        limits, candidates = self.limits, dict[Choice, str]()
        if self.quality is not None:
            limits, cheapest = self._cheapest(points)
            candidates[cheapest] = "search, frontier"
        candidates = self._candidates(table, limits) | candidates
        good = [each for each in candidates if self.quality is None or self.added_bits(each) <= self.quality]
        chosen = min(good, key=lambda choice: (float(self.kl(choice, True).mean()), choice))
        if not chosen:
            raise ConfigError("--search: the best that meets the goals is the model as it is; ask for a smaller cost")
        measured = [self._measure(table, chosen, name, choice) for choice, name in candidates.items()]
        for name, choice in self._baselines(table, limits).items():
            measured.append(self._measure(table, chosen, name, choice, is_baseline=True))
        print_status(f"search: chosen: {self._describe(chosen)}")
        results = SearchResults(
            goals=[goal.text for goal in self.given.goals],
            axis=self.axis,
            targets=self.targets,
            left_out=self.replacements.left_out,
            fit_tokens=self.fit.tokens,
            score_tokens=self.score.tokens,
            check_tokens=self.check.tokens,
            chosen=self._by_layer(chosen),
            scores=[self._scored(item, row) for item, row in enumerate(by_row)],
            pair_check=pair_check,
            frontier=[
                FrontierPoint(share, found.value, found.gap, self._by_layer(found.choice)) for share, found in points
            ],
            measured=measured,
            evaluations=len(self.items) + len(self._measured),
            seconds=time.monotonic() - self.began,
        )
        items = tuple(self.items[item] for item in chosen)
        rewrite = Layerwise(choices=self.choices(chosen))
        source, folder = self.given.source, self.given.folder
        return SearchedConversion(source, (rewrite,), self.fit, items, folder), results

    def choices(self, choice: Choice) -> tuple[str, ...]:
        """A choice as `layerwise` writes it: each target with its layers."""
        layers: dict[str, list[int]] = {}
        for item in choice:
            layers.setdefault(self.items[item].target, []).append(self.items[item].layer)
        return tuple(f"layers.{','.join(map(str, own))}.{target}" for target, own in layers.items())

    def _describe(self, choice: Choice) -> str:
        return "; ".join(self.choices(choice)) or "the model as it is"

    def _by_layer(self, choice: Choice) -> list[str]:
        by_layer = {self.items[item].layer: self.items[item].target for item in choice}
        return [by_layer.get(layer, "") for layer in range(self.weights.design.depth)]

    def _shares(self, table: ScoreTable) -> list[float]:
        """The shares of the frontier: evenly in their logarithms from the least possible to 1, and the goal's."""
        least = self._least(replace(table, kl=self.costs[self.axis]), self.axis)
        shares = np.geomspace(max(least, 0.01), 1.0, FRONTIER_POINTS).tolist()
        goal = self.limits.get(self.axis)
        return sorted({*shares, *([] if goal is None else [goal / self.totals[self.axis]])})

    def _other_limits(self) -> dict[str, float]:
        return {name: limit for name, limit in self.limits.items() if name != self.axis}

    def _cheapest(self, points: Sequence[tuple[float, Solution]]) -> tuple[dict[str, float], Choice]:
        """The least share of the axis whose best choice adds few enough bits per byte, as limits, and the choice."""
        assert self.quality is not None
        most = self.limits.get(self.axis, math.inf) / self.totals[self.axis] + SLACK
        possible = [(share, found.choice) for share, found in points if share <= most]
        for share, choice in possible[::-1]:
            if self.added_bits(choice) <= self.quality:
                return {**self.limits, self.axis: share * self.totals[self.axis]}, choice
        least = min(self.added_bits(choice) for _, choice in possible)
        raise ConfigError(
            f"--search quality<={self.quality:g}: the best choice within the other goals adds {least:.3g} bits per "
            "byte; give a larger one, or larger goals"
        )

    def _candidates(self, table: ScoreTable, limits: Mapping[str, float]) -> dict[Choice, str]:
        """The choices that are checked, with their names: the solver's best, the best of single scores, greedy's."""
        found: dict[Choice, str] = {}
        for number in range(CANDIDATES):
            solution = solve(table, limits, without=list(found))
            if solution is not None:
                found[solution.choice] = f"search, rank {number + 1}"
        alone = solve(table, limits, pairs=False)
        if alone is not None:
            found.setdefault(alone.choice, "search without interactions")
        return found

    def _baselines(self, table: ScoreTable, limits: Mapping[str, float]) -> dict[str, Choice]:
        """What else could be chosen: greedily, one kind evenly or by restoring layers, the best random choice."""
        found: dict[str, Choice | None] = {"greedy on the scores": greedy(table, limits)}
        for target in self.targets:
            found[f"{target}, evenly placed"] = even = single_kind(table, limits, target)
            restored = self._restored(table, limits, target)
            found[f"{target}, restored by KL"] = None if restored == even else restored
        generator = np.random.default_rng(0)
        drawn = {random_choice(table, limits, generator) for _ in self.items} - {None}
        if drawn:
            found["best of random choices"] = min(
                (each for each in drawn if each is not None), key=lambda choice: (float(self.kl(choice).mean()), choice)
            )
        return {name: choice for name, choice in found.items() if choice is not None}

    def _restored(self, table: ScoreTable, limits: Mapping[str, float], target: str) -> Choice | None:
        """One kind in all layers but those whose restoring alone lowers the KL most, as many as the limits allow."""
        items = tuple(item for item, name in enumerate(table.names) if name == target)
        if not table.is_allowed(items, {}):  # such as keys shared by neighbors
            return None
        whole = float(self.kl(items).mean())
        gains = {item: whole - float(self.kl(tuple(set(items) - {item})).mean()) for item in items}
        order = sorted(items, key=lambda item: (gains[item], item))
        return single_kind(table, limits, target, [table.layers[item] for item in order])

    def _measure(
        self, table: ScoreTable, chosen: Choice, name: str, choice: Choice, is_baseline: bool = False
    ) -> MeasuredChoice:
        kl = self.kl(choice, True)
        difference, half = mean_and_half(kl - self.kl(chosen, True))
        return MeasuredChoice(
            name=name,
            choice=self._by_layer(choice),
            share=table.cost(self.axis, choice) / self.totals[self.axis],
            predicted=table.value(choice),
            kl=float(kl.mean()),
            difference=difference,
            low=difference - half,
            high=difference + half,
            added_bits=self.added_bits(choice),
            is_baseline=is_baseline,
        )

    def _scored(self, item: int, row: FloatArray) -> ScoredReplacement:
        mean, half = mean_and_half(row)
        return ScoredReplacement(self.items[item].layer, self.items[item].target, mean, mean - half, mean + half)


def mean_and_half(values: FloatArray) -> tuple[float, float]:
    """The mean over sequences, and half of its 95 % interval (Student's t); 0 for one sequence."""
    count = len(values)
    half = seed_half_width(values.tolist()) if count > 1 else 0.0
    return float(values.mean()), half
