"""Plant generated bugs in floors 1 to 3 (numerics, parts, model), one after the other, and count those that tests kill.

    python tools/mutants.py [--count 500] [--seed 0] [--limit 30] [--seconds N] [--record runs/mutants.jsonl]
    python -m pytest -p tools.reached_functions --reached runs/mutants.tests.json tests/parts tests/model
    python tools/mutants.py --again [--record runs/mutants.jsonl]
    python tools/mutants.py --table [--record runs/mutants.jsonl]

The mutants are drawn by the seed, in turn from every file. Each is the work of one operator at one place: an exchanged
comparison, operation, constant or boolean, a negated condition, a result that is None, a statement left out. A child
process, forked after the imports, replaces the code of that one function and runs the checks that reach it: the laws
of the cases that pass through the function, and the test files of its name or that import its module. The tree is not
touched. Which cases reach which function is measured once for the tree and stored beside the record. A mutant is a line
of the record; the next call goes on after it. Without a result within the limit of processor seconds it is counted
apart, as without an end.
--again tries those that survived, or did not end, with single tests that call the function, whatever they are named;
which ones do is measured before, by tools/reached_functions.py.
--table prints the counts and the survivors as Markdown.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import io
import json
import os
import random
import re
import resource
import select
import signal
import sys
import time
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FLOORS = ("numerics", "parts", "model")
TEST_FOLDERS = (*FLOORS, "generation", "conversion", "training")
MOST_FILES = 5  # of tests for a mutant
ONLY_ELSEWHERE = {"flex.py", "varlen.py"}  # they run on an accelerator only
MOST_SECONDS = 4.0  # of single tests for a mutant that survived
WHOLE_DESIGNS = ("tests/test_golden_runs.py", "tests/model/test_size_equality.py")
CHECKED_CASES = 3  # of those that reach a function, drawn for each mutant
REACH_LAWS = ("chunked_decoding", "gradient_accumulation")  # they show which functions a case reaches
FIRST_LAWS = ("kernel_equivalence", *REACH_LAWS, "padding_invariance", "document_packing", "state_rollback")
EXCHANGED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Site(NamedTuple):
    """A mutant: the n-th change that is possible in a function of a module."""

    module: str
    function: str
    number: int
    line: int
    change: str

    @property
    def key(self) -> str:
        """What names it in the record."""
        return f"{self.module}:{self.function}:{self.number}"


def changes(function: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST | None]]:
    """Yield (node, what changes, what replaces it; None: left out) for each change in a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in EXCHANGED:
            changed = copy.deepcopy(node)
            changed.ops[0] = EXCHANGED[type(node.ops[0])]()  # type: ignore[call-overload]
            yield node, "comparison", changed
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in EXCHANGED:
            changed_operation = copy.deepcopy(node)
            changed_operation.op = EXCHANGED[type(node.op)]()  # type: ignore[assignment]
            yield node, "operation", changed_operation
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "boolean", ast.Constant(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "constant", ast.Constant(node.value + 1)
        elif isinstance(node, ast.If | ast.IfExp):
            negated = copy.deepcopy(node)
            negated.test = ast.UnaryOp(ast.Not(), negated.test)
            yield node, "condition", negated
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
            yield node, "sign", node.operand
        elif isinstance(node, ast.Return) and node.value is not None:
            yield node, "result", ast.Return(ast.Constant(None))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not is_text(node):
            yield node, "statement", None


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class Replace(ast.NodeTransformer):
    """Replaces one node, or leaves it out."""

    def __init__(self, target: ast.AST, new: ast.AST | None) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> Any:
        if node is not self.target:
            return self.generic_visit(node)
        return ast.copy_location(ast.Pass() if self.new is None else self.new, node)


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (name, function) for functions and methods; nested ones belong to the one around them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


def changeable(function: ast.FunctionDef) -> list[tuple[ast.AST, str, ast.AST | None]]:
    """The changes in a function that alter neither its arguments nor messages of errors."""
    outside = [function.args, *function.decorator_list, *([function.returns] if function.returns else [])]
    outside += [node for node in ast.walk(function) if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert)]
    excluded = {id(inner) for node in outside for inner in ast.walk(node)}
    return [change for change in changes(function) if id(change[0]) not in excluded]


def all_sites() -> dict[str, list[Site]]:
    """Every mutant, by file."""
    sites: dict[str, list[Site]] = defaultdict(list)
    for path in sorted(path for floor in FLOORS for path in (ROOT / "src/heddle" / floor).rglob("*.py")):
        if path.name in ONLY_ELSEWHERE:
            continue
        module = ".".join(path.relative_to(ROOT / "src/heddle").with_suffix("").parts).removesuffix(".__init__")
        for name, function in functions_of(ast.parse(path.read_text())):
            for number, (node, change, _) in enumerate(changeable(function)):
                sites[module].append(Site(module, name, number, getattr(node, "lineno", function.lineno), change))
    return sites


def draw(count: int, seed: int, reached: dict[str, list[str]]) -> list[Site]:
    """Draw `count` mutants of functions that a case or a test file reaches, one file after the other."""
    rng = random.Random(seed)
    by_file = all_sites()
    pools = {
        module: [site for site in sites if f"{site.module}:{site.function}" in reached or test_files(site)]
        for module, sites in by_file.items()
    }
    for pool in pools.values():
        rng.shuffle(pool)
    drawn: list[Site] = []
    while len(drawn) < count and any(pools.values()):
        drawn += [pool.pop() for pool in pools.values() if pool]
    return drawn[:count]


def plant(site: Site) -> None:
    """Replace the code of the site's function in this process."""
    module = importlib.import_module(f"heddle.{site.module}")
    source = Path(str(module.__file__)).read_text()
    tree = ast.parse(source)
    function = dict(functions_of(tree))[site.function]
    target, _, new = changeable(function)[site.number]
    Replace(target, new).visit(function)
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    for name in site.function.split("."):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    find_function(module, site.function).__code__ = code


def find_function(module: types.ModuleType, path: str) -> types.FunctionType:
    """The function under decorators, properties and class methods."""
    owner: Any = module
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    attribute = vars(owner)[name]
    for inner in ("fget", "func", "__func__", "__wrapped__"):
        attribute = getattr(attribute, inner, None) or attribute
    assert isinstance(attribute, types.FunctionType), path
    return attribute


def reach(names: list[str]) -> dict[str, list[str]]:
    """By function: the cases whose laws call it, each measured in a process of its own."""
    reached: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions = in_child(lambda name=name: called_functions(name), 120.0)
        for function in json.loads(functions or "[]"):
            reached[function].append(name)
    return dict(reached)


def called_functions(name: str) -> str:
    """Run the laws of a case and return the functions of the floors that were called, as JSON."""
    prefix, called = str(ROOT / "src/heddle") + "/", set()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            called.add((code.co_filename, code.co_qualname.split(".<locals>")[0]))

    sys.setprofile(note)
    try:
        violation(name, REACH_LAWS)
    finally:
        sys.setprofile(None)
    modules = {(file.removeprefix(prefix)[:-3].replace("/", ".").removesuffix(".__init__"), f) for file, f in called}
    return json.dumps(sorted(f"{module}:{f}" for module, f in modules if module.split(".")[0] in FLOORS))


def violation(name: str, laws: Iterable[str]) -> str:
    """Run laws on a case until one is violated; return its name, or an empty text."""
    from tests.cases import case
    from tests.laws.violations import violations_of

    return next((law for law in laws if violations_of(case(name), [law])), "")


def test_files(site: Site) -> list[str]:
    """The test files of a module: those of its name, such as tests/numerics/test_norms.py, and a few that import it."""
    name = site.module.rpartition(".")[2]
    named, importing = [], []
    for path, text in test_texts().items():
        if path.stem.startswith(f"test_{name}"):
            named.append(path)
        elif re.search(rf"heddle\.{re.escape(site.module)}\b", text):
            importing.append(path)
    own = [path for path in importing if path.parent.name == site.module.split(".")[0]]
    others = [path for path in importing if path not in own]
    return [str(path) for path in [*named, *own, *others][:MOST_FILES]]


@cache
def test_texts() -> dict[Path, str]:
    """The test files that may kill a mutant, the shortest first."""
    paths = [path for folder in TEST_FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")]
    return {path: path.read_text() for path in sorted(paths, key=lambda path: path.stat().st_size)}


def passes(file: str) -> bool:
    """Whether a test file passes in this process."""
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return pytest.main([file, *options]) == pytest.ExitCode.OK


def outcome(file: str) -> str:
    """The same in a word."""
    return "passes" if passes(file) else "fails"


def sound_files(files: list[str], known: Path) -> list[str]:
    """Those of the test files that pass in a child without a mutant: others would seem to kill each one.

    known: the file that remembers which do.
    """
    results: dict[str, bool] = json.loads(known.read_text()) if known.is_file() else {}
    for file in files:
        if file not in results:
            results[file] = in_child(partial(outcome, file), 120.0) == "passes"
            known.write_text(json.dumps(results))
    return [file for file in files if results[file]]


def check(site: Site, cases: list[str], files: list[str]) -> str:
    """Plant a mutant and return what kills it, or 'survives'."""
    from tests.laws.violations import OTHERS

    try:
        plant(site)
        rest = [law for law in OTHERS if law not in FIRST_LAWS]
        chosen = random.Random(site.key).sample(cases, min(CHECKED_CASES, len(cases)))
        for name, laws in [*((name, FIRST_LAWS) for name in chosen), *((name, rest) for name in chosen[:1])]:
            if law := violation(name, laws):
                return f"{law} on {name}"
        for file in files:
            if not passes(file):
                return Path(file).name
    except BaseException as error:  # a mutant may raise anything
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "survives"


class FirstFailure:
    """A plugin of pytest that remembers the first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember it."""
        self.test = self.test or (report.nodeid if report.failed else "")


def chosen_tests(site: Site, tests: dict[str, dict[str, Any]], whole: bool) -> list[str]:
    """Tests that call the function of a mutant, in turn the shortest of each file, as many as `MOST_SECONDS` allow.

    whole: only tests of whole designs, which kill most; else only the others.
    """
    name, by_file, chosen, seconds = f"{site.module}:{site.function}", defaultdict(list), list[str](), 0.0
    for test in sorted((test for test in tests if name in tests[test]["functions"]), key=lambda t: tests[t]["seconds"]):
        if test.startswith(WHOLE_DESIGNS) == whole:
            by_file[test.partition("::")[0]].append(test)
    while any(by_file.values()):
        for queue in filter(None, by_file.values()):
            test = queue.pop(0)
            seconds += tests[test]["seconds"] + 0.005
            if seconds > MOST_SECONDS:
                return chosen
            chosen.append(test)
    return chosen


def failing_test(chosen: list[str], site: Site | None) -> str:
    """The first of the tests that fails, with a mutant planted before, or 'survives'."""
    import pytest

    first, options = FirstFailure(), ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of modules that the parent has imported
    os.chdir(ROOT)
    if site is not None:
        plant(site)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main([*chosen, *options], plugins=[first])
    return first.test or "survives"


def check_tests(site: Site, chosen: list[str], limit: float) -> str:
    """Which of the tests kills a mutant, or 'survives'. A test that fails without the mutant does not count."""
    while chosen:
        result = in_child(partial(failing_test, chosen, site), limit) or "no end"
        if result in ("survives", "no end"):
            return result
        if in_child(partial(failing_test, [result], None), limit) == "survives":
            return result
        chosen = chosen[chosen.index(result) + 1 :] if result in chosen else []
    return "survives"


def try_again(record: Path, limit: float, end: float) -> None:
    """Try the survivors of a record with single tests, and write what kills them into it."""
    import tests.cases  # for every child; imports of tests are slow
    import tests.exchange.hf_models  # noqa: F401

    known = json.loads(record.with_suffix(".tests.json").read_text())
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        if line["killed_by"] not in ("survives", "no end") or line.get("tried_again") or time.monotonic() > end:
            continue
        site = Site(*(line[name] for name in Site._fields))
        result, tried = "survives", 0
        for whole in (True, False):
            if result in ("survives", "no end"):
                chosen = chosen_tests(site, known, whole)
                result, tried = check_tests(site, chosen, limit), tried + len(chosen)
        line |= {"killed_by": result, "tried_again": tried}
        record.write_text("".join(json.dumps(each) + "\n" for each in lines))
        print(f"{site.key}, line {site.line}, {site.change}, {tried} tests: {result[:100]}", flush=True)


def in_child(call: Any, limit: float) -> str:
    """Return what `call` returns in a forked process; an empty text if it died, or took `limit` seconds of a processor.

    A process that sleeps gets 20 times as long.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as pipe:
            pipe.write(call())
        os._exit(0)
    os.close(writing)
    end, parts = time.monotonic() + 20 * limit, []
    with os.fdopen(reading, "rb") as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            part = os.read(pipe.fileno(), 65536)
            if not part:
                break
            parts.append(part)
        else:
            parts.clear()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return b"".join(parts).decode()


def table(record: Path) -> str:
    """The counts by floor, and the survivors."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    rows = ["| floor | mutants | killed | without an end | survivors |", "| --- | --- | --- | --- | --- |"]
    for floor in (*FLOORS, "all"):
        ends = [line["killed_by"] for line in lines if floor in ("all", line["key"].split(".")[0])]
        survivors, endless = ends.count("survives"), ends.count("no end")
        rows.append(f"| {floor} | {len(ends)} | {len(ends) - survivors - endless} | {endless} | {survivors} |")
    rows += ["", "| survivor | line | change |", "| --- | --- | --- |"]
    left = sorted((line["key"], line["line"], line["change"]) for line in lines if line["killed_by"] == "survives")
    return "\n".join([*rows, *(f"| `{key}` | {line} | {change} |" for key, line, change in left)])


def measured_reach(file: Path) -> dict[str, list[str]]:
    """Which cases reach which function: read from `file`, or measured for this tree and stored there."""
    from tests.cases import CASES

    sources = sorted((ROOT / "src/heddle").rglob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stored = json.loads(file.read_text()) if file.is_file() else {}
    if stored.get("sources") != key:
        stored = {"sources": key, "reached": reach(list(CASES))}
        file.write_text(json.dumps(stored))
    reached: dict[str, list[str]] = stored["reached"]
    return reached


def main() -> int:
    """Run the mutants that the record lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.record))
        return 0
    import torch

    torch.set_num_threads(1)
    end = time.monotonic() + arguments.seconds
    if arguments.again:
        try_again(arguments.record, arguments.limit, end)
        return 0
    arguments.record.parent.mkdir(exist_ok=True)
    finished = {json.loads(line)["key"] for line in arguments.record.read_text().splitlines()} \
        if arguments.record.is_file() else set()  # fmt: skip
    reached = measured_reach(arguments.record.with_suffix(".reach.json"))
    for site in draw(arguments.count, arguments.seed, reached):
        if site.key in finished or time.monotonic() > end:
            continue
        began = time.monotonic()
        cases = reached.get(f"{site.module}:{site.function}", [])
        files = sound_files(test_files(site), arguments.record.with_suffix(".sound.json"))
        result = in_child(partial(check, site, cases, files), arguments.limit) or "no end"
        line = {**site._asdict(), "key": site.key, "killed_by": result, "seconds": round(time.monotonic() - began, 1)}
        with arguments.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{site.key}, line {site.line}, {site.change}: {result[:100]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
