"""The costs that parts declare, as symbolic formulas: evaluated in Python, and printed as JavaScript."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import sympy

from heddle.config import Part, kind_class
from heddle.numerics.linear import linear_flops
from heddle.parts.costs import Costs, projection

COSTS = tuple(Costs.__dataclass_fields__)
RESIDUAL = "residuals"
SCALING = "scalings"


class Symbols:
    """`Quantities` of symbols. A symbol `v.heads` is a field of the JavaScript object `v`."""

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.refusals: list[tuple[str, Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        """A field, or a surrounding."""
        return sympy.Symbol(f"v.{name}", real=True)

    def default(self, name: str, value: Any) -> Any:
        """A field, whose default is noted."""
        self.defaults.setdefault(name, sympy.sympify(value))
        return getattr(self, name)

    def has(self, name: str) -> Any:
        """1 or 0."""
        return getattr(self, f"has_{name}")

    def is_false(self, name: str) -> Any:
        """1 or 0."""
        return getattr(self, f"false_{name}")

    def equals(self, name: str, value: str) -> Any:
        """1 or 0."""
        return getattr(self, f"is_{name}_{value}")

    def least(self, first: Any, second: Any) -> Any:
        """The smaller number."""
        return sympy.Min(first, second)

    def above(self, number: Any, limit: Any) -> Any:
        """The difference, or 0."""
        return sympy.Max(number - limit, 0)

    def remainder(self, number: Any, divisor: Any) -> Any:
        """What a division leaves."""
        return sympy.Mod(number, divisor, evaluate=False)

    def norm(self, width: Any, heads: Any = 1) -> Any:
        """One or two numbers for each element."""
        return self.norm_weights * width * heads

    def refuse(self, name: str, condition: Any, reason: str) -> None:
        """Note it."""
        self.refusals.append((name, sympy.sympify(condition), reason))


@dataclass(frozen=True)
class Formulas:
    """The formulas of a kind. costs, final: in the order of `COSTS`. refusals: (field, refused if above 0, reason)."""

    costs: tuple[Any, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refusals: tuple[tuple[str, Any, str], ...] = ()
    final: tuple[Any, ...] = ()

    def script(self) -> str:
        """A JavaScript object whose functions take `v`, the fields of a part."""
        defaults = ",".join(f"[{name!r},v=>{code(value)}]" for name, value in self.defaults.items())
        refusals = ",".join(f"[{name!r},v=>{code(value)},{reason!r}]" for name, value, reason in self.refusals)
        costs, final = (f"v=>[{','.join(map(code, values))}]" for values in (self.costs, self.final))
        return f"{{defaults:[{defaults}],refusals:[{refusals}],costs:{costs},final:{final}}}"

    def costs_of(self, values: dict[str, Any]) -> tuple[int, ...]:
        """The costs of a part with these `values_of` its fields; defaults are added to them."""
        self.complete(values)
        return tuple(round(function(values)) for function in self._functions["costs"])

    def final_costs_of(self, values: dict[str, Any]) -> tuple[int, ...]:
        """The costs of the module behind the last layer, of a residual block."""
        return tuple(round(function(values)) for function in self._functions["final"])

    def refused(self, values: dict[str, Any]) -> list[tuple[str, str]]:
        """(field, reason) of each refusal."""
        self.complete(values)
        checks = zip(self._functions["refusals"], self.refusals, strict=True)
        return [(name, reason) for function, (name, _, reason) in checks if function(values) > 0]

    def complete(self, values: dict[str, Any]) -> None:
        """Add the defaults of fields that are not given."""
        for name, function in zip(self.defaults, self._functions["defaults"], strict=True):
            if not values.get(f"has_{name}"):
                values[name] = function(values)

    @cached_property
    def _functions(self) -> dict[str, list[Any]]:
        formulas = {
            "costs": self.costs,
            "final": self.final,
            "defaults": tuple(self.defaults.values()),
            "refusals": tuple(condition for _, condition, _ in self.refusals),
        }
        return {name: [_function(formula) for formula in each] for name, each in formulas.items()}


def _function(formula: Any) -> Any:
    symbols = sorted(formula.free_symbols, key=str)
    names = [str(symbol).removeprefix("v.") for symbol in symbols]
    compiled = sympy.lambdify(symbols, formula, modules="math")
    return lambda values: compiled(*(values.get(name, 0) for name in names))


def code(formula: Any) -> str:
    """A formula as a JavaScript expression."""
    return str(sympy.jscode(formula))


@cache
def model_formulas() -> Formulas:
    """The formulas of the embedding and the head."""
    n: Any = Symbols()
    parameters = n.vocab_size * (n.width * (2 - n.head_tied) + n.head_bias)
    parameters += n.token_types * n.width + n.embedding_norm * n.norm(n.width)
    costs = Costs(parameters=parameters, flops=linear_flops(n.tokens, n.width, n.vocab_size))
    transform = projection(n, n.width, n.width, n.transform_bias) + Costs(parameters=n.norm(n.width))
    return Formulas(_expressions(costs + transform.scaled(n.head_transform)))


@cache
def formulas_of(slot: str, kind: str) -> Formulas | None:
    """The formulas of a kind; None if it declares none."""
    if slot == SCALING:  # changes angles, at no cost
        return None
    config: Any = kind_class(slot, kind)
    symbols = Symbols()
    declared = config.costs(symbols)
    if declared is None:
        return None
    final = config.final_costs(symbols) if slot == RESIDUAL else Costs()
    return Formulas(_expressions(declared), symbols.defaults, tuple(symbols.refusals), _expressions(final))


def _expressions(costs: Costs) -> tuple[Any, ...]:
    return tuple(sympy.sympify(getattr(costs, name)) for name in COSTS)


def values_of(part: Part, prefix: str = "") -> dict[str, Any]:
    """The fields of a part as numbers: what `v` has in the page, but for the surroundings."""
    values: dict[str, Any] = {}
    for name in type(part).model_fields:
        value, path = getattr(part, name), f"{prefix}{name}"
        if value is False:
            values[f"false_{path}"] = 1
        if value is None or value is False:
            continue
        values[f"has_{path}"] = 1
        if isinstance(value, Part):
            values[f"is_{path}_{value.kind}"] = 1
            values |= values_of(value, f"{path}_")
        elif isinstance(value, str):
            values[f"is_{path}_{value}"] = 1
        elif isinstance(value, (bool, int, float)):
            values[path] = int(value) if isinstance(value, bool) else value
    return values
