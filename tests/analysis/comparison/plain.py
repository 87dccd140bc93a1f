"""Functions of a comparison on plain data, as report.json has it: arguments become types, and results values again.

Tests invent reports as plain data, change what they like in them, and leave out what does not matter.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from heddle.lab.compare import compare, probes, results, statistics, tables, text_profile, tuning, verdict
from heddle.lab.compare import report as compare_report
from heddle.lab.conversion import results as conversion_results
from heddle.lab.ladder import predictions
from heddle.lab.ladder import report as ladder_report
from heddle.lab.ladder import results as ladder_results
from heddle.lab.pages import ladder as ladder_pages
from heddle.lab.pages import report, report_figures, sections

TYPES = (results.__name__, ladder_results.__name__)  # the modules of results


def typed(kind: Any, value: Any) -> Any:
    """Plain data as the type of an annotation; a field that is missing has its default, or None."""
    read = reader(kind)
    return value if value is None or read is None else read(value)


@functools.cache
def reader(kind: Any) -> Callable[[Any], Any] | None:
    """What makes the type of an annotation of plain data, or None if that stays as it is."""
    if isinstance(kind, TypeVar):
        kind = kind.__bound__
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return reader(next(each for each in arguments if each is not NoneType))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return functools.partial(made, results.Run if kind is results.ScoredRun else kind)
    if not arguments:
        return None
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return functools.partial(filled, reader(arguments[0]), is_mapping, reader(arguments[1]) if is_mapping else None)


def made(kind: Any, value: Any) -> Any:
    """A result of this type, with types in its fields, of a dict."""
    if not isinstance(value, dict):
        return value
    values = {}
    for name, read, is_optional in fields_of(kind):
        if name in value or not is_optional:
            item = value.get(name)
            values[name] = item if item is None or read is None else read(item)
    return kind(**values)


def filled(
    read: Callable[[Any], Any] | None, is_mapping: bool, read_value: Callable[[Any], Any] | None, value: Any
) -> Any:
    """A copy of a list, or of a dict, with types in it."""
    if is_mapping and isinstance(value, dict):
        return {k: item if item is None or read_value is None else read_value(item) for k, item in value.items()}
    if isinstance(value, list):
        return list(value) if read is None else [item if item is None else read(item) for item in value]
    return value


@functools.cache
def fields_of(kind: Any) -> list[tuple[str, Callable[[Any], Any] | None, bool]]:
    """Of each field of a dataclass its name, what reads it, and whether it has a default."""
    hints = get_type_hints(kind)
    return [(each.name, reader(hints[each.name]), has_default(each)) for each in dataclasses.fields(kind)]


def has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def written(value: Any) -> Any:
    """The results of a comparison in a value as plain data; other types stay."""
    if type(value).__module__ in TYPES:
        return results.plain(value)
    if isinstance(value, dict) and all(type(item).__module__ in TYPES for item in value.values()):
        return {key: written(item) for key, item in value.items()}
    return type(value)(map(written, value)) if type(value) in (list, tuple) else value


def on_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which takes and gives plain data."""
    hints, signature = get_type_hints(function), inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        for name, value in bound.arguments.items():
            bound.arguments[name] = typed(hints.get(name), value)
        return written(function(*bound.args, **bound.kwargs))

    return call


def __getattr__(name: str) -> Any:
    """The function that one of `MODULES` has under this name, on plain data."""
    found = [getattr(module, name) for module in MODULES if defines(module, name)]
    if len(found) != 1:
        raise AttributeError(f"{len(found)} modules define {name}")
    return on_plain(found[0])


def defines(module: ModuleType, name: str) -> bool:
    value = getattr(module, name, None)
    return inspect.isfunction(value) and value.__module__ == module.__name__


MODULES = (
    probes, compare, compare_report, statistics, tables, text_profile, tuning, verdict, conversion_results,
    predictions, ladder_report, ladder_pages, report, sections, report_figures,
)  # fmt: skip
