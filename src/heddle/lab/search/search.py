"""Search a design inside a trained model: fit and score each layer's alternatives, solve, check whole models."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from heddle.conversion.rewrites.layerwise import Layerwise
from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.lab.compare.budget import format_seconds
from heddle.lab.compare.statistics import seed_half_width
from heddle.lab.search.goals import (
    DECODE_ROUNDS,
    Goal,
    recall_rows,
)
from heddle.lab.search.plan import (
    CANDIDATES,
    CHECKED_PAIRS,
    FRONTIER_POINTS,
    REFINEMENTS,
    SEARCH_FILE,
    Plan,
    SearchInput,
    checked_identity,
    split_text,
)
from heddle.lab.search.results import (
    FrontierPoint,
    Interval,
    MeasuredChoice,
    PairCheck,
    RecallProbe,
    ScoredReplacement,
    SearchResults,
    SecondText,
    TriedChoice,
)
from heddle.lab.search.scores import (
    Evaluator,
    SearchedConversion,
    measure_singles,
    put_together,
    save_array,
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
from heddle.progress import print_status, progress_bar
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.training.evaluation.loss_profile import frequency_groups, position_edges, token_frequencies
from heddle.training.evaluation.scores import correct_predictions

WORST_KL = 1e3  # of a replacement whose logits are not finite: it is never chosen where there is another


class Search(Plan):
    """One search. fit, score, check: the three texts. tried: on the way to the goals."""

    def __init__(self, given: SearchInput) -> None:
        self.given, self.began = given, time.monotonic()
        self.fit, self.score, self.check = split_text(given.text)
        super().__init__(given.source.weights, self.fit, given.goals, given.only, given.keep, given.sequence_length)
        self.tried: list[TriedChoice] = []
        self._values: dict[Goal, list[float]] = {goal: [] for goal in self.measured_goals}
        write_json_file(given.folder / SEARCH_FILE, checked_identity(given, self.items))

    @cached_property
    def scoring(self) -> Evaluator:
        """On the text of the scores."""
        return Evaluator(self.weights, self.score, self.given.folder)

    @cached_property
    def checking(self) -> Evaluator:
        """On the text that no score used."""
        return Evaluator(self.weights, self.check, self.given.folder, self.scoring.model)

    @cached_property
    def _measured(self) -> dict[str, list[float]]:
        path = self.given.folder / "evaluations.json"
        return read_json_file(path) if path.is_file() else {}

    def _once(self, key: str, measure: Callable[[], Iterable[float]]) -> FloatArray:
        """A measurement, read from the folder if it is there."""
        if key not in self._measured:
            self._measured[key] = [float(value) for value in measure()]
            write_json_file(self.given.folder / "evaluations.json", self._measured)
        values: FloatArray = np.array(self._measured[key])
        return values

    def kl(self, choice: Choice, on_check: bool = False) -> FloatArray:
        """KL by sequence of a whole model, on the text of the scores or of the checks."""
        items, evaluator = [self.items[item] for item in choice], self.checking if on_check else self.scoring
        key = f"{'check' if on_check else 'score'} {' '.join(map(str, choice))}"
        return self._once(key, lambda: evaluator.divergence(items))

    @cached_property
    def _token_groups(self) -> np.ndarray:
        """The group of each token by its frequency, int64 [vocab]."""
        return frequency_groups(token_frequencies(self.given.corpus))

    def _losses(self, choice: Choice) -> FloatArray:
        """`Evaluator.losses` of a whole model on the text of the checks, read from the folder if it was made."""
        name = hashlib.sha256(repr(choice).encode()).hexdigest()[:16]
        path = self.given.folder / f"losses-{name}.npy"
        if not path.is_file():
            items, lengths = [self.items[item] for item in choice], self.given.corpus.tokenizer.byte_lengths
            save_array(path, self.checking.losses(items, lengths, self._token_groups))
        found: FloatArray = np.load(path)
        return found

    def added(self, choice: Choice) -> list[Interval | None]:
        """The bits per byte that a whole model adds on the text of the checks, in each group of `Evaluator.losses`."""
        return [added_interval(*pair) for pair in zip(self._losses(()), self._losses(choice), strict=True)]

    def added_bits(self, choice: Choice) -> float:
        """The added bits per byte of a whole model on the text of the checks."""
        added = self.added(choice)[0]
        return 0.0 if added is None else added[0]

    @cached_property
    def needles(self) -> list[tuple[float | None, list[Batch]]]:
        """In the text of the checks."""
        return recall_rows(self.given.corpus, self.check, self.given.folder / "recall.tokens")

    def recall(self, choice: Choice) -> FloatArray:
        """The accuracy of a whole model on each needle [D + 1, N]: at each depth, and without it."""

        def accuracies() -> Iterable[float]:
            model = self.checking.replaced([self.items[item] for item in choice])
            found = (correct_predictions(model, batches) for _, batches in self.needles)
            return [correct / scored for rows in found for correct, scored in rows]

        return self._once(f"recall {' '.join(map(str, choice))}", accuracies).reshape(len(self.needles), -1)

    def speeds(self, choice: Choice, context: int) -> FloatArray:
        """Decoded tokens per second of MODEL and of a whole model, [rounds, 2]."""
        new = put_together(self.weights, [self.items[item] for item in choice], self.given.folder).design
        pair, device = (self.weights.design, new), str(self.fit.device)
        timed = (partial(self.given.timer, design, context, device, self.weights.dtype) for design in pair)
        calls = [*timed] * DECODE_ROUNDS
        flat = self._once(f"decode@{context} {' '.join(map(str, choice))}", lambda: [call() for call in calls])
        return flat.reshape(-1, 2)

    def value(self, goal: Goal, choice: Choice) -> float:
        """A whole model's value for a measured goal, in the unit of its limit."""
        if goal.name == "quality":
            return self.added_bits(choice)
        if goal.name == "recall":
            own, of_source = (float(self.recall(each)[:-1].mean()) for each in (choice, ()))
            return own / of_source
        assert goal.length is not None
        if not choice:
            return 1.0
        before, after = self.speeds(choice, goal.length).T
        return float(np.median(after / before))

    def meets(self, choice: Choice, budget: float) -> bool:
        """Whether a whole model meets all measured goals; it is recorded among the tried choices."""
        measured, missed = dict[str, str](), ""
        for goal in self.measured_goals:
            value = self.value(goal, choice)
            measured[goal.text] = goal.show(value)
            self._values[goal].append(value)
            if not goal.is_met(value):
                missed = goal.text
                break
        tried = TriedChoice(budget, self._by_layer(choice), measured, missed)
        if measured and all(each.choice != tried.choice for each in self.tried):
            self.tried.append(tried)
            shown = f"misses {missed} ({measured[missed]})" if missed else "meets the goals"
            print_status(f"search: {self._describe(choice)}: {shown}")
        return not missed

    def _check_recall(self) -> None:
        """Raises ConfigError if MODEL's recall is not clearly above guessing: a share of it would mean nothing."""
        for goal in self.measured_goals:
            if goal.name == "recall":
                found = self.recall(())
                gain, half = mean_and_half(found[:-1].mean(0) - found[-1])
                if gain <= half:
                    shown = f"finds {found[:-1].mean():.1%} of the hidden tokens, and guesses {found[-1].mean():.1%}"
                    raise ConfigError(
                        f"--search {goal.text}: MODEL {shown} without them ({gain:+.1%} ± {half:.1%}), so it hardly "
                        "recalls; leave the goal out, or give a longer --sequence-length"
                    )

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
        """Raises ConfigError after the fit with which the budget is spent."""
        budget, folder = self.given.budget, self.given.folder
        with progress_bar("fitting", len(self.items), "replacements") as bar:
            for number, _ in enumerate(self.replacements.fit_all(folder), start=1):
                bar.advance(1)
                if budget is not None and budget.remaining <= 0:
                    spent = f"--budget {format_seconds(budget.seconds)}: is spent after {number} fits"
                    raise ConfigError(f"{spent} of {len(self.items)}; the same command with more time continues")

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
        self._check_recall()
        by_row, table = self.scores()
        pair_check = self.check_pairs(table)
        points = frontier(table, self.axis, self._shares(table), self._other_limits())
        limits, candidates = self.limits, dict[Choice, str]()
        if self.measured_goals:
            limits, found = self._walk(table, points)
            candidates[found] = "search, frontier"
        candidates = self._candidates(table, limits) | candidates
        budget = limits.get(self.axis, self.totals[self.axis]) / self.totals[self.axis]
        good = [each for each in candidates if self.meets(each, budget)]
        chosen = min(good, key=lambda choice: (float(self.kl(choice, True).mean()), choice))
        if not chosen:
            raise ConfigError(
                "--search: the best choice that meets the goals is MODEL unchanged; ask for a smaller cost"
            )
        measured = [self._measure(table, chosen, name, choice) for choice, name in candidates.items()]
        others = self._baselines(table, limits)
        second = None
        if self.given.second is not None:
            second, others[f"search on {self.given.second.name}, the second text"] = self._second(table, limits)
        for name, choice in others.items():
            measured.append(self._measure(table, chosen, name, choice, is_baseline=True))
        print_status(f"search: chosen: {self._describe(chosen)}")
        decode = next((goal.length for goal in self.measured_goals if goal.name == "decode"), None)
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
                FrontierPoint(**self._whole(table, found.choice), budget=share, gap=found.gap)
                for share, found in points
            ],
            measured=measured,
            tried=self.tried,
            positions=[*itertools.pairwise(position_edges(max(batch.shape[1] for batch in self.check.batches)))],
            recall=self._probe(),
            decode_context=decode,
            decode_speed=None if decode is None else float(np.median(self.speeds(chosen, decode)[:, 0])),
            second=second,
            evaluations=len(self.items) + len(self._measured),
            seconds=time.monotonic() - self.began,
        )
        return self._conversion(chosen), results

    def _conversion(self, choice: Choice) -> SearchedConversion:
        rewrite, items = Layerwise(choices=self.choices(choice)), tuple(self.items[item] for item in choice)
        return SearchedConversion(self.given.source, (rewrite,), self.fit, items, self.given.folder)

    def baselines(self, results: SearchResults) -> dict[str, SearchedConversion]:
        """The conversions to each baseline of a search that ran, once where names have one choice."""
        numbers = {(item.layer, item.target): number for number, item in enumerate(self.items)}
        found: dict[Choice, str] = {}
        for measured in results.measured:
            choice = tuple(numbers[layer, target] for layer, target in enumerate(measured.choice) if target)
            if measured.is_baseline and choice and measured.choice != results.chosen:
                found.setdefault(choice, measured.name)
        return {name: self._conversion(choice) for choice, name in found.items()}

    def choices(self, choice: Choice) -> tuple[str, ...]:
        """A choice as `layerwise` writes it: each target with its layers."""
        layers: dict[str, list[int]] = {}
        for item in choice:
            layers.setdefault(self.items[item].target, []).append(self.items[item].layer)
        return tuple(f"layers.{','.join(map(str, own))}.{target}" for target, own in layers.items())

    def _describe(self, choice: Choice) -> str:
        return "; ".join(self.choices(choice)) or "the unchanged model"

    def _by_layer(self, choice: Choice) -> list[str]:
        by_layer = {self.items[item].layer: self.items[item].target for item in choice}
        return [by_layer.get(layer, "") for layer in range(self.weights.design.depth)]

    def _shares(self, table: ScoreTable) -> list[float]:
        """The shares of the frontier: evenly in their logarithms from the least possible to 1, and the goal's."""
        least, most = self._least(replace(table, kl=self.costs[self.axis]), self.axis), 1.0
        if self._other_limits():  # they may need more of the axis than MODEL has
            found = solve(table, self.limits, pairs=False)
            assert found is not None
            most = max(most, table.cost(self.axis, found.choice) / self.totals[self.axis])
        shares = np.geomspace(max(least, 0.01), most, FRONTIER_POINTS).tolist()
        goal = self.limits.get(self.axis)
        return sorted({*shares, *([] if goal is None else [goal / self.totals[self.axis]])})

    def _other_limits(self) -> dict[str, float]:
        return {name: limit for name, limit in self.limits.items() if name != self.axis}

    def _walk(self, table: ScoreTable, points: Sequence[tuple[float, Solution]]) -> tuple[dict[str, float], Choice]:
        """The limits with a budget of the axis whose best choice meets the measured goals, and that choice.

        The least such budget; for a goal of speed alone the largest, whose choice adds the least KL.
        """
        total = self.totals[self.axis]
        most = self.limits.get(self.axis, math.inf) / total + SLACK
        possible = [(share, found.choice) for share, found in points if share <= most]
        if any(goal.name != "decode" for goal in self.measured_goals):
            possible.reverse()
        met = next((number for number, (share, choice) in enumerate(possible) if self.meets(choice, share)), None)
        if met is None:
            raise ConfigError(self._why_none())
        (budget, choice), missed = possible[met], possible[met - 1][0] if met else None
        for _ in range(0 if missed is None else REFINEMENTS):
            assert missed is not None
            middle = math.sqrt(budget * missed)
            found = solve(table, {**self._other_limits(), self.axis: middle * total})
            if found is not None and self.meets(found.choice, middle):
                budget, choice = middle, found.choice
            else:
                missed = middle
        return {**self.limits, self.axis: budget * total}, choice

    def _why_none(self) -> str:
        """A sentence on goals that no choice of the frontier meets."""
        for goal, values in self._values.items():
            if values and not any(map(goal.is_met, values)):
                best = goal.show(min(values) if goal.name == "quality" else max(values))
                reason = f"the best of {len(values)} choices of the frontier has {best}"
                return f"--search {goal.text}: {reason}; ask for less of it, or loosen the other goals"
        texts = " ".join(goal.text for goal in self.given.goals)
        return f"--search {texts}: no choice of the frontier meets all of them; ask for less of one"

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
        """The baselines: a greedy choice, one kind spread evenly or by restoring layers, and the best random choice."""
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

    def _second(self, table: ScoreTable, limits: Mapping[str, float]) -> tuple[SecondText, Choice]:
        """The same scores and budgets on the second text: its best choice, and how well the scores agree."""
        text = self.given.second
        assert text is not None
        print_status(f"search: again on {text.name}")
        other = Search(replace(self.given, text=text, second=None, folder=self.given.folder / "second"))
        if [item.file_name for item in other.items] != [item.file_name for item in self.items]:
            raise ConfigError("--second-data: leads to other alternatives; name them by --only, with their sizes")
        other.measured_goals = []  # only scores are compared
        vars(other)["scoring"] = Evaluator(self.weights, other.score, other.given.folder, self.scoring.model)
        _, scores = other.scores()
        here, there = solve(table, limits), solve(scores, limits)
        assert here is not None
        assert there is not None
        layers = [self._by_layer(each.choice) for each in (here, there)]
        ranks = [np.argsort(np.argsort(each.kl)) for each in (table, scores)]
        correlation = float(np.asarray(np.corrcoef(ranks))[0, 1]) if len(self.items) > 1 else 1.0
        same = sum(a == b for a, b in zip(*layers, strict=True))
        return SecondText(text.name, text.tokens, layers[1], same, correlation), there.choice

    def _probe(self) -> RecallProbe | None:
        if all(goal.name != "recall" for goal in self.measured_goals):
            return None
        found = self.recall(()).mean(1).tolist()
        depths = [depth for depth, _ in self.needles if depth is not None]
        return RecallProbe(self.needles[0][1][0].targets.shape[1], depths, found[:-1], found[-1])

    def _whole(self, table: ScoreTable, choice: Choice, with_decode: bool = True) -> dict[str, Any]:
        """The fields of `WholeModel`."""
        added, ranges = self.added(choice), len(position_edges(max(batch.shape[1] for batch in self.check.batches)))
        goals = {goal.name: goal for goal in self.measured_goals}
        return {
            "choice": self._by_layer(choice),
            "share": table.cost(self.axis, choice) / self.totals[self.axis],
            "shares": {name: table.cost(name, choice) / total for name, total in self.totals.items() if total},
            "predicted": table.value(choice),
            "kl": float(self.kl(choice, True).mean()),
            "added_bits": self.added_bits(choice),
            "positions": added[1:ranges],
            "frequencies": added[ranges:],
            "recall": self.recall(choice).mean(1)[:-1].tolist() if "recall" in goals else [],
            "decode": self.value(goals["decode"], choice) if "decode" in goals and with_decode else None,
        }

    def _measure(
        self, table: ScoreTable, chosen: Choice, name: str, choice: Choice, is_baseline: bool = False
    ) -> MeasuredChoice:
        difference, half = mean_and_half(self.kl(choice, True) - self.kl(chosen, True))
        return MeasuredChoice(
            **self._whole(table, choice, with_decode=not is_baseline),
            name=name,
            difference=difference,
            low=difference - half,
            high=difference + half,
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


def added_interval(before: FloatArray, after: FloatArray) -> Interval | None:
    """Added bits per byte with half of its 95 % interval over sequences; None without bytes.

    before, after: bits and bytes of each sequence [S, 2]. The error of the ratio of sums is linearized.
    """
    bits, sizes = after[:, 0] - before[:, 0], before[:, 1]
    if not sizes.any():
        return None
    ratio = bits.sum() / sizes.sum()
    return mean_and_half(ratio + (bits - ratio * sizes) / sizes.mean())
