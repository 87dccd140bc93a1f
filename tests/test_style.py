"""The style a machine can check: docstrings, nothing unfinished, no skipped test, and no trace of one machine."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source import ROOT, Source, package_sources, tracked_files

# Modules on floors 1 to 3 that may take any keyword, each with its reason.
TAKES_ANY_KEYWORD = {
    "heddle.numerics.kernels": "heddle.kernels(attention='reference'): one keyword per operation",
    "heddle.numerics.dispatch": "a kernel whose call is recorded takes what the kernel takes",
}

FLOORS_1_TO_3 = {"numerics", "parts", "model"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")

# Written so that this file does not match itself.
OF_ONE_MACHINE = re.compile(
    rb"(?<![\w.>/-])/(?:home|root|Users|work|tmp|farm|mnt|scratch)/\w"
    rb"|\b[A-Z]:\\Users\\"
    rb"|\bpypi\.org\b|\bfiles\.pythonhosted\.org\b|\bdownload\.pytorch\.org\b"
)
SKIPS = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|xfail|importorskip)\b|unittest\.skip")


def node_faults(source: Source) -> Iterator[str]:
    low = f"{source.name}.".split(".")[1] in FLOORS_1_TO_3 and source.name not in TAKES_ANY_KEYWORD
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            yield f"{source.name}:{node.lineno}: hasattr is not used here: a part states what it has"
        if low and isinstance(node, ast.arguments) and node.kwarg:
            yield f"{source.name}:{node.kwarg.lineno}: **{node.kwarg.arg} hides what a function takes"


def faults(source: Source) -> list[str]:
    """One line each."""
    lines = list(node_faults(source))
    if not (ast.get_docstring(source.tree) or "").strip():
        lines.append(f"{source.name}: a file opens with a line saying what it is")
    for number, line in enumerate(source.text.splitlines(), 1):
        lines += [f"{source.name}:{number}: {match[0]}" for match in UNFINISHED.finditer(line)]
    return lines


def test_the_package_keeps_the_style() -> None:
    assert [fault for source in package_sources() for fault in faults(source)] == []


def test_no_file_names_one_machine() -> None:
    found = [f"{path.relative_to(ROOT)}: {match!r}" for path in tracked_files()
             for match in OF_ONE_MACHINE.findall(path.read_bytes())]  # fmt: skip
    assert found == []


def test_no_test_is_skipped() -> None:
    tests = [path for path in tracked_files() if path.suffix == ".py" and (ROOT / "tests") in path.parents]
    assert [str(path) for path in tests if SKIPS.search(path.read_text(encoding="utf-8"))] == []
    assert len(tests) >= 3


@pytest.mark.parametrize(
    "text",
    [
        "if hasattr(object, 'window'):\n    pass",
        "def build(**options):\n    pass",
        "class Part:\n    def forward(self, x, **options):\n        pass",
        "build = lambda **options: options",
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
