"""The costs of kinds as symbolic formulas, printed as JavaScript.

Only the config says why a design is rejected: each refusal has witness fields, and the config's error message about
them becomes the template of the page's sentence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import sympy

from heddle.config import DesignError, Part
from heddle.lab.explore.choices import kinds_of
from heddle.lab.explore.costs import Costs, cost_function, projection
from heddle.model.load_config import load_config
from heddle.numerics.linear import linear_flops

COSTS = tuple(Costs.__dataclass_fields__)
RESIDUAL, NORM = "residuals", "norms"
SCALING = "scalings"
WITNESS_WIDTH = 480  # of rejected designs: 7 heads do not divide it


class Quantities:
    """The fields of a part as symbols, and its surroundings. `v.heads` is a field of the JavaScript object `v`.

    width: of the stream. tokens: of the sequence; an encoder output has as many. branches: per layer. dense: its
    feed-forwards without experts. layers, all_branches: of the design. count: equal layers in a row, for which the mean
    is computed; layers_before, branches_before: below them. A field is an attribute: a missing or false one counts 0,
    true counts 1.
    """

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.refusals: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        """A field. A field of a part within this one: `position_buckets`. The length of a list: `count_decay`."""
        return sympy.Symbol(f"v.{name}", real=True)

    def default(self, name: str, value: Any) -> Any:
        """A field with `value` as its default, which is recorded."""
        self.defaults.setdefault(name, sympy.sympify(value))
        return getattr(self, name)

    def has(self, name: str) -> Any:
        """1 if a field is set and not false, else 0."""
        return getattr(self, f"has_{name}")

    def is_false(self, name: str) -> Any:
        """1 if a field is false, else 0."""
        return getattr(self, f"false_{name}")

    def equals(self, name: str, value: str) -> Any:
        """1 if a field is this word, or a part of this kind, else 0."""
        return getattr(self, f"is_{name}_{value}")

    def least(self, first: Any, second: Any) -> Any:
        """The smaller number."""
        return sympy.Min(first, second)

    def above(self, number: Any, limit: Any) -> Any:
        """max(number − limit, 0)."""
        return sympy.Max(number - limit, 0)

    def remainder(self, number: Any, divisor: Any) -> Any:
        """number mod divisor. Never a factor: sympy 1.14 prints a · (b mod c) as (a · b) mod c."""
        return sympy.Mod(number, divisor, evaluate=False)

    def norm(self, width: Any, heads: Any = 1) -> Any:
        """The parameters of a norm over `width` elements, or of one for each head."""
        return (self.norm_weights * width + self.norm_scalars) * heads

    def refuse(self, condition: Any, *shown: Any, **witness: Any) -> None:
        """Declare that the config rejects its fields if `condition` is above 0.

        witness: fields that are rejected for this reason. The config's own error message about them gives the
        reason. shown: the numbers of that message that are neither the field itself nor named (`heads = 8`).
        """
        self.refusals.append((sympy.sympify(condition), tuple(map(sympy.sympify, shown)), witness))


@dataclass(frozen=True)
class Refusal:
    """A config's refusal if `condition` is above 0.

    path: of the field, relative to the part (for a scaling: to the rotation around it). sentence: its pieces, words or
    the values of a symbol.
    """

    condition: Any
    path: str
    sentence: tuple[Any, ...]

    def script(self) -> str:
        """[path, function of the condition, function of the sentence]."""
        pieces = (repr(piece) if isinstance(piece, str) else f"({code(piece)})" for piece in self.sentence)
        return f"[{self.path!r},v=>{code(self.condition)},v=>''+{'+'.join(pieces)}]"


@dataclass(frozen=True)
class Formulas:
    """The formulas of a kind. costs, final: in the order of `COSTS`."""

    costs: tuple[Any, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    final: tuple[Any, ...] = ()

    def script(self) -> str:
        """A JavaScript object whose functions take `v`, the fields of a part."""
        defaults = ",".join(f"[{name!r},v=>{code(value)}]" for name, value in self.defaults.items())
        refusals = ",".join(refusal.script() for refusal in self.refusals)
        costs, final = (f"v=>[{','.join(map(code, values))}]" for values in (self.costs, self.final))
        return f"{{defaults:[{defaults}],refusals:[{refusals}],costs:{costs},final:{final}}}"


def _value(formula: Any, values: Mapping[str, Any]) -> Any:
    """The value of a formula; the word, if the field is one."""
    word = values.get(str(formula).removeprefix("v."))
    return word if isinstance(word, str) else _function(formula)(values)


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
    n = Quantities()
    parameters = n.vocab_size * (n.width * (2 - n.head_tied) + n.head_bias)
    parameters += n.token_types * n.width + n.embedding_norm * n.norm(n.width)
    costs = Costs(parameters=parameters, flops=linear_flops(n.tokens, n.width, n.vocab_size))
    transform = projection(n, n.width, n.width, n.transform_bias) + Costs(parameters=n.norm(n.width))
    return Formulas(_expressions(costs + transform.scaled(n.head_transform)))


@cache
def formulas_of(slot: str, kind: str) -> Formulas | None:
    """The formulas of a kind; None if it declares none."""
    function = cost_function(slot, kind)
    if function is None:
        return None
    symbols = Quantities()
    declared = function(symbols)
    after = cost_function("final", kind) if slot == RESIDUAL else None
    final = Costs() if after is None else after(symbols)
    refusals = tuple(
        Refusal(condition, *refusal_sentence(slot, kind, shown, witness, symbols.defaults))
        for condition, shown, witness in symbols.refusals
    )
    return Formulas(_expressions(declared), symbols.defaults, refusals, _expressions(final))


def refusal_sentence(
    slot: str, kind: str, shown: tuple[Any, ...], witness: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...]]:
    """Path and message of the config's refusal of the fields `witness`, with symbols for its values."""
    rotation = {"kind": "rope", **witness.pop("rotation", {})}
    branches = witness.pop("branches", 2)
    choices = next(each for each in kinds_of(slot) if each.kind == kind)
    part = choices.first | witness
    part = {name: value for name, value in part.items() if value is not None}
    layer: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 8}}
    if branches == 2:
        layer["feedforward"] = {"kind": "mlp", "hidden": 40}
    design: dict[str, Any] = {"vocab_size": 50, "width": WITNESS_WIDTH, "layers": [layer]}
    if slot == SCALING:
        layer["mixer"]["position"], prefix = rotation | {"scaling": part}, "layers[0].mixer.position."
    elif slot in (RESIDUAL, NORM):
        design[slot.removesuffix("s")], prefix = part, f"{slot.removesuffix('s')}."
    else:
        name = slot.removesuffix("s")
        layer[name], prefix = part, f"layers[0].{name}."
    try:
        load_config(design)
    except DesignError as error:
        path, reason = error.path, error.reason
    else:
        raise ValueError(f"{slot} {kind}: {part} is not rejected")
    defaulted = {field.name: field.default for field in choices.fields}
    values = raw_values(defaulted | part) | {"width": WITNESS_WIDTH, "branches": branches, "layers": 1}
    values |= {f"rotation_{name}": value for name, value in ({"base": 10000.0} | rotation).items()}
    values.setdefault("rotation_dims", values.get("rotation_rotary_dim", WITNESS_WIDTH // 8))
    for name, default in defaults.items():
        values.setdefault(name, _function(default)(values))
    relative = path.removeprefix(prefix)
    return relative, _template(reason, relative.removeprefix("scaling.").replace(".", "_"), shown, values)


def _template(reason: str, blamed: str, shown: tuple[Any, ...], values: dict[str, Any]) -> tuple[Any, ...]:
    """A sentence with symbols for values: `heads = 8`, the shown numbers, and the value of the field itself."""
    known = [(formula, _value(formula, values)) for formula in shown]
    words = "".join(rf"|\b{re.escape(value)}\b" for _, value in known if isinstance(value, str))
    pieces: list[Any] = []
    end = 0
    for match in re.finditer(rf"(?:(\w+) = )?((?<![\w.])\d+(?:\.\d+)?(?!\w)|'\w+'{words})", reason):
        named, word = match[1], match[2]
        value = float(word) if word[0].isdigit() else word.strip("'")
        formula = next((formula for formula, each in known if each == value and formula not in pieces), None)
        for name in (named, blamed):
            if formula is None and name is not None and values.get(name) == value:
                formula = sympy.Symbol(f"v.{name}", real=True)
        if formula is None:
            continue
        start, stop = match.span(2)
        quote = "'" if "'" in word else ""
        pieces += [reason[end:start] + quote, formula]
        end = stop - len(quote)
    return (*pieces, reason[end:])


def _expressions(costs: Costs) -> tuple[Any, ...]:
    return tuple(sympy.sympify(getattr(costs, name)) for name in COSTS)


def values_of(part: Part, prefix: str = "") -> dict[str, Any]:
    """The fields of a part as numbers: what `v` has in the page, except the surroundings."""
    fields = {name: getattr(part, name) for name in type(part).model_fields}
    return raw_values(fields, prefix)


def raw_values(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same for fields as written, without defaults. A word is also the value of its field."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        path = f"{prefix}{name}"
        if value is False:
            values[f"false_{path}"] = 1
        if value is None or value is False or name == "kind":
            continue
        values[f"has_{path}"] = 1
        if isinstance(value, Part):
            values[f"is_{path}_{value.kind}"] = 1
            values |= values_of(value, f"{path}_")
        elif isinstance(value, Mapping):
            values[f"is_{path}_{value['kind']}"] = 1
            values |= raw_values(value, f"{path}_")
        elif isinstance(value, str):
            values[f"is_{path}_{value}"] = 1
            values[path] = value
        elif isinstance(value, (list, tuple)):
            values[f"count_{path}"] = len(value)
        elif isinstance(value, (bool, int, float)):
            values[path] = int(value) if isinstance(value, bool) else value
    return values
