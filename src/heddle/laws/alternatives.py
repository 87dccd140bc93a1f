"""Every field of a design, and other values for each: read from the types of the fields. No kind is named here."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from heddle.config import Config, Part, kind_class, kinds
from heddle.errors import ConfigError

C = TypeVar("C", bound=Config)
Steps = tuple[str | int, ...]

FACTORS = (2.0, 0.125, 64.0, 1 / 64)
SAMPLES: dict[type, tuple[Any, ...]] = {bool: (True, False), int: (2, 1, 3, 4, 8), float: (2.0, 0.5, 0.125)}
LENGTHS = (1, 2, 3, 4)  # of lists of numbers


class Option(NamedTuple):
    """A field of a config within a design. steps: the way to it, such as ("layers", 0, "mixer", "heads").

    around: the ways to the configs that hold it, the innermost first.
    """

    config: Config
    steps: Steps
    around: tuple[Steps, ...]

    @property
    def name(self) -> str:
        """The field's name."""
        return str(self.steps[-1])

    @property
    def value(self) -> Any:
        """The field's value in the design."""
        return getattr(self.config, self.name)

    @property
    def path(self) -> str:
        """The way to the field as one writes it: `layers[0].mixer.heads`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.steps).removeprefix(".")


def field_values(config: Config) -> Iterator[tuple[str, Any]]:
    """Name and value of every field."""
    return ((name, getattr(config, name)) for name in type(config).model_fields)


def options(config: Config) -> Iterator[Option]:
    """Every field of a design and of the configs within it. Equal configs at the same field of several layers: once."""
    return _options(config, (), (), set())


def _options(
    config: Config, steps: Steps, around: tuple[Steps, ...], seen: set[tuple[Steps, Config]]
) -> Iterator[Option]:
    key = (tuple(step for step in steps if isinstance(step, str)), config)
    if key in seen:
        return
    seen.add(key)
    around = (steps, *around)
    for name, value in field_values(config):
        yield Option(config, (*steps, name), around)
        for index, item in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(item, Config):
                yield from _options(item, (*steps, name) if index is None else (*steps, name, index), around, seen)


def config_at(config: Config, steps: Steps) -> Config:
    """The config at the end of a way."""
    value: Any = config
    for step in steps:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    assert isinstance(value, Config)
    return value


def with_values(config: C, values: dict[Steps, Any]) -> C:
    """The design with another value at the end of each way, all at once. Raises DesignError if that is refused."""
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(str(steps[0]) for steps in values):
        inner = {steps[1:]: value for steps, value in values.items() if steps[0] == name}
        changed[name] = inner[()] if () in inner else _changed(getattr(config, name), inner)
    return config.replace(**changed)


def _changed(value: Any, values: dict[Steps, Any]) -> Any:
    if isinstance(value, Config):
        return with_values(value, values)
    items = list(value)
    for index in dict.fromkeys(steps[0] for steps in values):
        assert isinstance(index, int)
        items[index] = _changed(items[index], {steps[1:]: new for steps, new in values.items() if steps[0] == index})
    return tuple(items)


def alternatives(option: Option) -> Iterator[list[Any]]:
    """Other values of a field, in groups: first those most like its own value, last None. Some may be invalid."""
    for group in _groups(type(option.config).model_fields[option.name].annotation, option.value):
        yield [other for other in group if other != option.value]


def _groups(annotation: Any, value: Any) -> Iterator[list[Any]]:
    if value is None:
        yield list(_samples(annotation))
        return
    if isinstance(value, bool | str):
        yield [choice for choice in _samples(annotation) if isinstance(choice, bool | str)]
    elif isinstance(value, int | float):
        yield other_numbers(value)
    elif isinstance(value, Part):
        yield list(_parts(annotation, value))
    elif isinstance(value, tuple) and value:
        yield [(*value, value[-1])] if isinstance(value[0], Config) else list(_other_lists(value))
    if type(None) in get_args(annotation):
        yield [None]


def other_numbers(value: float) -> list[Any]:
    """Numbers near and far from one, of its type."""
    if isinstance(value, int):
        return list(dict.fromkeys((value + 1, 2 * value, value - 1, value // 2, 1, 2, 16)))
    return [*(value * factor for factor in FACTORS), 1.0, 0.5]


def far_numbers(value: float) -> list[Any]:
    """A few numbers far from one, of its type."""
    numbers = (2 * value, 1, 2, 16) if isinstance(value, int) else (2.0 * value, value / 64, value * 64)
    return [number for number in numbers if number != value]


def _other_lists(values: tuple[float, ...]) -> Iterator[tuple[Any, ...]]:
    """Lists of numbers with one entry changed, and with all changed."""
    for factor in FACTORS:
        yield (values[0] * factor, *values[1:])
        yield tuple(value * factor for value in values)


def _samples(annotation: Any) -> Iterator[Any]:
    """A few values of a type, None aside."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _samples(arguments[0])
    elif origin is Literal:
        yield from arguments
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _samples(argument)
    elif origin is tuple:
        for sample in (sample for sample in _samples(arguments[0]) if not isinstance(sample, Config)):
            yield from ((sample,) * length for length in LENGTHS)
    elif annotation in SAMPLES:
        yield from SAMPLES[annotation]
    else:
        yield from _parts(annotation, None)


def _parts(annotation: Any, old: Part | None) -> Iterator[Part]:
    """A part of every kind that fits a field: first with the fields that it shares with the old one, then without."""
    classes = [kind_class(slot.slot, kind) for slot in _slots(annotation) for kind in kinds(slot.slot)]
    classes = [cls for cls in classes if any(issubclass(cls, slot) for slot in _slots(annotation))]
    for cls in classes:
        if old is not None and cls is not type(old):
            yield from _built(cls, {name: value for name, value in field_values(old) if name in cls.model_fields})
    for cls in classes:
        yield from _built(cls, {})


def _slots(annotation: Any) -> Iterator[type[Part]]:
    """The classes of parts within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated):
        for argument in get_args(annotation):
            yield from _slots(argument)


def _built(cls: type[Part], fields: dict[str, Any]) -> Iterator[Part]:
    """A config of a kind with these fields, and samples of the others that it requires. Nothing if that is refused."""
    for name, field in cls.model_fields.items():
        if field.is_required() and name not in fields:
            fields[name] = next(_samples(field.annotation), None)
    try:
        yield cls(**fields)
    except ConfigError:
        return
