"""Write what the documentation takes from the code: docs/parts/, and the tables between the marks of docs/laws.md.

    python tools/make_docs.py

It needs the tests' packages too: cases and planted bugs are theirs. tests/docs/test_generated.py compares.
"""

import inspect
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from heddle.config import PARTS, Config, PositiveInt, FiniteFloat, Part, PositiveFloat, Probability, is_slot, kind_class, kinds  # noqa: E402
from heddle.laws import LAWS  # noqa: E402
from heddle.model import config as model_config  # noqa: E402
from heddle.model.decoder import build  # noqa: E402
from heddle.model.load_config import DEFAULTS  # noqa: E402
from heddle.numerics.kernels import OPERATIONS  # noqa: E402
from heddle.parts.scalings import LongContextFactor  # noqa: E402
from tests.cases import CASES, case  # noqa: E402
from tests.laws.test_planted import BUGS  # noqa: E402
from tools import family_facts  # noqa: E402
from tools.markdown import joined, prose, table  # noqa: E402
from tools.part_facts import COSTED, COSTS, bugs_of, parts_of  # noqa: E402
from tools.refusals import reasons  # noqa: E402

SLOTS = ("mixers", "positions", "scalings", "norms", "feedforwards", "residuals")
MODEL = ("ModelConfig", "EmbeddingConfig", "LayerConfig", "HeadConfig", "InitializationConfig")
MARKS = ("<!-- generated: {} -->", "<!-- end of generated -->")
NUMBERS = {
    PositiveInt: "whole number above 0",
    Probability: "number from 0 to below 1",
    PositiveFloat: "number above 0",
    LongContextFactor: "number from 1",
    FiniteFloat: "number",
    int: "whole number",
    float: "number",
    bool: "true or false",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
FEW = 12
REFUSED = ROOT / "tests/goldens/refused_pairs.txt"
WRITTEN = "<!-- Written by tools/make_docs.py from the code. Change the code, then run it again. -->"
HEAD = f"""# Parts

{WRITTEN}

A slot is a folder under `src/heddle/parts`, a kind is a file in it. Each slot has a page here. The text of a kind is
that of its file; fields, parameters, states, costs and kernels are read off the code. `null`, or leaving a field out,
means off or the default. Every law of [laws.md](../laws.md) runs on every case named on these pages, and on designs in
which every two choices of different slots meet; a kind's text ends with the bugs that were planted in its code and the
law that catches each. How these parts are written wrong elsewhere: [commonly-wrong.md](../commonly-wrong.md).
"""
JOINING = """## What does not go together

Everything else does: `tests/laws/test_pairs.py` builds a design for every two choices and holds it to every law. These
are refused, each with a sentence that says why. A design whose mixer looks both ways is built, and refuses a state."""


def main() -> None:
    """Write every page that differs, and say which."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """What each page should hold."""
    laws = ROOT / "docs/laws.md"
    text = laws.read_text(encoding="utf-8")
    for name, made in {"laws": laws_table(), "planted bugs": bugs_table()}.items():
        text = between(text, name, made)
    folder = ROOT / "docs/parts"
    found = {folder / "README.md": joined(HEAD.strip(), contents(), COSTS, JOINING, refused()), laws: text}
    found[folder / "model.md"] = joined("# The model", WRITTEN, *model_blocks())
    for slot in SLOTS:
        blocks = [block for kind in own_kinds(slot) for block in kind_blocks(slot, kind)]
        found[folder / f"{slot}.md"] = joined(f"# {slot.capitalize()}", WRITTEN, prose(slot_doc(slot)), *blocks)
    found[ROOT / "docs/huggingface/families.md"] = family_facts.page(WRITTEN)
    found[folder / "kernels.md"] = joined("# Kernels", WRITTEN, kernels_intro(), *kernel_blocks())
    return found


def between(text: str, name: str, table: str) -> str:
    """The text with a table between its marks. Raises ValueError where the marks are missing."""
    start, end = MARKS[0].format(name), MARKS[1]
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise ValueError(f"no marks for '{name}' in docs/laws.md")
    return f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"


def laws_table() -> str:
    """Every law and its statement."""
    return table(("law", "what holds"), [(f"`{law.name}`", law.statement) for law in LAWS.values()])


def bugs_table() -> str:
    """Every law and the planted bugs that break it."""
    rows = [(f"`{name}`", "; ".join(bug.what for bug in BUGS if bug.law == name)) for name in LAWS]
    return table(("law", "planted bugs it is proved to catch"), rows)


def model_blocks() -> Iterator[str]:
    """The configs of the model itself."""
    read = ", ".join(f"`{name}: {{kind: {part['kind']}}}`" for name, part in DEFAULTS.items())
    yield prose(model_config.__doc__)
    yield f"A design that is read from a file or a dict may leave out {read}."
    for name in MODEL:
        cls = getattr(model_config, name)
        yield from (f"## {name}", prose(cls.__doc__), fields(cls))


def refused() -> str:
    """The choices that designs refuse to join, as a list."""
    return "\n".join(f"- {line}" for line in REFUSED.read_text(encoding="utf-8").splitlines())


def slot_doc(slot: str) -> str | None:
    """The text of a slot's folder."""
    return sys.modules[f"heddle.parts.{slot}"].__doc__


def own_kinds(slot: str) -> list[str]:
    """The kinds that are files of the package, not a user's own."""
    return [kind for kind in kinds(slot) if (PARTS / slot / f"{kind}.py").is_file()]


def contents() -> str:
    """What each slot holds, as links."""
    rows = [(f"[{slot}]({slot}.md)", ", ".join(link(slot, kind) for kind in own_kinds(slot))) for slot in SLOTS]
    beside = [
        ("[the model](model.md)", "its fields"),
        ("[kernels](kernels.md)", ", ".join(f"`{n}`" for n in OPERATIONS)),
    ]
    return table(("slot", "kinds"), rows + beside)


def link(slot: str, kind: str) -> str:
    """A link to a kind, from any page of docs/parts."""
    return f"[`{kind}`]({slot}.md#{kind})"


def kind_blocks(slot: str, kind: str) -> Iterator[str]:
    """One kind: its text, fields, parameters, state, cost, planted bugs and cases."""
    cls = kind_class(slot, kind)
    yield f"## {kind}"
    yield prose(sys.modules[cls.__module__].__doc__)
    yield prose(cls.__doc__)
    yield fields(cls)
    covering = [name for name in CASES if (slot, kind) in parts_of(case(name))]
    found = parameters(slot, kind, covering)
    yield f"Parameters: {', '.join(f'`{name}`' for name in found)}." if found else "It has no parameters."
    if slot in COSTED:
        yield COSTED[slot](kind, covering)
    yield bugs(slot, kind)
    yield cases_line(kind, covering)


def cases_line(kind: str, covering: list[str]) -> str:
    """The cases that hold a kind; where they are many, those named after it."""
    dashed = f"-{kind.replace('_', '-')}-"
    shown = covering if len(covering) <= FEW else [name for name in covering if dashed in f"-{name}-"]
    more = f" ({len(covering)} in all)" if len(shown) < len(covering) else ""
    named = ", ".join(f"`{name}`" for name in shown)
    return f"Cases{more}: {named}." if shown else f"Cases: {len(covering)}, of other parts."


def bugs(slot: str, kind: str) -> str:
    """The bugs planted in a kind's code."""
    rows = [(f"[`{bug.law}`](../laws.md)", bug.what, f"`{bug.case}`") for bug in bugs_of(slot, kind)]
    head = ("law that catches it", "bug planted in this code", "case")
    return table(head, rows) if rows else "No bug is planted in its own code."


def parameters(slot: str, kind: str, cases: list[str]) -> list[str]:
    """The names, within a kind's module, of every parameter that some case gives it."""
    found: dict[str, None] = {}
    for name in cases:
        for module in build(case(name), device="meta").modules():
            if type(module).__module__ == f"heddle.parts.{slot}.{kind}":
                found |= dict.fromkeys(inner for inner, _ in module.named_parameters())
    return list(found)


def fields(cls: type[Config]) -> str:
    """The fields of a config: type, default, and what its source says beside or above each."""
    if not cls.model_fields:
        return ""
    hints, said = get_type_hints(cls, include_extras=True), comments(cls)
    rows = []
    for name, field in cls.model_fields.items():
        default = "required" if field.is_required() else f"`{plain(field.default)}`"
        rows.append((f"`{name}`", kind_of_value(hints[name]), default, said.get(name, "")))
    return table(("field", "value", "default", "note"), rows)


def plain(value: Any) -> str:
    """A default as it would stand in YAML."""
    if isinstance(value, Config):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.dump().items()) + "}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def comments(cls: type[Config]) -> dict[str, str]:
    """What stands in comments before and beside each field."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not (issubclass(owner, Config) and owner.__module__.startswith("heddle.")):
            continue
        above: list[str] = []
        for line in inspect.getsource(owner).splitlines():
            code, _, beside = line.partition("  # ")
            field = re.match(r"    (\w+): ", code)
            if line.startswith("    # "):
                above.append(line.strip("# "))
            elif field:
                found[field[1]] = " ".join([*above, *([beside] if beside else [])])
                above = []
    return found


def kind_of_value(hint: Any) -> str:
    """A type in words."""
    if hint in NUMBERS:
        return NUMBERS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of_value(one) for one in inner if one is not type(None))
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in inner)
    if origin is tuple:
        return f"list, each a {kind_of_value(inner[0])}"
    if isinstance(hint, type) and issubclass(hint, Part):
        fitting = [kind for kind in own_kinds(hint.slot) if issubclass(kind_class(hint.slot, kind), hint)]
        assert is_slot(hint)
        return "a part: " + ", ".join(link(hint.slot, kind) for kind in fitting)
    if isinstance(hint, type) and issubclass(hint, Config):
        return f"[{hint.__name__}](model.md#{hint.__name__.lower()})"
    bounds = [bound for one in hint.__metadata__[0].metadata for bound in asdict(one).items()]
    told = [f"{BOUNDS[word]} {limit:g}" for word, limit in bounds if word in BOUNDS]  # every number is finite
    return ", ".join([NUMBERS[inner[0]], *told])


def kernels_intro() -> str:
    """What the tables of forms mean."""
    return (
        "An operation has forms, best first. A call takes the first form that has no reason against it, decided by\n"
        "shapes, dtypes and the layout alone. `heddle show` prints the choice and the reasons. A form is named with\n"
        '`--kernel attention=reference`, or `with heddle.kernels(attention="reference"):`. The last form, the\n'
        "reference, serves always. In the tables, n stands for a number of the call."
    )


def kernel_blocks() -> Iterator[str]:
    """Each operation: what it computes, its forms, and what they refuse."""
    for name, operation in OPERATIONS.items():
        yield f"## {name}"
        yield prose(sys.modules[operation.kernels[-1].run.__module__].__doc__)
        rows = [(f"`{form.name}`", "; ".join(reasons(form.unsupported)) or "never") for form in operation.kernels]
        yield table(("form", "cannot serve because"), rows)


if __name__ == "__main__":
    main()
