"""Plant generated bugs in transformers' modeling files and in heddle's parts; count those that conformance kits find.

    python tools/conformance_mutants.py KIT… [--count 63] [--seed 0] [--record runs/conformance_mutants.jsonl]
    python tools/conformance_mutants.py --report evidence/results/conformance_mutants.json [--record …]

`--count` mutants of each family of the kits are drawn by the seed: of four, two from the family's modeling file, one
from what it shares (masks, caches, RoPE, attention functions), one from heddle's own numerics, parts and model, but for
what chooses among kernels of equal results. Each is one change at one place of a function that the family's cases
reach: another comparison, operation, constant or condition, a factor, cast, norm, transposition or statement left out,
two arguments exchanged. A forked child replaces the code of that function and runs the kits, the cheap cases first:
float32 with eager attention, then sdpa, then bfloat16; heddle in float32, then bfloat16. It stops at the first case
that is wrong and was right without the mutant.

A drawn line that no case reaches is recorded as unreached, is not run, and does not count among the `--count`. Of a
survivor the record says whether all logits of all cases are the same bits as without it. The next call goes on after
the record.
"""

import argparse
import ast
import copy
import functools
import gc
import hashlib
import importlib
import json
import random
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from heddle.lab.conformance.build import DTYPES
from heddle.lab.conformance.run import NOT_SEEN, WRONG, Finding, HeddleModel, TransformersModel, _run_model
from tools.mutants import EXCHANGED as EXCHANGED_NODES
from tools.mutants import Replace, functions_of, in_child

EXCHANGED: dict[Any, Any] = dict(EXCHANGED_NODES)
ROOT = Path(__file__).resolve().parents[1]
SHARED = (
    "modeling_rope_utils", "masking_utils", "cache_utils", "integrations.sdpa_attention", "integrations.moe",
    "activations", "pytorch_utils",
)  # fmt: skip
PEER, OWN = "transformers", "heddle"
ROOMS = ("numerics", "parts", "model")  # of heddle
STAGES = {
    PEER: (("eager", "float32"), ("sdpa", "float32"), ("eager", "bfloat16")),
    OWN: (("heddle", "float32"), ("heddle", "bfloat16")),
}
# Methods whose receiver has the same kind of value, so that leaving one out is a mistake that somebody could make.
DROPPED = {
    "to", "float", "type_as", "transpose", "permute", "clamp", "masked_fill", "sigmoid", "softmax", "exp", "sqrt",
    "rsqrt", "square", "mean", "flip", "roll", "cumsum", "contiguous", "repeat_interleave", "tril", "triu", "neg",
}  # fmt: skip
# What has no part in logits: losses, training, warnings, outputs that nobody asked for.
NOT_INFERENCE = ("labels", "training", "output_attentions", "output_router_logits", "logger", "warnings", "return_dict")
SKIPPED = {"_init_weights", "load_balancing_loss_func", "extra_repr", "__repr__"}
CHANGED = (
    ast.Compare, ast.BinOp, ast.BoolOp, ast.Constant, ast.If, ast.IfExp, ast.UnaryOp, ast.AugAssign, ast.Assign,
    ast.Call,
)  # fmt: skip
CACHED = tuple(f"{OWN}.{room}" for room in ROOMS)  # whose results a warm process remembers
SECONDS = 90.0  # of a processor, for one mutant
NO_END = '{"found": true, "raised": true, "property": "no end", "bug": null}'


class Site(NamedTuple):
    """A mutant: the n-th change that is possible in a function of a module, run with the kit of a family."""

    family: str
    module: str
    function: str
    number: int
    line: int
    change: str

    @property
    def side(self) -> str:
        """Whose code it is."""
        return self.module.partition(".")[0]

    @property
    def key(self) -> str:
        """What names it in the record."""
        return f"{self.family}:{self.module}:{self.function}:{self.number}"


def changes(function: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST | None]]:
    """Yield (node, what changes, what replaces it; None: left out) for each change in a function."""
    for node in ast.walk(function):
        if not isinstance(node, CHANGED):
            continue
        new: Any = copy.deepcopy(node)
        if isinstance(new, ast.Compare) and type(new.ops[0]) in EXCHANGED:
            new.ops[0] = EXCHANGED[type(new.ops[0])]()
            yield node, "comparison", new
        elif isinstance(new, ast.BinOp):
            if isinstance(new.op, ast.Mult):
                yield node, "factor left out", new.left
            if type(new.op) in EXCHANGED:
                new.op = EXCHANGED[type(new.op)]()
                yield node, "operation", new
        elif isinstance(new, ast.BoolOp):
            new.op = EXCHANGED[type(new.op)]()
            yield node, "operation", new
        elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
            yield node, "boolean", ast.Constant(not new.value)
        elif isinstance(new, ast.Constant) and isinstance(new.value, int):
            yield node, "constant", ast.Constant(new.value + 1)
        elif isinstance(new, ast.Constant) and isinstance(new.value, float):
            yield node, "constant", ast.Constant(2 * new.value or 1.0)
        elif isinstance(new, ast.If | ast.IfExp):
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield node, "condition", new
        elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.USub | ast.Not | ast.Invert):
            yield node, "sign", new.operand
        elif isinstance(new, ast.AugAssign) or (isinstance(new, ast.Assign) and _from_itself(new)):
            yield node, "statement left out", None
        elif isinstance(new, ast.Call):
            yield from _changed_calls(node, new)


def _changed_calls(node: ast.AST, call: ast.Call) -> Iterator[tuple[ast.AST, str, ast.AST | None]]:
    """Exchanged arguments, and calls left out of which the value goes on."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        if call.func.attr in DROPPED and not (isinstance(owner, ast.Name) and owner.id in ("torch", "F", "nn")):
            yield node, f"{call.func.attr} left out", owner
        elif len(call.args) == 1 and not call.keywords and not starred and ast.unparse(owner) in ("self", "F"):
            yield node, "call left out", call.args[0]  # of a norm, an activation, a projection
    if len(call.args) >= 2 and not starred:
        call.args[:2] = call.args[1::-1]
        yield node, "arguments exchanged", call


def _from_itself(node: ast.Assign) -> bool:
    """Whether an assignment changes a name that it reads."""
    names = {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
    return any(isinstance(target, ast.Name) and target.id in names for target in node.targets)


def changeable(function: ast.FunctionDef) -> list[tuple[ast.AST, str, ast.AST | None]]:
    """The changes in a function that have a part in logits, in a fixed order."""
    outside: list[ast.AST] = [function.args, *function.decorator_list]
    outside += [function.returns] if function.returns else []
    for node in ast.walk(function):
        part = node.test if isinstance(node, ast.If | ast.IfExp) else node
        is_whole = isinstance(node, ast.If | ast.IfExp | ast.Expr | ast.Assign | ast.keyword)
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            outside.append(node.test)  # a check of arguments
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.AnnAssign) or (is_whole and _about(part)):
            outside.append(node)
    excluded = {id(inner) for node in outside for inner in ast.walk(node)}
    return [change for change in changes(function) if id(change[0]) not in excluded]


def _about(node: ast.AST) -> bool:
    """Whether a condition, a statement or an argument is about what is no inference."""
    return any(word in ast.unparse(node) for word in NOT_INFERENCE)


@cache
def _tree(module: str) -> tuple[str, ast.Module]:
    file = str(importlib.import_module(module).__file__)
    return file, ast.parse(Path(file).read_text(encoding="utf-8"))


def mutated(site: Site) -> types.CodeType:
    """The code of the site's function with the change."""
    file, tree = _tree(site.module)
    tree = copy.deepcopy(tree)
    function = dict(functions_of(tree))[site.function]
    target, _, new = changeable(function)[site.number]
    Replace(target, new).visit(function)
    code = compile(ast.fix_missing_locations(tree), file, "exec")
    for name in site.function.split("."):
        code = next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == name)
    return code


def find_function(module: str, path: str) -> types.FunctionType | None:
    """The function of the source under its decorators; None if it is not to be had."""
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = vars(value).get(name)
        if value is None:
            return None
    file, tree = _tree(module)
    node = dict(functions_of(tree))[path]
    lines = {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}
    todo, seen = [value], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            if value.__code__.co_filename == file and value.__code__.co_firstlineno in lines:
                return value
            todo += [cell.cell_contents for cell in value.__closure__ or () if callable(cell.cell_contents)]
        inner = (getattr(value, name, None) for name in ("fget", "func", "__func__", "__wrapped__"))
        todo += [each for each in inner if each is not None]
    return None


@cache
def caches() -> list[Any]:
    """What remembers the results of functions, in a warm process."""
    return [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]


class Hashed:
    """A model whose logits are hashed as they are given."""

    def __init__(self, model: Any) -> None:
        self.model, self.hash = model, hashlib.sha256()
        self.hidden, self.greedy = model.hidden, model.greedy

    def answer(self, case: Any, rows: Any) -> Any:
        """The model's own."""
        answers = self.model.answer(case, rows)
        for each in answers:
            self.hash.update(each.logits.double().numpy().tobytes())
        return answers


def run_stage(folders: list[Path], engine: str, dtype: str, ends: dict[Path, str]) -> Iterator[tuple[str, Finding]]:
    """The findings of a family's models: the first case of each, then the others. ends: the hash of each model."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Any]:
        own = engine == "heddle"
        made = HeddleModel(folder, DTYPES[dtype]) if own else TransformersModel(folder, DTYPES[dtype], engine)
        model = Hashed(made)
        yield model
        ends[folder] = model.hash.hexdigest()

    def findings(folder: Path) -> Iterator[tuple[str, Finding]]:
        try:
            for number, finding in enumerate(_run_model(folder, opened, dtype)):
                yield f"{folder.name} {number}", finding
        except Exception as error:  # a model that cannot be made: any mutant may raise anything
            yield f"{folder.name} opened", Finding("", folder.name, "opened", "opened", WRONG, float("inf"), 0.0,
                                                   reason=f"{type(error).__name__}: {error}"[:200])  # fmt: skip

    all_models = [findings(folder) for folder in folders]
    for model in all_models:
        yield from (finding for finding in [next(model, None)] if finding is not None)
    for model in all_models:
        yield from model


def baseline(folders: list[Path], side: str) -> dict[str, Any]:
    """By stage: the cases that are wrong without a mutant, the count of cases, and the hashes of the logits."""
    found = {}
    for engine, dtype in STAGES[side]:
        ends: dict[Path, str] = {}
        cases = dict(run_stage(folders, engine, dtype, ends))
        found[f"{engine} {dtype}"] = {
            "wrong": {key: [each.property, each.distance, each.reason] for key, each in cases.items()
                      if each.status == WRONG},
            "seen": sum(each.status != NOT_SEEN for each in cases.values()),
            "hashes": {folder.name: end for folder, end in ends.items()},
        }  # fmt: skip
    return found


def check(site: Site, folders: list[Path], known: dict[str, Any]) -> str:
    """Plant a mutant and run the cases until one is wrong; returns what was found as JSON."""
    function = find_function(site.module, site.function)
    assert function is not None
    function.__code__ = mutated(site)
    for each in caches():
        if str(each.__module__).startswith((site.module, *CACHED)):
            each.cache_clear()
    same = True
    for engine, dtype in STAGES[site.side]:
        before, ends = known[f"{engine} {dtype}"], dict[Path, str]()
        findings = run_stage(folders, engine, dtype, ends)
        for number, (key, each) in enumerate(findings, 1):
            if each.status != WRONG or key in before["wrong"]:
                continue
            bug = each.bug
            while bug is None and number < len(folders):  # a name may come from another model's first case
                number, (_, other) = number + 1, next(findings, ("", each))
                bug = other.bug
            return json.dumps({
                "found": True, "engine": engine, "dtype": dtype, "case": key, "property": each.property,
                "raised": each.distance == float("inf") and bool(each.reason), "bug": bug, "layer": each.layer,
                "reason": each.reason[:100],
            })  # fmt: skip
        same = same and {folder.name: end for folder, end in ends.items()} == before["hashes"]
    return json.dumps({"found": False, "same_bits": same})


def reached_lines(folders: list[Path], side: str, prefixes: tuple[str, ...]) -> dict[str, list[int]]:
    """The lines of files of these prefixes that the cases run."""
    lines: dict[str, set[int]] = defaultdict(set)

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(prefixes):
            return None
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        for engine, dtype in STAGES[side][:2]:
            for folder in folders:
                cuts = 0
                for _, finding in run_stage([folder], engine, dtype, {}):
                    cuts += finding.way == "cut"
                    if cuts == 2:  # what follows takes long to trace, and adds little
                        break
    finally:
        sys.settrace(None)
    return {file: sorted(each) for file, each in lines.items()}


def architecture(folder: Path) -> str:
    """The class of transformers that a model's config names."""
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0])


def modules_of(folders: list[Path], side: str) -> dict[str, bool]:
    """The modules that mutants are drawn from, and whether each is the family's own."""
    if side == OWN:
        files = (path for room in ROOMS for path in sorted((ROOT / "src/heddle" / room).rglob("*.py")))
        names = (".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in files)
        return {name.removesuffix(".__init__"): True for name in names if not name.endswith(".dispatch")}
    import transformers

    own = {getattr(transformers, architecture(folder)).__module__: True for folder in folders}
    return own | {f"transformers.{name}": False for name in SHARED}


@cache
def sites_of(module: str) -> dict[str, tuple[range, list[tuple[int, int, str]]]]:
    """By function of a module: its lines, and the number, line and change of each of its mutants."""
    found = {}
    for name, node in functions_of(_tree(module)[1]):
        if name.rpartition(".")[2] not in SKIPPED:
            sites = [(number, getattr(target, "lineno", node.lineno), change)
                     for number, (target, change, _) in enumerate(changeable(node))]  # fmt: skip
            found[name] = range(node.body[0].lineno, (node.end_lineno or 0) + 1), sites
    return found


def pool(family: str, folders: list[Path], side: str, lines: dict[str, list[int]]) -> dict[bool, list[Site]]:
    """Every mutant of functions that the cases reach, the family's own and of what is shared."""
    found: dict[bool, list[Site]] = {True: [], False: []}
    for module, own in modules_of(folders, side).items():
        ran = set(lines.get(str(find_spec(module).origin), ()))  # type: ignore[union-attr]
        for name, (extent, sites) in sites_of(module).items() if ran else ():
            if ran & set(extent):
                found[own] += [Site(family, module, name, *site) for site in sites]
    return found


def draw(pools: dict[str, dict[bool, list[Site]]], seed: int) -> Iterator[Site]:
    """A family's mutants, shuffled, in turn: two of its modeling file, one of what that shares, one of heddle's."""
    rng = random.Random(seed)
    for each in pools.values():
        for sites in each.values():
            rng.shuffle(sites)
    order = (pools[PEER][True], pools[PEER][True], pools[PEER][False], pools[OWN][True])
    while any(order):
        yield from (sites.pop() for sites in order if sites)


def is_plantable(site: Site) -> bool:
    """Whether the code can take the place of the function's: its free variables are the same."""
    function = find_function(site.module, site.function)
    return function is not None and mutated(site).co_freevars == function.__code__.co_freevars


def is_reached(site: Site, lines: dict[str, list[int]]) -> bool:
    """Whether a statement around the changed node runs."""
    file, tree = _tree(site.module)
    function = dict(functions_of(tree))[site.function]
    target = changeable(function)[site.number][0]
    ran = set(lines[file])
    inner = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and target in ast.walk(node)]
    smallest = min(inner, key=lambda node: len(list(ast.walk(node))))
    stop = smallest.body[0].lineno if isinstance(smallest, ast.If | ast.For | ast.While) else smallest.end_lineno or 0
    return bool(ran & set(range(smallest.lineno, max(stop, smallest.lineno + 1) + (smallest is target))))


def kept(file: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once and kept as JSON."""
    if not file.exists():
        file.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def run(kits: list[Path], count: int, seed: int, record: Path, seconds: float) -> None:
    """Run the mutants that the record lacks."""
    import transformers  # before children are forked
    from transformers.generation import utils  # noqa: F401

    torch.set_num_threads(1)
    end = time.monotonic() + seconds
    record.parent.mkdir(exist_ok=True, parents=True)
    models: dict[str, list[Path]] = defaultdict(list)
    for kit in kits:
        for entry in json.loads((kit / "kit.json").read_text(encoding="utf-8"))["models"]:
            models[entry["family"]].append(kit / entry["family"] / entry["variant"])
    prefixes = (str(ROOT / "src/heddle"), str(Path(str(transformers.__file__)).parent))
    finished = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    done = {line["key"] for line in finished}
    todo = []
    for family, folders in models.items():
        lines, known, pools = {}, {}, {}
        for side in STAGES:
            place = record.with_name(f"{record.stem}.{family}.{side}")
            known[side] = kept(Path(f"{place}.base.json"), partial(baseline, folders, side))
            lines[side] = kept(Path(f"{place}.lines.json"), partial(reached_lines, folders, side, prefixes))
            pools[side] = pool(family, folders, side, lines[side])
            for engine, dtype in STAGES[side]:  # what every child would import
                for _ in run_stage(folders[-1:], engine, dtype, {}):
                    pass
        todo.append((draw(pools, seed), folders, lines, known))
    caches()
    for counted in range(1, count + 1):
        for sites, folders, lines, known in todo:
            for site in sites:
                if time.monotonic() > end:
                    return
                reached = is_reached(site, lines[site.side])
                if site.key not in done and is_plantable(site):
                    began, result = time.monotonic(), {"found": False, "unreached": True}
                    if reached:
                        answer = in_child(partial(check, site, folders, known[site.side]), SECONDS)
                        result = json.loads(answer or NO_END)
                    line = {**site._asdict(), "key": site.key, **result, "seconds": round(time.monotonic() - began, 1)}
                    with record.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    how = result.get("bug") or result.get("reason") or result.get("property") or ""
                    words = "found" if result["found"] else "SURVIVES" if reached else "unreached"
                    print(f"{counted} {site.key}, line {site.line}, {site.change}: {words} {how}"[:230], flush=True)
                    done.add(site.key)
                if reached and site.key in done:
                    break


def report(record: Path, out: Path) -> dict[str, Any]:
    """The counts by side and family, and the survivors; what shows that one is equivalent is kept from `out`."""
    last = json.loads(out.read_text(encoding="utf-8")).get("survivors", ()) if out.exists() else ()
    shown = {line["key"]: line["equivalent"] for line in last if line.get("equivalent")}
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    ran = [line for line in lines if not line.get("unreached")]

    def counts(chosen: list[dict[str, Any]]) -> dict[str, int]:
        found = [line for line in chosen if line["found"]]
        answered = [line for line in found if not line["raised"]]
        return {
            "mutants": len(chosen), "found": len(found), "raised": len(found) - len(answered),
            "named": sum(line["bug"] is not None for line in answered), "survive": len(chosen) - len(found),
            "equivalent": sum(line["key"] in shown for line in chosen if not line["found"]),
            "survive with the same bits": sum(bool(line.get("same_bits")) for line in chosen),
        }  # fmt: skip

    sides = {side: [line for line in ran if line["module"].startswith(f"{side}.")] for side in STAGES}
    return {
        "unreached": len(lines) - len(ran),
        "all": counts(ran),
        **{side: counts(chosen) for side, chosen in sides.items()},
        "families": {name: counts([line for line in ran if line["family"] == name])
                     for name in sorted({line["family"] for line in ran})},
        "found by": dict(Counter(f"{line.get('engine')} {line.get('dtype')} {line['property']}"
                                 for line in ran if line["found"]).most_common()),
        "survivors": [{name: line[name] for name in ("key", "line", "change", "same_bits")}
                      | {"equivalent": shown.get(line["key"])} for line in ran if not line["found"]],
    }  # fmt: skip


def main() -> int:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kits", nargs="*", type=Path, metavar="KIT")
    parser.add_argument("--count", type=int, default=63)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--record", type=Path, default=ROOT / "runs/conformance_mutants.jsonl")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if arguments.report is None:
        run(arguments.kits, arguments.count, arguments.seed, arguments.record, arguments.seconds)
        return 0
    arguments.report.write_text(
        json.dumps(report(arguments.record, arguments.report), indent=1) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
