"""The reference of the Python API, read from the source: nothing is imported, so that it is complete and quick.

Every public module, class, function, method, field and constant has an entry: its signature, its docstring (with
shapes, units and errors), the errors that its own lines raise, and the lines where it stands.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "heddle"
NOTE = re.compile(r"\s\s# (.*)$")
ERRORS = re.compile(r"Error$|^(Broken|Diverged|Interrupted)")
LINE_LENGTH = 90  # characters of a list of arguments
DECORATORS = {"property", "classmethod", "staticmethod", "dataclass", "overload"}
VALUE_LENGTH = 120  # characters; a longer value of a constant is left to the source


@dataclass
class Entry:
    """A public name.

    name: dotted, from the package. what: module, class, function, method, field or constant. signature: as in the
    source, without its body. path, lines: its file, and its first and last line there. raises: the errors that its
    own body raises. text: of a module, the whole file.
    """

    name: str
    what: str
    signature: str
    docstring: str
    path: str
    lines: tuple[int, int]
    raises: list[str] = field(default_factory=list)
    entries: list["Entry"] = field(default_factory=list)
    text: str = ""

    @property
    def short(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def first_sentence(self) -> str:
        """The first line of its docstring."""
        return self.docstring.split("\n\n")[0].replace("\n", " ")

    def walk(self) -> Iterator["Entry"]:
        """It, and all entries below it."""
        yield self
        for entry in self.entries:
            yield from entry.walk()


def modules(source: Path) -> list[Entry]:
    """Every public module of the package under `source`, sorted by name."""
    files = ((module_name(path.relative_to(source)), path) for path in (source / PACKAGE).rglob("*.py"))
    named = sorted((name, path) for name, path in files if not re.match(r"_[^_]", name.rpartition(".")[2]))
    return [_module(name, path, path.relative_to(source.parent).as_posix()) for name, path in named]


def module_name(path: Path) -> str:
    """`heddle/model/__init__.py` -> `heddle.model`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_public(name: str) -> bool:
    """Whether a name has no underscore in front."""
    return not name.startswith("_")


def top_level(init: Path) -> dict[str, str]:
    """The names of `import heddle` and the full name of each, from the imports for type checkers."""
    names: dict[str, str] = {}
    for node in ast.walk(ast.parse(init.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            names |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names if alias.asname == alias.name}
    return dict(sorted(names.items()))


def _module(name: str, path: Path, relative: str) -> Entry:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    reader = _Reader(relative, lines)
    return Entry(
        name, "module", name, ast.get_docstring(tree) or "", relative, (1, max(1, len(lines))), [],
        list(reader.entries(tree, name)), text,
    )  # fmt: skip


@dataclass
class _Reader:
    """Reads the entries of one file."""

    path: str
    lines: list[str]

    def entries(self, parent: ast.AST, prefix: str) -> Iterator[Entry]:
        in_class = isinstance(parent, ast.ClassDef)
        seen: dict[str, Entry] = {}
        for node in getattr(parent, "body", []):
            if isinstance(node, ast.ClassDef):
                entry = self._class(node, prefix)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                entry = self._function(node, prefix, in_class)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for assigned in self._assigned(node, prefix, in_class):
                    seen.setdefault(assigned.short, assigned)
                continue
            else:
                continue
            earlier = seen.get(entry.short)  # an overload, or the getter of a property
            if earlier is not None and entry.what == earlier.what:
                entry.signature = f"{earlier.signature}\n{entry.signature}"
                entry.docstring = entry.docstring or earlier.docstring
            seen[entry.short] = entry
        yield from (entry for name, entry in seen.items() if is_public(name))

    def _class(self, node: ast.ClassDef, prefix: str) -> Entry:
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *(keyword.value for keyword in node.keywords)])
        name = f"{prefix}.{node.name}"
        init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        signature = f"{_decorators(node)}class {node.name}" + (f"({bases})" if bases else "")
        if init is not None:
            signature += f"\n{node.name}{_arguments(init, drop_self=True)}"
        entry = self._entry(node, name, "class", signature, [] if init is None else _raises(init))
        entry.docstring = ast.get_docstring(node) or ""
        entry.entries = list(self.entries(node, name))
        return entry

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str, in_class: bool) -> Entry:
        static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
        head = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        signature = f"{_decorators(node)}{head} {node.name}{_arguments(node, in_class and not static)}"
        what = "method" if in_class else "function"
        entry = self._entry(node, f"{prefix}.{node.name}", what, signature, _raises(node))
        entry.docstring = ast.get_docstring(node) or ""
        return entry

    def _assigned(self, node: ast.Assign | ast.AnnAssign, prefix: str, in_class: bool) -> Iterator[Entry]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        value = "" if node.value is None else ast.unparse(node.value)
        annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
        for name in names:
            shown = f"{name}{annotation}" + (f" = {value}" if value and len(value) <= VALUE_LENGTH else "")
            entry = self._entry(node, f"{prefix}.{name}", "field" if in_class else "constant", shown, [])
            entry.docstring = self._comments(node)
            yield entry

    def _comments(self, node: ast.stmt) -> str:
        """The comments above a field, and the one behind it."""
        above: list[str] = []
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("# "):
                break
            above.insert(0, line.strip("# "))
        behind = NOTE.search(self.lines[(node.end_lineno or node.lineno) - 1])
        notes = [] if behind is None or behind[1].startswith(("type:", "noqa", "fmt:")) else [behind[1]]
        return " ".join([*above, *notes])

    def _entry(self, node: ast.stmt, name: str, what: str, signature: str, raises: list[str]) -> Entry:
        return Entry(name, what, signature, "", self.path, (node.lineno, node.end_lineno or node.lineno), raises)


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    shown = (ast.unparse(each) for each in node.decorator_list)
    return "".join(f"@{text}\n" for text in shown if text.partition("(")[0] in DECORATORS)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, drop_self: bool) -> str:
    """`(x, state=None) -> Tensor`, one line an argument where it would be long."""
    shown = list(_each(node.args))[1 if drop_self else 0 :]
    returns = "" if node.returns is None or node.name == "__init__" else f" -> {ast.unparse(node.returns)}"
    text = f"({', '.join(shown)}){returns}"
    return text if len(text) <= LINE_LENGTH else "(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"


def _each(arguments: ast.arguments) -> Iterator[str]:
    """The arguments of a function, with their types and defaults."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    yield from map(_argument, plain, defaults)
    if arguments.vararg is not None:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(_argument, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg is not None:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    value = "" if default is None else f" = {ast.unparse(default)}"
    return ast.unparse(argument) + (value if argument.annotation else value.replace(" ", "", 2))


def _raises(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The errors that the lines of a function raise, sorted."""
    raised = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc is not None)
    names = (ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in raised)
    return sorted({name for name in names if ERRORS.search(name.rpartition(".")[2])})
