"""A part of a design's plain data whose kind changes gets the fields that it needs.

The new kind keeps the fields that both kinds have. It says itself (`default_fields`) which further ones it needs in
the place of the old one. What it cannot have, such as a rotation of more dims than it rotates, is left out.
"""

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from heddle.config import Config, DesignError, Part, field_class, find_kind, is_slot, parse_config
from heddle.errors import ConfigError
from heddle.model.limits import refuse_overflow


@dataclass(frozen=True, eq=False)
class KindReplacement:
    """A part in a design's plain data whose kind changed.

    chosen: the fields that it got and that the design did not give. dropped: the paths of those that do not fit.
    """

    part: dict[str, Any]
    kind: str
    chosen: dict[str, Any]
    dropped: tuple[str, ...]

    def lines(self) -> list[str]:
        """What happened, in sentences; fields that were set afterwards are left out."""
        chosen = [f"{name} {_name_value(value)}" for name, value in self.chosen.items() if self.part.get(name) == value]
        lines = [f"{self.kind}: {', '.join(chosen)} chosen; set them to change"] if chosen else []
        return lines + (
            [f"{self.kind}: {', '.join(self.dropped)} left out, as it does not fit"] if self.dropped else []
        )


def _name_value(value: Any) -> Any:
    return value.get("kind", value) if isinstance(value, dict) else value


def is_part_path(data: dict[str, Any], steps: list[str]) -> bool:
    """Whether a part stands at a path, or may stand there."""
    from heddle.model.config import ModelConfig

    holders = _parts_at(ModelConfig, data, steps[:-1], None)
    return any((cls := _field_class(base, node, steps[-1])) and issubclass(cls, Part) for node, base, _ in holders)


def replace_kinds(data: dict[str, Any], steps: list[str], kind: Any) -> list[KindReplacement]:
    """Write out the words on a path as parts, in place; if it ends at a kind, change the parts there to another one.

    Returns what changed. A kind that does not exist is refused later.
    """
    from heddle.model.config import ModelConfig

    replacements = []
    for node, base, width in _parts_at(ModelConfig, data, steps[:-1], data.get("width")):
        if is_slot(base) and steps[-1] == "kind":
            replacement = _replace_kind(node, base, kind, width)
            replacements += [] if replacement is None else [replacement]
    return replacements


def _parts_at(cls: Any, node: Any, steps: list[str], width: Any) -> list[tuple[dict[str, Any], Any, Any]]:
    """The tables at a path, each with its config class (or its slot) and the width of its design."""
    if isinstance(node, list):
        chosen = [item for index, item in enumerate(node) if steps and steps[0] in ("*", str(index))]
        return [part for item in chosen for part in _parts_at(cls, item, steps[1:], width)]
    if not isinstance(node, dict) or cls is None:
        return []
    if not steps:
        return [(node, cls, width)]
    inner, inner_class = node.get(steps[0]), _field_class(cls, node, steps[0])
    if isinstance(inner, str) and inner_class is not None and issubclass(inner_class, Part):
        inner = node[steps[0]] = {"kind": inner}
    return _parts_at(inner_class, inner, steps[1:], node.get("width", width))


def _field_class(cls: type[Config], node: dict[str, Any], name: str) -> type[Config] | None:
    """The config class, or the slot, that a field holds. None if it holds none, or if its kind is unknown."""
    if issubclass(cls, Part) and is_slot(cls):
        kind = find_kind(cls.slot, node.get("kind"))
        if kind is None:
            return None
        cls = kind
    return field_class(cls, name)


def _replace_kind(node: dict[str, Any], base: type[Part], kind: str, width: Any) -> KindReplacement | None:
    """Change the fields of a part for another kind, in place. None if nothing was chosen: a fault is refused later."""
    new, old = find_kind(base.slot, kind), find_kind(base.slot, node.get("kind"))
    if new is None or old is None or not issubclass(new, base):
        return None
    if new is old and kind not in new.aliases and node["kind"] not in old.aliases:
        return None
    own = {name: value for name, value in node.items() if name == "kind" or name in old.model_fields}
    explicit = {name: value for name, value in node.items() if name not in own}
    previous = _build_or_none(base, own, width) if type(width) is int and 0 < width <= 2**20 else None
    if previous is None or set(explicit) - set(new.model_fields):
        for name in set(old.model_fields) - set(new.model_fields):
            node.pop(name, None)
        return None
    carried = {name: value for name, value in _explicit_fields(previous, node).items() if name in new.model_fields}
    defaults = {} if new is old else new.default_fields(previous, width)
    fields = {**carried, **defaults, **explicit}
    optional = {name for name in carried if not new.model_fields[name].is_required()}
    dropped = _drop_unfit(base, kind, fields, optional, width)
    chosen = {name: value for name, value in defaults.items() if name not in explicit and carried.get(name) != value}
    node.clear()
    node |= {"kind": kind, **fields}
    config = _build_or_none(base, node, width)
    implied = set() if config is None else config.model_fields_set
    return KindReplacement(node, kind, chosen, tuple(path for path in dropped if path not in implied))


def _build_or_none(base: type[Part], data: dict[str, Any], width: int) -> Part | None:
    """The part's config, if it can be built."""
    try:
        config = parse_config(base, data)
        _check_fit(config, width)
    except ConfigError:
        return None
    return config


def _explicit_fields(part: Part, node: dict[str, Any]) -> dict[str, Any]:
    """The fields that a part was given, or implied by its alias, as the design writes them."""
    from heddle.parts.mixers import MixerConfig

    inner = part.template if isinstance(part, MixerConfig) else part
    written = deepcopy(node) if inner is part else {}
    return {name: written.get(name, value) for name, value in inner.dump().items() if name in inner.model_fields_set}


def _drop_unfit(base: type[Part], kind: str, fields: dict[str, Any], optional: set[str], width: int) -> tuple[str, ...]:
    """Remove the optional fields that the new kind refuses, in place, and return their paths."""
    dropped: list[str] = []
    while True:
        try:
            _check_fit(parse_config(base, {"kind": kind, **deepcopy(fields)}), width)
        except DesignError as error:
            path = _optional_path(fields, optional, error.path)
            if not path:
                return tuple(dropped)
            table = fields
            for name in path[:-1]:
                table = table[name]
            del table[path[-1]]
            dropped.append(".".join(path))
        else:
            return tuple(dropped)


def _optional_path(fields: dict[str, Any], optional: set[str], path: str) -> list[str]:
    """The field at an error's path, or the nearest one around it, if it may be left out. Else nothing."""
    names: list[str] = []
    table: Any = fields
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if not isinstance(table, dict) or name not in table:
            break
        names.append(name)
        table = table[name]
    return names if names and names[0] in optional and names[-1] != "kind" else []


def _check_fit(part: Part, width: int) -> None:
    """Build a mixer or a feed-forward on the meta device. Raises DesignError for a field that does not fit."""
    import torch

    from heddle.parts.context.build import BuildContext
    from heddle.parts.feedforwards import FeedforwardConfig
    from heddle.parts.mixers import MixerConfig
    from heddle.parts.norms import NormConfig

    if isinstance(part, MixerConfig | FeedforwardConfig):
        norm: NormConfig = parse_config(NormConfig, {"kind": "rms"})  # type: ignore[type-abstract]
        with refuse_overflow(), torch.device("meta"):
            part.build(BuildContext(width, norm))
