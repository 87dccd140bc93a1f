"""Planting a bug: replace a part of a function's source while a test runs."""

import importlib
import inspect
import textwrap
import types
from typing import Any

import pytest


def function_at(target: str) -> types.FunctionType:
    """The function of `module:name`, `module:Class.name` or a property of that name."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"heddle.{module_name}")
    *classes, name = path.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    attribute = vars(owner)[name]
    if isinstance(attribute, property):
        attribute = attribute.fget
    attribute = inspect.unwrap(getattr(attribute, "__func__", attribute))
    assert isinstance(attribute, types.FunctionType), target
    return attribute


def plant(patch: pytest.MonkeyPatch, target: str, old: str, new: str) -> None:
    """Replace `old`, which must occur exactly once in the source of the function `target`.

    Only the function's code object is replaced, so every module that imported the function runs the bug.
    """
    function = function_at(target)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{target} contains it {source.count(old)} times: {old}"
    lines = source.replace(old, new).splitlines()
    while lines[0].startswith("@"):
        del lines[0]
    free = function.__code__.co_freevars  # `super()` makes a method close over its class
    outer = [
        "def outer():",
        *(f"    {name} = None" for name in free),
        *(f"    {line}" for line in lines),
        f"    return {function.__name__}",
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(outer), {**function.__globals__}, scope)
    planted = scope["outer"]()
    assert planted.__code__.co_freevars == free
    patch.setattr(function, "__code__", planted.__code__)
