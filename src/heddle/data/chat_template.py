"""A chat template in Jinja's sandbox: no Python internals, no files, and bounded work and memory.

Work is counted in units: a loop iteration, a call, or UNIT_LENGTH items or characters read or made. All loops are
counted, so rendering ends within MAX_UNITS units, or is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from heddle.data.documents import UnreadableError
from heddle.progress import printable

MAX_UNITS = 200_000
UNIT_LENGTH = 128
MAX_NUMBER = 100_000  # of an argument or a factor
MAX_PRODUCT = 2**26  # of the lengths of two arguments: one may be inserted at every position of the other
MAX_CHARACTERS = 2**17  # of a template; published ones have up to 30,000
MAX_DATE_FORMAT = 200  # characters
KNOWN_NAMES = ("messages", "add_generation_prompt", "tools", "documents")
_WIDE_FORMAT = re.compile(r"[0-9]{5}|\*")


class ChatTemplate:
    """A compiled template. Raises UnreadableError if it cannot be compiled."""

    def __init__(self, text: str) -> None:
        self._environment = _BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        if len(text) > MAX_CHARACTERS:
            raise UnreadableError(f"has {len(text):,} characters, more than the limit of {MAX_CHARACTERS:,}")
        try:
            self.parsed = self._environment.parse(text)
            self.globals = frozenset(self._environment.globals)
            self._template: Template = self._environment.from_string(_Counted().visit(self._environment.parse(text)))
        except Exception as error:  # Python raises several errors for deep nesting
            raise UnreadableError(f"cannot be read as Jinja ({_reason(error)})") from error

    @property
    def names(self) -> frozenset[str]:
        """The variables that the template reads."""
        return frozenset(find_undeclared_variables(self.parsed))

    def render(self, **variables: Any) -> str:
        """Return the rendered text. Raises UnreadableError if the template raises, or takes too much work."""
        self._environment.work = 0
        try:
            return self._template.render(**variables)
        except Exception as error:  # a template may raise anything
            raise UnreadableError(f"does not fit the chat template ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return printable(str(error))[:120]


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which some templates put around answers: renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja requires a set here

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counted(NodeTransformer):
    """Counts each loop iteration, and replaces each `a ~ b` by a method that counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        count = nodes.Call(nodes.EnvironmentAttribute("count"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(count))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja's name
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, which counts work. Compiled templates call the methods without an underscore."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.work = 0
        self.concat = self._concatenate  # type: ignore[method-assign]  # called to join the pieces of a text
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # makes text without counting it
        self.filters["tojson"] = _to_json
        self.filters |= {name: self._bounded(function) for name, function in self.filters.items()}

    def count(self, units: int = 1) -> None:
        """Count work. Raises TemplateError beyond MAX_UNITS."""
        self.work += units
        if self.work > MAX_UNITS:
            raise TemplateError("it takes too many steps")

    def joined(self, *parts: Any) -> str:
        """Return the parts as one text."""
        return self._concatenate(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, unless its result would be large."""
        sizes = [_size(value) for value in (left, right)]
        is_formatting = operator == "%" and isinstance(left, str)
        if operator == "**" and (max(sizes) > 1000 or abs(right) > 64):
            raise TemplateError("a power is too large")
        if (operator == "*" and sizes[0] * sizes[1] > MAX_PRODUCT) or (is_formatting and _WIDE_FORMAT.search(left)):
            raise TemplateError("a product or a text is too long")
        return self._counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's
        """Call a function or a macro, unless its arguments are too large."""
        if __function == __self.count:
            return __self.count()
        method = getattr(__function, "__wrapped__", __function)  # the sandbox wraps the methods that format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and "format" in method.__name__ and _WIDE_FORMAT.search(owner):
            raise TemplateError("a format is too wide")
        __self._check((owner, *args, *kwargs.values()))
        return __self._counted(super().call(__context, __function, *args, **kwargs))

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check((*args, *kwargs.values()))
            if function.__name__ == "do_format" and _WIDE_FORMAT.search(str(args[0])):
                raise TemplateError("a format is too wide")
            return self._counted(function(*args, **kwargs))

        return bounded

    def _check(self, arguments: Iterable[Any]) -> None:
        """Count arguments by their sizes. Raises TemplateError for numbers and lengths that are too large."""
        arguments = list(arguments)
        if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in arguments):
            raise TemplateError(f"a number is above {MAX_NUMBER}")
        sizes = sorted(_size(value) for value in arguments if not isinstance(value, int))
        if len(sizes) > 1 and sizes[-1] * sizes[-2] > MAX_PRODUCT:
            raise TemplateError("a text or a list is too long")
        self.count(1 + sum(sizes) // UNIT_LENGTH)

    def _counted(self, result: Any) -> Any:
        self.count(0 if isinstance(result, int) else _size(result) // UNIT_LENGTH)
        return result

    def _concatenate(self, parts: Iterable[str]) -> str:
        pieces: list[str] = []
        for part in parts:
            self.count(1 + len(part) // UNIT_LENGTH)
            pieces.append(part)
        return "".join(pieces)


def _size(value: Any) -> int:
    """Return a text's characters, the bytes of a list's items, a number's absolute value, or 1 for anything else."""
    if isinstance(value, str | bytes | range):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return 8 * len(value)
    return max(1, abs(value)) if isinstance(value, int) else 1


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in transformers; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    """`strftime_now` as in transformers."""
    if len(form) > MAX_DATE_FORMAT:
        raise TemplateError("a date format is too long")
    return datetime.now().strftime(form)


def _tested_for_truth(test: nodes.Node) -> Iterator[str]:
    """Yield the names that a condition reads as true or false."""
    if isinstance(test, nodes.Name):
        yield test.name
    elif isinstance(test, nodes.Not):
        yield from _tested_for_truth(test.node)
    elif isinstance(test, nodes.And | nodes.Or):
        yield from _tested_for_truth(test.left)
        yield from _tested_for_truth(test.right)


def unknown_names(text: str) -> list[str]:
    """Return the names that a template reads and nothing sets; they are empty when it is rendered.

    Names that the template tests (`is defined`, `default(…)`, `if name`, `name or …`) or sets in some of its branches
    are left out. Raises UnreadableError.
    """
    template = ChatTemplate(text)
    tree = template.parsed
    asked = {
        node.node.name
        for kind in (nodes.Test, nodes.Filter)
        for node in tree.find_all(kind)
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    tests: list[nodes.Node] = [node.test for node in tree.find_all(nodes.If)]
    tests += [node.test for node in tree.find_all(nodes.CondExpr)]
    tests += [node.left for node in tree.find_all(nodes.Or)]
    asked |= {name for test in tests for name in _tested_for_truth(test)}
    asked |= {node.target.name for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)}
    known = {*template.globals, *KNOWN_NAMES, *asked}
    names = template.names - known
    return sorted(name for name in names if not name.endswith("_token"))
