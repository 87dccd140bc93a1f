"""Fewer and smaller designs with the same options: one whose options fit into others is left out, as are spare layers.

An option of a design with a state, or a rollback, stays in a design with one, so that the same laws apply to it. It
moves alone, or within a config that has it, up to a whole layer.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from heddle.config import Config, Part, parse_config
from heddle.errors import ConfigError
from heddle.laws.harness import new_state
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from tests.cases import case
from tests.covering import DESIGNS, cases_beside, greedy_designs, label_of, options_of, options_of_cases
from tests.pairs import fields_of

Path = tuple[str | int, ...]
Held = tuple[str, str]  # an option, and what its design can do: "state", "rollback", or "" for anything
FIXED = "causal"  # with another direction, other laws apply


def configs_in(value: Any, path: Path) -> list[tuple[Path, Config]]:
    """The configs that the value of a field is or has, each with its path."""
    if isinstance(value, Config):
        return [(path, value)]
    items = enumerate(value) if isinstance(value, tuple) else ()
    return [((*path, index), item) for index, item in items if isinstance(item, Config)]


def places(config: Config, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The path of every field that is set, with its option."""
    owner = config.kind if isinstance(config, Part) else type(config).__name__
    for name, value in fields_of(config):
        for place, inner in configs_in(value, (*path, name)):
            yield from places(inner, place)
        if value is not None:
            yield (*path, name), f"{owner}.{name}: {label_of(value)}"


def owners(config: Config, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The path of every config inside a config, with its kind."""
    yield path, config.kind if isinstance(config, Part) else type(config).__name__
    for name, value in fields_of(config):
        for place, inner in configs_in(value, (*path, name)):
            yield from owners(inner, place)


def at(data: Any, path: Path) -> Any:
    """What lies at a path."""
    for key in path:
        data = data[key]
    return data


def with_value(config: ModelConfig, path: Path, value: Any) -> ModelConfig | None:
    """The design with this value at a path, or None if it is refused."""
    data = config.dump(with_later_fields=True)
    try:
        at(data, path[:-1])[path[-1]] = value
        return parse_config(ModelConfig, data)
    except (ConfigError, KeyError, IndexError, TypeError):
        return None


def alike(path: Path) -> Path:
    """A path whatever the layer."""
    return tuple("*" if isinstance(key, int) else key for key in path)


def fewer_layers(value: Any) -> Iterator[Any]:
    """Layers, dumped, without one entry or with one that is not repeated; inner lists of layers, too."""
    for index, entry in enumerate(value):
        if len(value) > 1:
            yield [*value[:index], *value[index + 1 :]]
        if entry.get("repeat", 1) > 1:
            yield [*value[:index], entry | {"repeat": 1}, *value[index + 1 :]]
        for inner in fewer_layers(entry.get("layers") or []):
            yield [*value[:index], entry | {"layers": inner}, *value[index + 1 :]]


@cache
def abilities(config: ModelConfig) -> frozenset[str] | None:
    """What decides which laws apply: a state, and one that rolls back. None if the design is refused."""
    try:
        model = build(config, device="meta")
        if not model.causal:
            return frozenset()
        with_state = build(config)
        return frozenset({"state", "rollback"} if new_state(with_state, 1).can_roll_back(1) else {"state"})
    except ConfigError:
        return None


def held(config: ModelConfig) -> set[Held]:
    """Each option of a design, once for itself and once with each ability."""
    return {(option, ability) for option in options_of(config) for ability in ("", *(abilities(config) or ()))}


class Merging:
    """Designs, and how many of them have what is wanted: what they had together at first, of the options of cases."""

    def __init__(self, designs: list[ModelConfig]) -> None:
        self.designs = designs
        options = options_of_cases()
        self.wanted = {each for each in set().union(*map(held, designs)) if each[0] in options}

    def counts(self, designs: list[ModelConfig]) -> Counter[Held]:
        """How many designs have each option, and each with an ability, that is wanted."""
        return Counter(each for design in designs for each in held(design) & self.wanted)

    def own(self, design: ModelConfig, counts: Counter[Held]) -> set[Held]:
        """What no other design has."""
        return {each for each in held(design) & self.wanted if counts[each] == 1}

    def without(self, left_out: ModelConfig) -> list[ModelConfig] | None:
        """Designs with the same options but one design less, or None."""
        others = [each for each in self.designs if each is not left_out]
        for option, ability in sorted(self.own(left_out, self.counts(self.designs))):
            if (option, ability) in self.counts(others):
                continue
            changed = self.moved(left_out, option, others)
            if changed is None:
                return None
            others = changed
        return others

    def moved(self, source: ModelConfig, option: str, others: list[ModelConfig]) -> list[ModelConfig] | None:
        """The others with an option of the source in one of them, and no option less."""
        counts, plain = self.counts(others), source.dump(with_later_fields=True)
        if option.partition(":")[0].rpartition(".")[2] == FIXED:
            return None
        for size, values in self.values(source, plain, option):
            for index, target in enumerate(others):
                if abilities(target) != abilities(source):
                    continue
                needs = {option for option, _ in self.own(target, counts)}
                for path, value in self.targets(target, values, size, option):
                    config = with_value(target, path, value)
                    if config is None or not needs | {option} <= options_of(config):
                        continue
                    if abilities(config) == abilities(target):
                        return [*others[:index], config, *others[index + 1 :]]
        return None

    def values(self, source: ModelConfig, plain: Any, option: str) -> Iterator[tuple[int, list[tuple[Path, Any]]]]:
        """What has an option, each with its path: the fields themselves, then configs of that many levels around."""
        paths = [path for path, found in places(source) if found == option]
        for size in range(max(map(len, paths), default=0)):
            around = dict.fromkeys(path[: len(path) - size] for path in paths if len(path) > size)
            yield size, [(path, at(plain, path)) for path in around if path[-1] != "layers"]

    def targets(
        self, target: ModelConfig, values: list[tuple[Path, Any]], size: int, option: str
    ) -> Iterator[tuple[Path, Any]]:
        """Where a value may stand in a design: a field in any config of its kind, a config where one like it stands."""
        for path, owner in owners(target):
            for old, value in values:
                if size == 0:
                    if owner == option.partition(".")[0]:
                        yield (*path, old[-1]), value
                elif isinstance(old[-1], int):
                    if alike(path) == alike(old):
                        yield path, value
                elif alike(path) == alike(old[:-1]):
                    yield (*path, old[-1]), value

    def shrink(self) -> list[ModelConfig]:
        """Leave out layers whose options other designs have."""
        for index in range(len(self.designs)):
            while (smaller := self.smaller(self.designs[index])) is not None:
                self.designs[index] = smaller
        return self.designs

    def smaller(self, design: ModelConfig) -> ModelConfig | None:
        """A design with a layer less and the options that no other has, or None."""
        counts = self.counts(self.designs)
        needs = {option for option, _ in self.own(design, counts)}
        for layers in fewer_layers(design.dump(with_later_fields=True)["layers"]):
            config = with_value(design, ("layers",), layers)
            if config is not None and needs <= options_of(config) and abilities(config) == abilities(design):
                return config
        return None

    def run(self) -> list[ModelConfig]:
        """Leave out what can be, the designs with the fewest options of their own first."""
        tried: set[ModelConfig] = set()
        while True:
            counts = self.counts(self.designs)
            order = sorted(
                (each for each in self.designs if each not in tried),
                key=lambda each: len(self.own(each, counts)),
            )
            if not order:
                return self.designs
            tried.add(order[0])
            fewer = self.without(order[0])
            if fewer is not None:
                self.designs = fewer


def present_designs() -> list[ModelConfig]:
    """The designs of the golden file that are still accepted; without the file, greedy ones."""
    lines = DESIGNS.read_text(encoding="utf-8").splitlines() if DESIGNS.exists() else []
    designs = []
    for line in lines:
        with suppress(ConfigError):
            designs.append(parse_config(ModelConfig, json.loads(line)))
    return designs or greedy_designs()


def write_designs() -> int:
    """Write the golden file, without the designs that are cases. Returns their number."""
    designs = present_designs()
    cases = [case(name) for name in cases_beside(designs)]
    merging = Merging([*designs, *cases])
    merging.run()
    chosen = [config for config in merging.shrink() if config not in cases]
    DESIGNS.write_text("".join(f"{json.dumps(config.dump())}\n" for config in chosen), encoding="utf-8")
    return len(chosen)
