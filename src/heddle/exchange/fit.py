"""Which family a design fits exactly, and if none, which change is the least that would make it fit one.

A family's `write` makes the config that comes nearest to a design; reading that config again gives the design that the
family would serve. They are the same, or their differences are what stands in the way: nothing is lost unseen.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from heddle.config import DesignError, decode
from heddle.errors import ConfigError, HeddleError
from heddle.exchange.family import Family, families
from heddle.exchange.fields import Fields, shown
from heddle.model.config import ModelConfig
from heddle.model.load_config import DEFAULTS

OWN = "heddle"
# Fields that decide how a model is trained, and nothing of what a trained one computes.
TRAINING = frozenset({"initialisation", "dropout", "drop_path", "capacity", "aux_loss", "z_loss", "bias_update"})
MISSING = "absent"
MOST = 6  # differences that are told one by one
OF_A_KIND = 8  # differences of fields that weigh as much as one of a kind


class Obstacle(NamedTuple):
    """A field in which a design and what a family can say differ: its path, its value, and what it would be."""

    path: str
    have: Any
    need: Any

    @property
    def weight(self) -> int:
        """Another kind of part is another model; another value of a field is not so much."""
        return OF_A_KIND if self.path.endswith("kind") else 1

    def __str__(self) -> str:
        """`residual.kind=pre_norm`: the override that removes it."""
        return f"{self.path}={'null' if self.need == MISSING else _plain(self.need)}"


@dataclass(frozen=True)
class Fit:
    """A family, the config it would be given, and what stands in the way (nothing: it fits exactly)."""

    family: Family
    config: dict[str, Any]
    obstacles: tuple[Obstacle, ...]


@dataclass(frozen=True)
class Service:
    """The class that serves a design. Of our own: why no family does, which comes nearest, and with which overrides."""

    architecture: str
    reasons: tuple[str, ...] = ()
    nearest: str | None = None
    changes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """In words, a line each."""
        told = [f"serves as: {self.architecture}"]
        if self.nearest is not None:
            told += [f"no native family: {', '.join(self.reasons[:MOST])}{_more(self.reasons)}"]
            told += [f"nearest: {self.nearest}, with {' '.join(self.changes[:MOST])}{_more(self.changes)}"]
        return told


def fit(design: ModelConfig, family: Family) -> Fit:
    """How a design and a family fit."""
    written = family.write(design.resolved())
    try:
        return Fit(family, written, tuple(differences(design, read(written, family))))
    except HeddleError as error:
        path = error.path if isinstance(error, DesignError) else "design"
        return Fit(family, written, (Obstacle(path, MISSING, MISSING),) * 1000)


def read(config: dict[str, Any], family: Family, place: str = "config.json") -> ModelConfig:
    """The design of a config. Raises ConfigError naming the field that is unknown, unsupported or wrong."""
    fields = Fields(config, place)
    try:
        data = family.read(fields)
    except HeddleError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values that no rule of ours foresaw, such as a table for a number; where they were used is the best hint.
        raise ConfigError(
            f"{place}: its fields do not make a {family.architecture} ({shown(str(error))}, after '{fields.last}' was"
            " read); restore the file"
        ) from error
    fields.finish()
    try:
        return decode(ModelConfig, DEFAULTS | data)
    except DesignError as error:
        raise DesignError(error.path, f"{error.reason} (as {place} makes it)") from error


def fits(design: ModelConfig) -> list[Fit]:
    """Every family but heddle's own, the best first."""
    found = [fit(design, family) for name, family in families().items() if name != OWN]
    return sorted(found, key=lambda one: sum(each.weight for each in one.obstacles))


def best(design: ModelConfig, wanted: str | None = None) -> Fit:
    """The family that an export takes: `wanted` if it fits exactly, else another that does, else heddle's own."""
    found = [one for one in fits(design) if not one.obstacles]
    found.sort(key=lambda one: one.family.model_type != wanted)
    return found[0] if found else fit(design, families()[OWN])


def service(design: ModelConfig) -> Service:
    """Who reads an export of this design, and why it is not a family that others know."""
    ranked = fits(design)
    nearest = ranked[0]
    if not nearest.obstacles:
        return Service(nearest.family.architecture)
    reasons = tuple(f"{one.path} is {_plain(one.have)}" for one in nearest.obstacles)
    changes = tuple(str(one) for one in nearest.obstacles)
    return Service(families()[OWN].architecture, reasons, nearest.family.architecture, changes)


def differences(design: ModelConfig, other: ModelConfig) -> list[Obstacle]:
    """Where two designs compute differently, by the path of the field in the first as it is written down.

    Layers that an entry of a design repeats have its path; what every entry shares is told once, of `layers.*`.
    """
    entries = [path.replace("[", ".").replace("]", "") for path, _ in design.expand()]
    found: dict[str, dict[Obstacle, None]] = {}
    for path, have, need in _compare(served(design), served(other), ""):
        where, rest = path, ""
        if path.startswith("layers."):
            _, index, rest = path.split(".", 2)
            where = entries[int(index)]
        told = Obstacle(rest, have if _is_plain(have) else repr(have), need if _is_plain(need) else repr(need))
        found.setdefault(where, {})[told] = None
    shared = _shared([found.get(entry, {}) for entry in entries]) if set(entries) == _tops(entries) else []
    result = [one._replace(path=f"layers.*.{one.path}") for one in shared]
    for where, told_here in found.items():
        result += [
            one._replace(path=f"{where}.{one.path}" if one.path else where) for one in told_here if one not in shared
        ]
    return result


def _tops(entries: list[str]) -> set[str]:
    return {entry for entry in entries if entry.count(".") == 1}


def _shared(told: list[dict[Obstacle, None]]) -> list[Obstacle]:
    """What is told of each of several layers, two at least."""
    return [one for one in told[0] if all(one in others for others in told)] if len(told) > 1 else []


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def served(design: ModelConfig) -> dict[str, Any]:
    """What decides what a trained model of a design computes, as plain data, every default written out."""
    cleaned: dict[str, Any] = _without_training(design.resolved().dump())
    return cleaned


def _without_training(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_training(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_training(item) for name, item in value.items() if name not in TRAINING}
    return kept | ({"bias_update": 0.0} if "bias_update" in value else {})


def _compare(mine: Any, theirs: Any, path: str) -> Any:
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.get("kind") == theirs.get("kind"):
        for name in mine | theirs:
            inner = f"{path}.{name}" if path else name
            yield from _compare(mine.get(name, MISSING), theirs.get(name, MISSING), inner)
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        yield Obstacle(f"{path}.kind", mine.get("kind"), theirs.get("kind"))
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            yield from _compare(*pair, f"{path}.{index}")
    elif not _equal(mine, theirs):
        yield Obstacle(path, mine, theirs)


def _equal(mine: Any, theirs: Any) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (mine, theirs))
    return math.isclose(mine, theirs, rel_tol=1e-12) if numbers else type(mine) is type(theirs) and mine == theirs


def _more(told: tuple[str, ...]) -> str:
    """The rest of a list, in brackets where it is long."""
    return f" (and {len(told) - MOST} more)" if len(told) > MOST else ""


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", "a table"))
    if isinstance(value, list):
        return f"[{len(value)} entries]"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else f"{value}"
