"""Planting a bug: another function takes the place of one, or one node of its syntax tree changes, while a test runs.

Each function here makes a `Plant`, which a test calls with its `monkeypatch`. `target` is a function, a method or a
property. Its code object is replaced, so every module that imported it runs the bug.

A change of a syntax tree names what it is about: the function that is called, the variable that is assigned. It must
be there exactly once; otherwise `nth` counts from 0 in the order in which Python evaluates, or `every` takes all. A
function `new` may ask for local variables of the target by keyword-only parameters.
"""

import ast
import copy
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()
_trees: dict[types.CodeType, ast.Module] = {}  # of code that a plant made, so that another can change it too


@dataclass(frozen=True)
class Plant:
    """A bug of one function, which is planted by calling it."""

    target: Any
    change: Callable[[pytest.MonkeyPatch], None]

    def __call__(self, patch: pytest.MonkeyPatch) -> None:
        self.change(patch)

    @property
    def module(self) -> str:
        """The module of the function."""
        return function_of(self.target).__module__


def replaced(target: Any, new: Callable[..., Any]) -> Plant:
    """`new` is called instead, with the same arguments."""
    return Plant(target, lambda patch: _forward_to(patch, function_of(target), new))


def wrapped(target: Any, new: Callable[..., Any]) -> Plant:
    """`new` is called instead, with the original function before the arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = function_of(target)
        original = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        _forward_to(patch, function, functools.partial(new, original))

    return Plant(target, plant)


def result(target: Any, new: Callable[[Any], Any]) -> Plant:
    """The result becomes `new` of it."""
    return wrapped(target, lambda original, *arguments, **options: new(original(*arguments, **options)))


def calls(target: Any, name: str, new: Callable[..., Any], nth: int | None = None, every: bool = False) -> Plant:
    """`new` is called in the place of `name`, with the same arguments after the object whose method it is.

    A function that is no method comes before its arguments itself.
    """

    def make(node: ast.expr, hook: str) -> ast.expr:
        assert isinstance(node, ast.Call)
        first = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return _hook_call(hook, new, [first, *node.args], node.keywords)

    def find(function: ast.AST) -> Iterator[ast.expr]:
        return (node for node in ast.walk(function) if isinstance(node, ast.Call) and _name(node.func) == name)

    return _changed(target, find, make, new, nth, every)


def reads(target: Any, name: str, new: Callable[..., Any], nth: int | None = None) -> Plant:
    """A variable or an attribute becomes `new` of it where it is read."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node) == name:
                yield node

    return _changed(target, find, lambda node, hook: _hook_call(hook, new, [node]), new, nth)


def assigned(target: Any, name: str, new: Callable[..., Any], nth: int | None = None) -> Plant:
    """What is assigned to a variable, an attribute or its items becomes `new` of it."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Pass())]
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                yield from (node.value for each in targets if _name(each) == name)

    return _changed(target, find, lambda node, hook: _hook_call(hook, new, [node]), new, nth)


def condition(target: Any, mention: str, value: bool, nth: int | None = None) -> Plant:
    """The condition about `mention`, or that operand of an `and` or `or`, is always `value`."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        conditions: list[ast.expr] = []
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                conditions.append(node.test)
            elif isinstance(node, ast.comprehension):
                conditions += node.ifs
            elif isinstance(node, ast.BoolOp):
                conditions += node.values
        matching = [node for node in conditions if not isinstance(node, ast.BoolOp) and _mentions(node, mention)]
        return (node for node in matching if not any(each in ast.walk(node) for each in matching if each is not node))

    return _changed(target, find, lambda node, hook: ast.Constant(value), None, nth)


def operator(target: Any, old: type[ast.AST], new: type[ast.AST], nth: int | None = None) -> Plant:
    """An operator of arithmetic, a sign or a comparison is exchanged, such as `ast.Add` by `ast.Sub`."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            if (isinstance(node, ast.BinOp | ast.UnaryOp) and isinstance(node.op, old)) or (
                isinstance(node, ast.Compare) and isinstance(node.ops[0], old)
            ):
                yield node

    def make(node: ast.expr, hook: str) -> ast.expr:
        changed: Any = copy.copy(node)
        if isinstance(node, ast.Compare):
            changed.ops = [new()]
        else:
            changed.op = new()
        return changed

    return _changed(target, find, make, None, nth)


def operand_dropped(target: Any, mention: str, nth: int | None = None) -> Plant:
    """An operation whose second operand is about `mention` gives its first one."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and _mentions(node.right, mention) and not _mentions(node.left, mention):
                yield node

    def make(node: ast.expr, hook: str) -> ast.expr:
        assert isinstance(node, ast.BinOp)
        return node.left

    return _changed(target, find, make, None, nth)


def constant(target: Any, old: object, new: object, nth: int | None = None) -> Plant:
    """A constant is exchanged."""

    def find(function: ast.AST) -> Iterator[ast.expr]:
        for node in ast.walk(function):
            if isinstance(node, ast.Constant) and type(node.value) is type(old) and node.value == old:
                yield node

    return _changed(target, find, lambda node, hook: ast.Constant(new), None, nth)  # type: ignore[arg-type]


def function_of(target: Any) -> types.FunctionType:
    """The function under decorators, class methods and properties."""
    for inner in ("fget", "func", "__func__"):
        target = getattr(target, inner, target)
    function = inspect.unwrap(target)
    assert isinstance(function, types.FunctionType), target
    return function


def _forwarder(*arguments: Any, **options: Any) -> Any:
    return hook(*arguments, **options)  # type: ignore[name-defined]  # noqa: F821 - the name is exchanged


def _forward_to(patch: pytest.MonkeyPatch, function: types.FunctionType, new: Callable[..., Any]) -> None:
    assert not function.__code__.co_freevars, f"{function} is a closure"
    patch.setattr(function, "__code__", _forwarder.__code__.replace(co_names=(_add_global(patch, function, new),)))


def _add_global(patch: pytest.MonkeyPatch, function: types.FunctionType, value: object) -> str:
    """Make `value` a global of the function's module; returns its name."""
    name = f"_planted_{next(_numbers)}"
    patch.setitem(function.__globals__, name, value)
    return name


def _changed(
    target: Any,
    find: Callable[[ast.AST], Iterable[ast.expr]],
    make: Callable[[ast.expr, str], ast.expr],
    hook: Callable[..., Any] | None,
    nth: int | None = None,
    every: bool = False,
) -> Plant:
    """The nodes that `find` yields become `make` of them and of the name under which the code finds `hook`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = function_of(target)
        file = function.__code__.co_filename
        tree = copy.deepcopy(_trees.get(function.__code__)) or _statement_with(function.__code__)
        (root,) = (node for node in ast.walk(tree) if _is_at(node, function.__code__))
        nodes = sorted(find(root), key=_evaluation)
        assert nodes, f"{function.__qualname__} has no such place"
        assert every or nth is not None or len(nodes) == 1, f"{function.__qualname__}: {list(map(ast.unparse, nodes))}"
        found = f"{function.__qualname__} has {len(nodes)} such places, counted from 0: {list(map(ast.unparse, nodes))}"
        assert nth is None or nth < len(nodes), found
        chosen = nodes if every or nth is None else [nodes[nth]]
        name = _add_global(patch, function, hook)
        _Replacement({id(node): make(node, name) for node in chosen}).visit(root)
        module = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
        (code,) = (each for each in _codes(module) if _key(each) == _key(function.__code__))
        assert code.co_freevars == function.__code__.co_freevars
        _trees[code] = tree
        patch.setattr(function, "__code__", code)

    return Plant(target, plant)


@functools.cache
def _statements(file: str) -> list[tuple[int, str]]:
    """The first line and the source of each statement of a module."""
    source = Path(file).read_text(encoding="utf-8")
    lines, found = source.split("\n"), []
    for node in ast.parse(source).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        found.append((first, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def _statement_with(code: types.CodeType) -> ast.Module:
    """The statement of a module that has this code, at its lines. Walking a whole file takes as long as a law."""
    first, source = [each for each in _statements(code.co_filename) if each[0] <= code.co_firstlineno][-1]
    return ast.parse("\n" * (first - 1) + source)


class _Replacement(ast.NodeTransformer):
    """Exchanges nodes, which are named by their ids."""

    def __init__(self, new: dict[int, ast.expr]) -> None:
        self.new = new

    def visit(self, node: ast.AST) -> Any:
        new = self.new.get(id(node))
        return self.generic_visit(node) if new is None else ast.copy_location(new, node)


def _evaluation(node: ast.expr) -> tuple[int, ...]:
    """Sorts expressions by when they are evaluated: those that end first, the inner ones first."""
    return node.end_lineno or 0, node.end_col_offset or 0, -node.lineno, -node.col_offset


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _is_at(node: ast.AST, code: types.CodeType) -> bool:
    """Whether a node defines the function with this code."""
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        return False
    return code.co_firstlineno == min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _name(node: ast.AST) -> str:
    """The last name of `name`, `object.name`, or `object.name[index]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name | ast.Attribute) and _name(each) == name for each in ast.walk(node))


def _hook_call(
    hook: str, new: Callable[..., Any], arguments: list[ast.expr], keywords: Iterable[ast.keyword] = ()
) -> ast.expr:
    """The call of a hook, with the local variables that `new` asks for."""
    keywords = list(keywords)
    if isinstance(new, types.FunctionType):
        code = new.__code__
        asked = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        named = {each.arg for each in keywords}
        keywords += [ast.keyword(name, ast.Name(name, ast.Load())) for name in asked if name not in named]
    return ast.Call(ast.Name(hook, ast.Load()), arguments, keywords)
