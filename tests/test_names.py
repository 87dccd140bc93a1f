"""Public names are the field's words: each word is listed or stands in the glossary, and each name has one meaning."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.source import ROOT, Source, package_sources

GLOSSARY = ROOT / "docs/glossary.md"
RENAMES = ROOT / "docs/renames.md"
WORDS = ROOT / "tests/goldens/public_words.txt"
PIECE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

# Words that say nothing of what they name: no public name and no local of the package is called so.
SAYS_NOTHING = {
    "beside", "done", "found", "given", "held", "kept", "made", "one", "place", "said", "stuff", "thing", "told",
    "wanted",
}  # fmt: skip

# Public classes and functions defined in several modules on purpose, each with its reason.
SHARED_NAMES: dict[str, str] = {
    "compare": "a command, and the function it calls",
    "convert": "a command, and the function it calls",
    "export": "a command, the function it calls, and the same for transformers' classes",
    "generate": "a command, and the function it calls",
    "load": "a model of heddle's, a folder of transformers, and the same behind transformers' classes",
    "main": "what a program runs first",
    "reference": "the plain form of each operation",
    "show": "a command, and the function that calls it",
    "train": "a command, the function it calls, and the one that calls it",
}


def words(name: str) -> set[str]:
    """`KVCache.init_state` -> {"kv", "cache", "init", "state"}."""
    return {piece.lower() for piece in PIECE.findall(name)}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        yield argument.arg


def public_names(source: Source) -> Iterator[tuple[str, str]]:
    """(where, name) of every module, class, function, method, parameter, field and constant without an underscore."""
    yield source.name, source.name.rpartition(".")[2]

    def walk(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef) and is_public(child.name):
                yield f"{path}{child.name}", child.name
                yield from walk(child, f"{path}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(child.name):
                yield f"{path}{child.name}", child.name
                yield from ((f"{path}{child.name}({name})", name) for name in parameters(child) if is_public(name))
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                yield from ((f"{path}{name}", name) for name in names if is_public(name))

    yield from walk(source.tree, f"{source.name}:")


def locals_of(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that is bound in a module: arguments, variables, functions, classes."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of every row of every table, heads and rules left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and not set(line) <= set("|-: ") and not cells[0].startswith("our word"):
            yield cells


def glossary() -> dict[str, str]:
    """Our own words, in lower case, and what the field calls them."""
    own, _, _ = GLOSSARY.read_text(encoding="utf-8").partition("\n## ")
    return {row[0].strip("`").lower(): row[1] for row in table_rows(own)}


def listed_words() -> set[str]:
    return set(WORDS.read_text(encoding="utf-8").split())


def unknown_words(source: Source, allowed: set[str]) -> list[str]:
    """Public names with a word that is neither listed nor in the glossary."""
    faults = []
    for where, name in public_names(source):
        faults += [f"{where}: '{word}'" for word in sorted(words(name) - allowed)]
    return faults


def test_every_public_name_is_made_of_known_words() -> None:
    allowed = listed_words() | set(glossary())
    faults = [fault for source in package_sources() for fault in unknown_words(source, allowed)]
    assert faults == [], "use the field's word, or add it to tests/goldens/public_words.txt or docs/glossary.md"


def test_no_listed_word_is_unused() -> None:
    used = {word for source in package_sources() for _, name in public_names(source) for word in words(name)}
    assert sorted((listed_words() | set(glossary())) - used) == []
    assert listed_words().isdisjoint(glossary()), "a word is the field's or ours, not both"


def test_no_name_says_nothing() -> None:
    faults = [
        f"{source.name}:{line}: {name}"
        for source in package_sources()
        for line, name in locals_of(source)
        if name.lower().strip("_") in SAYS_NOTHING
    ]
    assert faults == []


def is_family(module: str) -> bool:
    """Families of models share a protocol: each file defines the same functions."""
    return module.startswith("heddle.exchange.families.")


def test_a_public_name_has_one_meaning() -> None:
    homes = defaultdict(set)
    for source in package_sources():
        for node in source.tree.body if not is_family(source.name) else []:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and is_public(node.name):
                homes[node.name].add(source.name)
    several = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in several.items() if name not in SHARED_NAMES} == {}
    assert sorted(set(SHARED_NAMES) - set(several)) == [], "no longer defined twice"


def old_names() -> list[str]:
    """The qualified old names of docs/renames.md: `heddle.parts.table:Table.spare`."""
    return [row[0].strip("`") for row in table_rows(RENAMES.read_text(encoding="utf-8")) if ":" in row[0]]


def test_no_old_name_is_left() -> None:
    present = {where for source in package_sources() for where, _ in public_names(source)}
    renamed = old_names()
    assert len(renamed) > 500
    assert [name for name in renamed if name in present] == []


@pytest.mark.parametrize(
    "text",
    [
        "class Wish:\n    pass",
        "def rewound(tokens):\n    pass",
        "def rollback(beside):\n    pass",
        "class KVCache:\n    spare: int = 0",
        "UNSPOOL = 3",
    ],
)
def test_planted_names_are_caught(text: str) -> None:
    allowed = listed_words() | set(glossary())
    assert len(unknown_words(Source("heddle.model.state", text), allowed)) == 1


def test_a_planted_local_is_caught() -> None:
    source = Source("heddle.model.state", "def size(layers):\n    found = [one for one in layers]\n    return found")
    assert sorted({name for _, name in locals_of(source)} & SAYS_NOTHING) == ["found", "one"]
