"""The style a machine can check: sizes, docstrings, what is not used here, and no trace of one machine."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source import ROOT, Source, package_sources, tracked_files

PARAMETERS, FUNCTION_LINES, FILE_LINES = 7, 60, 300

# What is larger than the limits, by name, each with its reason: "heddle.numerics.attention.softmax" is a file,
# "heddle.numerics.attention.softmax.sdpa" a function. An entry that is no longer needed fails too.
LARGER: dict[str, str] = {
    "heddle.cli.bench.bench": "one parameter per option",
    "heddle.cli.chat.chat": "one parameter per option",
    "heddle.cli.compare.compare": "one parameter per option",
    "heddle.cli.convert.convert": "one parameter per option",
    "heddle.cli.generate.generate": "one parameter per option",
    "heddle.cli.inspect.inspect": "one parameter per option",
    "heddle.cli.serve.serve": "one parameter per option",
    "heddle.cli.ladder.ladder": "one parameter per option",
    "heddle.cli.show.show": "one parameter per option",
    "heddle.cli.plan.plan": "one parameter per option",
    "heddle.cli.train.train": "one parameter per option",
    "heddle.generation.generate.generate": "the public name takes its settings by keyword",
    "heddle.exchange.transformers.modeling.HeddleForCausalLM.forward": "transformers reads its signature",
}

# Modules on floors 1 to 3 that may take any keyword, each with its reason.
TAKES_ANY_KEYWORD = {
    "heddle.numerics.kernels": "heddle.kernels(attention='reference'): one keyword per operation",
    "heddle.numerics.dispatch.operation": "a kernel whose call is recorded takes what the kernel takes",
}

FLOORS_1_TO_3 = {"numerics", "parts", "model"}
FORBIDDEN_CALLS = {
    "hasattr",
    "torch.load",
    "torch.save",
}  # a part states what it has; no pickle is read or written
FORBIDDEN_MODULES = {"pickle", "shelve", "dill", "joblib"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")

# Written so that this file does not match itself.
OF_ONE_MACHINE = re.compile(
    rb"(?<![\w.>/-])/(?:home|root|Users|work|tmp|farm|mnt|scratch)/\w"
    rb"|\b[A-Z]:\\Users\\"
    rb"|\bpypi\.org\b|\bfiles\.pythonhosted\.org\b|\bdownload\.pytorch\.org\b"
)
SKIPS = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b|unittest\.skip")


def functions(tree: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        name = path
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{path}.{node.name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, name)


def size_faults(source: Source) -> Iterator[tuple[str, str]]:
    """(name, fault) for the file and each of its functions."""
    lines = len(source.text.splitlines())
    if lines > FILE_LINES:
        yield source.name, f"{lines} lines; a file has at most {FILE_LINES}"
    for name, node in functions(source.tree, source.name):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = sum(argument.arg not in {"self", "cls"} for argument in given)
        if parameters > PARAMETERS:
            yield name, f"{parameters} parameters; a function takes at most {PARAMETERS}"
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield name, f"{lines} lines; a function has at most {FUNCTION_LINES}"


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def node_faults(source: Source) -> Iterator[str]:
    low = f"{source.name}.".split(".")[1] in FLOORS_1_TO_3 and source.name not in TAKES_ANY_KEYWORD
    for node in ast.walk(source.tree):
        at = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{at}: a relative import"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            yield from (f"{at}: {root} reads or writes pickles" for root in roots & FORBIDDEN_MODULES)
        if isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            yield f"{at}: {dotted(node.func)} is not used here"
        if low and isinstance(node, ast.arguments) and node.kwarg:
            yield f"{source.name}:{node.kwarg.lineno}: **{node.kwarg.arg} hides what a function takes"


def faults(source: Source) -> list[str]:
    """Everything but sizes, one line each."""
    found = list(node_faults(source))
    if not (ast.get_docstring(source.tree) or "").strip():
        found.append(f"{source.name}: a file opens with a line saying what it is")
    for number, line in enumerate(source.text.splitlines(), 1):
        found += [f"{source.name}:{number}: {match[0]}" for match in UNFINISHED.finditer(line)]
    return found


def test_the_package_keeps_the_style() -> None:
    assert [fault for source in package_sources() for fault in faults(source)] == []


def test_the_package_keeps_to_the_sizes() -> None:
    found = [pair for source in package_sources() for pair in size_faults(source)]
    assert [f"{name}: {fault}" for name, fault in found if name not in LARGER] == []
    assert sorted(set(LARGER) - {name for name, _ in found}) == [], "no longer larger than the limits"


def test_no_file_names_one_machine() -> None:
    found = [f"{path.relative_to(ROOT)}: {match!r}" for path in tracked_files()
             for match in OF_ONE_MACHINE.findall(path.read_bytes())]  # fmt: skip
    assert found == []


def test_no_test_is_skipped() -> None:
    tests = [path for path in tracked_files() if path.suffix == ".py" and (ROOT / "tests") in path.parents]
    assert [str(path) for path in tests if SKIPS.search(path.read_text(encoding="utf-8"))] == []
    assert len(tests) >= 3


MANY = ", ".join(f"value_{number}" for number in range(PARAMETERS + 1))
LONG = "def long():\n" + "    value = 1\n" * FUNCTION_LINES


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"def many({MANY}):\n    pass", 1),
        (f"def keywords(*, {MANY}):\n    pass", 1),
        (f"class Part:\n    def forward(self, {MANY}):\n        pass", 1),
        (f"class Part:\n    def forward(self, {MANY.rsplit(', ', 1)[0]}):\n        pass", 0),
        (LONG, 1),
        (LONG.rsplit("    value", 1)[0], 0),
        ("value = 1\n" * (FILE_LINES + 1), 1),
        ("value = 1\n" * FILE_LINES, 0),
    ],
)
def test_planted_sizes_are_caught(text: str, count: int) -> None:
    assert len(list(size_faults(Source("heddle.parts.planted", text)))) == count


@pytest.mark.parametrize(
    "text",
    [
        "if hasattr(object, 'window'):\n    pass",
        "def build(**options):\n    pass",
        "class Part:\n    def forward(self, x, **options):\n        pass",
        "build = lambda **options: options",
        "from . import attention",
        "from .attention import Attention",
        "import pickle",
        "import torch\n\ntorch.load('weights')",
        "# TO" + "DO: finish",
        "def step():\n    raise NotImplemented" + "Error",
    ],
)
def test_planted_faults_are_caught(text: str) -> None:
    assert len(faults(Source("heddle.parts.planted", f'"""A planted file."""\n{text}\n'))) == 1


def test_a_missing_docstring_is_caught_and_higher_floors_may_take_options() -> None:
    assert len(faults(Source("heddle.parts.planted", "value = 1\n"))) == 1
    assert faults(Source("heddle.cli.planted", '"""A file."""\n\ndef run(**options):\n    pass\n')) == []


@pytest.mark.parametrize("root", ["home", "root", "Users", "work", "tmp"])
def test_a_planted_path_is_caught(root: str) -> None:
    assert OF_ONE_MACHINE.search(f'path = "/{root}/someone/model"'.encode())
    assert not OF_ONE_MACHINE.search(f"https://example.com/{root}/someone and src/{root}/x".encode())
