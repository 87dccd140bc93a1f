"""Types of fields, as they are written: which class a field holds, and whether it is a list on disk."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

T = TypeVar("T")


def nested_class(annotation: Any, base: type[T]) -> type[T] | None:
    """Find the class derived from `base` inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for argument in get_args(annotation):
            if nested := nested_class(argument, base):
                return nested
    return None


def nested_field(fields: Mapping[str, FieldInfo], name: Any, base: type[BaseModel]) -> str | None:
    """The place of a field one level further down, such as `layers.*.mixer`; None if it is at none or several."""
    places = []
    for outer, field in fields.items():
        nested = nested_class(field.annotation, base)
        if nested is not None and name in nested.model_fields:
            places.append(f"{outer}.*.{name}" if is_list(field.annotation) else f"{outer}.{name}")
    return places[0] if len(places) == 1 else None


def is_list(annotation: Any) -> bool:
    """Whether an annotation is `tuple[X, ...]` or `tuple[X, ...] | None`: a list on disk."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(is_list(argument) for argument in get_args(annotation))
    return get_origin(annotation) is tuple


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """The values of `Literal[…]`, alone or inside an annotation such as `Literal[…] | None`; empty for others."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return tuple(value for argument in get_args(annotation) for value in literal_values(argument))
    return ()


def has_words(annotation: Any) -> bool:
    """Whether an annotation such as `tuple[X, ...] | Literal["learned"]` allows a word instead of a list."""
    return any(get_origin(argument) is Literal for argument in get_args(annotation))
