"""Fewer designs with the same options: a design whose options fit into others is left out.

An option moves only between designs with and without a state, and a rollback, alike: the same laws apply to it.
"""

import json
from collections import Counter
from collections.abc import Iterator
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


def with_value(config: ModelConfig, path: Path, name: str, value: Any) -> ModelConfig | None:
    """The design with a field of the config at this path, or None if it is refused."""
    data = config.dump(with_later_fields=True)
    try:
        at(data, path)[name] = value
        return parse_config(ModelConfig, data)
    except (ConfigError, KeyError):
        return None


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


class Merging:
    """Designs, and how many of them have each option."""

    def __init__(self, designs: list[ModelConfig], wanted: set[str]) -> None:
        self.designs = designs
        self.wanted = wanted

    def counts(self, designs: list[ModelConfig]) -> Counter[str]:
        """How many designs have each option that is wanted."""
        return Counter(option for each in designs for option in options_of(each) & self.wanted)

    def without(self, left_out: ModelConfig) -> list[ModelConfig] | None:
        """Designs with the same options but one design less, or None."""
        others = [each for each in self.designs if each is not left_out]
        needs = (options_of(left_out) & self.wanted) - self.counts(others).keys()
        for option in sorted(needs):
            if option in self.counts(others):
                continue
            changed = self.moved(left_out, option, others)
            if changed is None:
                return None
            others = changed
        return others

    def moved(self, source: ModelConfig, option: str, others: list[ModelConfig]) -> list[ModelConfig] | None:
        """The others with an option of the source in one of them, and no option less."""
        kind, _, name = option.partition(":")[0].partition(".")
        counts, plain = self.counts(others), source.dump(with_later_fields=True)
        values = [at(plain, path) for path, found in places(source) if found == option]
        if name == FIXED:
            return None
        for index, target in enumerate(others):
            if abilities(target) != abilities(source):
                continue
            for path, owner in owners(target):
                if owner != kind:
                    continue
                for value in values:
                    config = with_value(target, path, name, value)
                    if config is None:
                        continue
                    lost = (options_of(target) & self.wanted) - options_of(config)
                    if option not in options_of(config) or any(counts[each] < 2 for each in lost):
                        continue
                    if abilities(config) == abilities(target):
                        return [*others[:index], config, *others[index + 1 :]]
        return None

    def run(self) -> list[ModelConfig]:
        """Leave out what can be, the designs with the fewest options of their own first."""
        tried: set[ModelConfig] = set()
        while True:
            counts = self.counts(self.designs)
            order = sorted(
                (each for each in self.designs if each not in tried),
                key=lambda each: sum(counts[option] == 1 for option in options_of(each) & self.wanted),
            )
            if not order:
                return self.designs
            tried.add(order[0])
            fewer = self.without(order[0])
            if fewer is not None:
                self.designs = fewer


def write_designs() -> int:
    """Write the golden file, without the designs that are cases. Returns their number."""
    greedy = greedy_designs()
    cases = [case(name) for name in cases_beside(greedy)]
    merged = Merging([*greedy, *cases], options_of_cases()).run()
    chosen = [config for config in merged if config not in cases]
    DESIGNS.write_text("".join(f"{json.dumps(config.dump())}\n" for config in chosen), encoding="utf-8")
    return len(chosen)
