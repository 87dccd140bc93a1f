"""Choose a replacement for each layer within budgets: minimize the added KL, a quadratic form of the choices.

KL(choice) ≈ Σ_a KL_a + Σ_{a<b} G_ab over the chosen replacements, where KL_a is measured with a alone and
G = E_tokens[Cov_p(D_a, D_b)] is the Gram matrix of their changes of the logits in the Fisher metric: to second order,
KL(Σ D) = ½ ‖Σ D‖²_F. The products of choices are linearized (RLT: Sherali and Adams 1990) for a mixed-integer linear
program, so the gap of each solution is proven.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from heddle.errors import ConfigError

FloatArray = npt.NDArray[np.float64]
Choice = tuple[int, ...]  # the numbers of the chosen replacements, ascending; layers without one stay unchanged
SLACK = 1e-9  # of a budget, for rounding
SOLVE_SECONDS = 30.0  # after which the best choice so far is returned, with its gap
TRIES = 10_000  # of a random choice


@dataclass(frozen=True)
class ScoreTable:
    """The replacements, each of one layer, as a solver needs them.

    layers: of each replacement [m]. names: its target. kl: alone, in nats per token [m]. gram: [m, m]. costs: what each
    adds to a cost (below 0: saves) [m] by the cost's name; totals: the model's without replacements. needs: the layers
    that must stay unchanged for a replacement.
    """

    depth: int
    layers: tuple[int, ...]
    names: tuple[str, ...]
    kl: FloatArray
    gram: FloatArray
    costs: Mapping[str, FloatArray]
    totals: Mapping[str, float]
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def value(self, choice: Choice, pairs: bool = True) -> float:
        """The predicted KL of a choice. pairs: with interactions."""
        own = float(self.kl[list(choice)].sum())
        return own + sum(float(self.gram[a, b]) for a, b in itertools.combinations(choice, 2)) if pairs else own

    def cost(self, name: str, choice: Choice) -> float:
        """A cost of the whole model after a choice."""
        return self.totals[name] + float(self.costs[name][list(choice)].sum())

    def is_allowed(self, choice: Choice, limits: Mapping[str, float]) -> bool:
        """Whether a choice has one replacement a layer, what each needs, and is within the limits."""
        changed = [self.layers[item] for item in choice]
        kept = not any(layer in changed for item in choice for layer in self.needs.get(item, ()))
        return len(set(changed)) == len(changed) and kept and self.excess(choice, limits) <= SLACK

    def excess(self, choice: Choice, limits: Mapping[str, float]) -> float:
        """How far a choice exceeds the limits, each as a share of its total, summed."""
        over = (max(0.0, self.cost(name, choice) - limit) / self.totals[name] for name, limit in limits.items())
        return sum(over)

    def of_layer(self, layer: int) -> list[int]:
        """The replacements of a layer."""
        return [item for item, own in enumerate(self.layers) if own == layer]


@dataclass(frozen=True)
class Solution:
    """value: the predicted KL. gap: how far below it the optimum could be, as a share of it."""

    choice: Choice
    value: float
    gap: float


class _Rows:
    """Rows of a linear program, `low ≤ Σ coefficient · x ≤ high`."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.entries += [(len(self.low), column, value) for column, value in terms]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, columns: int) -> LinearConstraint:
        row, column, value = zip(*self.entries, strict=True)
        matrix = coo_array((value, (row, column)), shape=(len(self.low), columns)).tocsr()
        return LinearConstraint(matrix, self.low, self.high)


def solve(
    table: ScoreTable,
    limits: Mapping[str, float],
    pairs: bool = True,
    without: Sequence[Choice] = (),
) -> Solution | None:
    """The choice of least predicted KL within limits of costs; None if no choice is.

    pairs: with interactions; without them the sum of single KLs. without: choices that are excluded.
    """
    count = len(table.layers)
    options = [[*table.of_layer(layer), count + layer] for layer in range(table.depth)]  # the last: unchanged
    objective, rows = [*table.kl, *[0.0] * table.depth], _Rows()
    for own in options:
        rows.add([(item, 1.0) for item in own], 1.0, 1.0)
    for name, limit in limits.items():
        scale = table.totals[name]
        terms = [(item, float(cost) / scale) for item, cost in enumerate(table.costs[name])]
        rows.add(terms, -np.inf, limit / scale - 1.0 + SLACK)
    for item, needed in table.needs.items():
        for layer in needed:
            rows.add([(item, 1.0), (count + layer, -1.0)], -np.inf, 0.0)
    for choice in without:
        changed = {table.layers[item] for item in choice}
        kept = [count + layer for layer in range(table.depth) if layer not in changed]
        rows.add([(item, 1.0) for item in (*choice, *kept)], -np.inf, table.depth - 1.0)
    if pairs:
        for first, second in itertools.combinations(options, 2):
            start = len(objective)
            product = {pair: start + place for place, pair in enumerate(itertools.product(first, second))}
            objective += [float(table.gram[a, b]) if max(a, b) < count else 0.0 for a, b in product]
            for own, others, is_first in ((first, second, True), (second, first, False)):
                for item in own:
                    terms = [(product[(item, other) if is_first else (other, item)], 1.0) for other in others]
                    rows.add([*terms, (item, -1.0)], 0.0, 0.0)
    whole = np.zeros(len(objective))
    whole[: count + table.depth] = 1
    options_of_solver = {"time_limit": SOLVE_SECONDS, "mip_rel_gap": 0.0}
    found = milp(
        np.array(objective), integrality=whole, bounds=Bounds(0.0, 1.0),
        constraints=rows.constraint(len(objective)), options=options_of_solver,
    )  # fmt: skip
    if found.x is None:
        if found.status == 1:  # the time is over
            raise ConfigError("--search: no choice was found in the solver's time; give fewer alternatives with --only")
        return None
    choice = tuple(item for item in range(count) if found.x[item] > 0.5)
    return Solution(choice, table.value(choice, pairs), float(found.mip_gap or 0.0))


def frontier(
    table: ScoreTable, axis: str, shares: Sequence[float], limits: Mapping[str, float]
) -> list[tuple[float, Solution]]:
    """The best choice at each share of a cost, descending shares; shares that no choice meets are left out.

    limits: of the other costs. A choice that was better at a smaller share is also used at larger ones, so the
    predicted KL never rises with the budget, whatever the solver's time.
    """
    points: list[tuple[float, Solution]] = []
    best: Solution | None = None
    for share in sorted(shares):
        found = solve(table, {**limits, axis: share * table.totals[axis]})
        if found is not None and (best is None or found.value < best.value):
            best = found
        if best is not None:
            points.append((share, best))
    return points[::-1]


def greedy(table: ScoreTable, limits: Mapping[str, float]) -> Choice | None:
    """Repeatedly replace the layer that adds the least KL for what it saves, by the single scores.

    None if that ends above the limits.
    """
    choice: Choice = ()
    while (excess := table.excess(choice, limits)) > SLACK:
        steps = []
        for item, layer in enumerate(table.layers):
            new = tuple(sorted([*(each for each in choice if table.layers[each] != layer), item]))
            saved = excess - table.excess(new, limits)
            if saved > SLACK and table.is_allowed(new, {}):
                steps.append(((table.value(new, False) - table.value(choice, False)) / saved, new))
        if not steps:
            return None
        choice = min(steps)[1]
    return choice


def single_kind(
    table: ScoreTable, limits: Mapping[str, float], name: str, order: Sequence[int] | None = None
) -> Choice | None:
    """One kind of replacement in as few layers as the limits need; None if all layers with it are too few.

    order: the layers to convert first; None: spread evenly over the depth, whatever their scores.
    """
    items = {table.layers[item]: item for item, own in enumerate(table.names) if own == name}
    for count in range(len(items) + 1):
        layers = [list(items)[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]
        if order is not None:
            layers = [layer for layer in order if layer in items][:count]
        choice = tuple(sorted(items[layer] for layer in layers))
        if table.is_allowed(choice, limits):
            return choice
    return None


def random_choice(table: ScoreTable, limits: Mapping[str, float], generator: np.random.Generator) -> Choice | None:
    """A choice within limits, each as likely as any other; None if no draw of TRIES is within them."""
    options = [[None, *table.of_layer(layer)] for layer in range(table.depth)]
    for _ in range(TRIES):
        drawn = [own[generator.integers(len(own))] for own in options]
        choice = tuple(sorted(item for item in drawn if item is not None))
        if table.is_allowed(choice, limits):
            return choice
    return None
