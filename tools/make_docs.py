"""Write the generated documentation: docs/parts/, docs/rank-laws.md, pages of docs/huggingface/, tables of others.

    python tools/make_docs.py

It also needs the packages of the tests, whose cases and planted bugs it lists. tests/docs/test_generated.py checks that
the committed pages are up to date. Pages list names, not totals: a total would change with every new test.
"""

import argparse
import json
import re
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from torch import nn  # noqa: E402

from benchmarks import figures  # noqa: E402
from heddle.cli.main import (  # noqa: E402
    SUBCOMMANDS,
    VERBS,
    VerbCommand,
    app,
)
from heddle.config import (  # noqa: E402
    PARTS,
    Config,
    FiniteFloat,
    Part,
    PositiveFloat,
    PositiveInt,
    Probability,
    Width,
    is_slot,
    kind_class,
    kinds,
)
from heddle.exchange.family import families  # noqa: E402
from heddle.exchange.family_match import design_from_config  # noqa: E402
from heddle.lab.explore.choices import FILE, comments  # noqa: E402
from heddle.laws import LAWS  # noqa: E402
from heddle.model import config as model_config  # noqa: E402
from heddle.model.decoder import build  # noqa: E402
from heddle.model.load_config import DEFAULTS  # noqa: E402
from heddle.numerics.kernels import OPERATIONS  # noqa: E402
from heddle.parts.modules import indexer, value_embedding  # noqa: E402
from heddle.parts.modules.short_convolution import ShortConvolutionConfig  # noqa: E402
from heddle.parts.scalings import LongContextFactor  # noqa: E402
from heddle.settings import settings_of  # noqa: E402
from tests.cases import CASES, case, parts_of  # noqa: E402
from tests.distributed import validation  # noqa: E402
from tests.exchange.cases import CASES as FAMILY_CASES  # noqa: E402
from tests.exchange.hf_models import config_of  # noqa: E402
from tools import family_facts, published_designs, published_facts, rank_laws  # noqa: E402
from tools.markdown import joined, prose, table  # noqa: E402
from tools.part_facts import COSTED, COSTS  # noqa: E402
from tools.part_pictures import CELLS, PANELS  # noqa: E402

SLOTS = ("mixers", "positions", "scalings", "norms", "feedforwards", "residuals")
MODEL = (
    "ModelConfig", "EmbeddingConfig", "PerLayerConfig", "LayerConfig", "HeadConfig", "InitializationConfig",
    "MultiTokenConfig",
)  # fmt: skip
MARKS = ("<!-- generated: {} -->", "<!-- end of generated -->")
NUMBERS = {
    PositiveInt: "positive integer",
    Width: "positive integer",
    Probability: "number in [0, 1)",
    PositiveFloat: "positive number",
    LongContextFactor: "number ≥ 1",
    FiniteFloat: "number",
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "name",
}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
# What the docstring of a config says and the page already does.
NOTHING_NEW = r"^(Fields of `\w+`\.|No fields( of its own)?\.)( None(:| or false:)[^.]*\bcomment\.)?\s*"
SHARED_BY = 2  # an option that as many verbs have stands once
REFUSED_PAIRS = ROOT / "tests/goldens/refused_pairs.txt"
WRITTEN = "<!-- Written by tools/make_docs.py from the code. Change the code, then run it again. -->"
HEAD = f"""# Parts

{WRITTEN}

A slot is a folder under `src/heddle/parts`; a kind is a file in it, whose docstring is the text here. Fields have their
type and default in brackets; `null` means off or the default. Every [law](../laws.md) runs on every option, in designs
that combine every two choices of different slots. [commonly-wrong.md](../commonly-wrong.md) shows common mistakes,
[a table](../../benchmarks/results/parts.md) the errors of the newest parts beside their oracles.
"""
BENCHMARKS = f"""# Benchmarks

{WRITTEN}

Goals of speed on a CPU, and what was measured beside a peer in the same run: [how](../benchmarks/README.md).
`make bench` measures every row in about 40 minutes on two cores, on the machine at hand. A ratio is the peer's time
over heddle's: the median of alternated turns, quartiles. *Unsteady*: other programs disturbed many turns.
"""
OPTIONS = f"""# Options

{WRITTEN}

Every verb with its arguments and options. `heddle VERB --help-all` prints them all, `--help` the most used ones.
In Python, in a file of options (`--config FILE`) and in the record of a run, an option has the same name with `_`
for `-`: `heddle.train("preset:gqa-tiny", batch_size=4)`, `batch_size: 4`. Brackets hold the default.
"""
PAIRS = """## Combinations that are refused

All other combinations work: `tests/laws/test_pairs.py` builds a design for every two choices of different slots and
runs every law on it. These combinations are refused with an error that says why. A design with a bidirectional mixer
is built, and refuses to create a state."""


def main() -> None:
    """Write the pages that changed, and print their names."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """The contents of every generated page."""
    laws = ROOT / "docs/laws.md"
    text = laws.read_text(encoding="utf-8")
    text = with_statements(text)
    folder = ROOT / "docs/parts"
    contents_of = {folder / "README.md": joined(HEAD.strip(), contents(), COSTS, PAIRS, refused_pairs()), laws: text}
    contents_of[folder / "model.md"] = joined("# The model", WRITTEN, *model_blocks())
    for slot in SLOTS:
        blocks = [*shared_blocks(slot), *(block for kind in own_kinds(slot) for block in kind_blocks(slot, kind))]
        contents_of[folder / f"{slot}.md"] = joined(
            f"# {slot.capitalize()}", WRITTEN, prose(slot_doc(slot)), CELLS.get(slot, ""), *blocks
        )
    contents_of[ROOT / "docs/huggingface/families.md"] = family_facts.page(WRITTEN)
    plan = ROOT / "docs/plan/accuracy.md"
    text = plan.read_text(encoding="utf-8")
    for name, (header, rows) in validation.tables().items():
        text = between(text, name, table(header, rows))
    contents_of[plan] = text
    contents_of[ROOT / "docs/huggingface/published.md"] = published_facts.page(WRITTEN)
    contents_of[FILE] = published_designs.page()
    contents_of[ROOT / "src/heddle/lab/conformance/variants.json"] = conformance_variants()
    contents_of[ROOT / "docs/rank-laws.md"] = rank_laws.page(WRITTEN)
    contents_of[ROOT / "docs/options.md"] = joined(OPTIONS.strip(), *option_blocks())
    readme = ROOT / "README.md"
    contents_of[readme] = between(readme.read_text(encoding="utf-8"), "measured", figures.readme_table())
    contents_of |= figures.pages(ROOT / "docs", joined(BENCHMARKS.strip()).strip())
    contents_of[folder / "kernels.md"] = joined("# Kernels", WRITTEN, kernels_intro(), *kernel_blocks())
    return contents_of


def conformance_variants() -> str:
    """The configs of a conformance kit: those that the tests hold against transformers, as heddle writes them."""
    lines = []
    for name, one in sorted(FAMILY_CASES.items()):
        family, variants = families()[name], {}
        for variant in one.variants:
            theirs = json.loads(config_of(name, variant).to_json_string()) | {"model_type": name}
            variants[variant] = family.write_config(design_from_config(theirs, family).resolved())
        lines.append(f"{json.dumps(name)}: {json.dumps(variants, sort_keys=True)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def between(text: str, name: str, table: str) -> str:
    """The text with a table between its marks. Raises ValueError if the marks are missing."""
    start, end = MARKS[0].format(name), MARKS[1]
    before, mark, rest = text.partition(start)
    if not mark or end not in rest:
        raise ValueError(f"no marks for '{name}'")
    return f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"


def option_blocks() -> Iterator[str]:
    """The options that several verbs share, then each verb, its arguments and its own options."""
    context = click.Context(app, info_name="heddle")
    verbs = {
        words: command
        for group in VERBS.values()
        for verb in group
        for words in (verb, *(f"{verb} {word}" for word in SUBCOMMANDS.get(verb, {})))
        if isinstance(command := app.get_command(context, words.split()[-1]), VerbCommand)
    }
    rows = {words: _option_rows(command) for words, command in verbs.items()}
    counts = Counter(row for of_verb in rows.values() for row in of_verb)
    common = {usage: (usage, text) for (usage, text), _ in reversed(counts.most_common())}  # the text most verbs have
    shared = [row for row, count in counts.items() if count >= SHARED_BY and row == common[row[0]]]
    yield "## Options of several verbs"
    yield _listed(shared)
    for group, names in VERBS.items():
        yield f"## {group}"
        for words in (words for words in verbs if words.split()[0] in names):
            own = [row for row in rows[words] if row not in shared]
            others = [row[0].strip("`").split(", ")[-1].split()[0] for row in rows[words] if row in shared]
            also = f"And {', '.join(f'`{name}`' for name in others)}, as above." if others else ""
            name = words.split()[-1]  # as `--help` prints it and pages write it; both names work
            yield joined(f"### heddle {name}", prose(verbs[words].help), _listed(own), also).strip()


def _listed(options: list[tuple[str, str]]) -> str:
    return "\n".join(f"- {usage}: {text}" for usage, text in options)


def _option_rows(command: VerbCommand) -> list[tuple[str, str]]:
    settings = settings_of(command.settings).values()
    return [(f"`{setting.usage}`", setting.help) for setting in settings if not setting.option.hidden]


def with_statements(text: str) -> str:
    """The page of laws; the first line of each law is its name and its statement."""
    for law in LAWS.values():
        text = re.sub(rf"^\*\*`{law.name}`\*\*.*$", f"**`{law.name}`** {law.statement}", text, flags=re.MULTILINE)
    return text


def model_blocks() -> Iterator[str]:
    """The configs of the model itself, and of what several mixers have."""
    defaults = ", ".join(f"`{name}: {{kind: {part['kind']}}}`" for name, part in DEFAULTS.items())
    yield prose(model_config.__doc__)
    yield f"A design that is read from a file or a dict may leave out the defaults {defaults}."
    for name in MODEL:
        cls = getattr(model_config, name)
        drawn = picture(f"model-{name}")
        yield from (f"## {name}", prose(cls.__doc__), drawn and CELLS["model"], drawn, fields(cls, cls.model_fields))
    cls = ShortConvolutionConfig
    yield from ("## ShortConvolutionConfig", prose(cls.__doc__), fields(cls, cls.model_fields))
    yield from ("## IndexerConfig", prose(indexer.__doc__), prose(indexer.IndexerConfig.__doc__))
    yield fields(indexer.IndexerConfig, indexer.IndexerConfig.model_fields)
    embedding = value_embedding.ValueEmbeddingConfig
    yield from ("## ValueEmbeddingConfig", prose(value_embedding.__doc__), prose(embedding.__doc__))
    yield fields(embedding, embedding.model_fields)


def refused_pairs() -> str:
    """The combinations that designs refuse, as a list."""
    return "\n".join(f"- {line}" for line in REFUSED_PAIRS.read_text(encoding="utf-8").splitlines())


def slot_doc(slot: str) -> str | None:
    """The docstring of a slot."""
    return sys.modules[f"heddle.parts.{slot}"].__doc__


def own_kinds(slot: str) -> list[str]:
    """The kinds that are files of the package, not a user's own."""
    return [kind for kind in kinds(slot) if (PARTS / slot / f"{kind}.py").is_file()]


def contents() -> str:
    """The slots and their kinds, as links."""
    rows = [(f"[{slot}]({slot}.md)", ", ".join(link(slot, kind) for kind in own_kinds(slot))) for slot in SLOTS]
    other_pages = [
        ("[the model](model.md)", "its fields"),
        ("[kernels](kernels.md)", ", ".join(f"`{n}`" for n in OPERATIONS)),
    ]
    return table(("slot", "kinds"), rows + other_pages)


def link(slot: str, kind: str) -> str:
    """A link to a kind, from any page of docs/parts."""
    return f"[`{kind}`]({slot}.md#{kind})"


def shared_fields(slot: str) -> list[str]:
    """The fields that every kind inherits from the config of its slot."""
    classes = [kind_class(slot, kind) for kind in own_kinds(slot)]
    bases = [
        base for base in classes[0].__mro__ if base.__module__ == f"heddle.parts.{slot}" and issubclass(base, Part)
    ]
    shared = [name for base in bases if all(issubclass(cls, base) for cls in classes) for name in base.model_fields]
    return list(dict.fromkeys(shared))


def shared_blocks(slot: str) -> Iterator[str]:
    """The fields that every kind of a slot has, once."""
    if shared := shared_fields(slot):
        yield fields(kind_class(slot, own_kinds(slot)[0]), shared).replace("Fields", "Fields of every kind", 1)


def kind_blocks(slot: str, kind: str) -> Iterator[str]:
    """One kind: its docstring, picture, fields, parameters, state and cost."""
    cls = kind_class(slot, kind)
    yield f"## {kind}"
    yield prose(sys.modules[cls.__module__].__doc__)
    yield picture(f"{slot}-{kind}")
    if cls.aliases:
        yield f"Designs may also name it {' or '.join(f'`{alias}`' for alias in cls.aliases)}."
    yield re.sub(NOTHING_NEW, "", prose(cls.__doc__)).strip()
    yield fields(cls, [name for name in cls.model_fields if name not in shared_fields(slot)])
    covering = [name for name in CASES if (slot, kind) in parts_of(case(name))]
    names = parameters(slot, kind, covering)
    yield f"Parameters: {', '.join(short_names(names))}." if names else "No parameters."
    if slot in COSTED:
        yield COSTED[slot](kind, covering)


def picture(name: str) -> str:
    """What the part reads, drawn by tools/part_pictures.py; nothing for parts without a picture."""
    if name not in PANELS:
        return ""
    labels = ", ".join(panel.label for panel in PANELS[name])
    return f"![What {name.partition('-')[2]} reads: {labels}](../images/parts/{name}.svg)"


def short_names(names: Sequence[str]) -> Iterator[str]:
    """The names in code marks; those that end alike below one module stand together: `q.weight|bias`."""
    ends: dict[str, list[str]] = {}
    for name in names:
        module, _, end = name.rpartition(".")
        ends.setdefault(module, []).append(end)
    for module, own in ends.items():
        yield f"`{module}.{'|'.join(own)}`" if module else ", ".join(f"`{end}`" for end in own)


def parameters(slot: str, kind: str, cases: list[str]) -> list[str]:
    """The names, within a kind's module, of the parameters that it has in any case."""
    home = f"heddle.parts.{slot}.{kind}"
    return list(dict.fromkeys(chain.from_iterable(parameters_of(name).get(home, ()) for name in cases)))


@cache
def parameters_of(name: str) -> dict[str, dict[str, None]]:
    """The names of a case's parameters within the modules of each kind, by the kind's file."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    inner: dict[str, set[nn.Module]] = defaultdict(set)  # of modules before them
    for module in build(case(name), device="meta").modules():
        home = type(module).__module__
        if module not in inner[home]:
            inner[home] |= set(module.modules())
            names[home] |= dict.fromkeys(parameter for parameter, _ in module.named_parameters())
    return names


def fields(cls: type[Config], names: Iterable[str]) -> str:
    """Some fields of a config: type, default, and the comments above and after each in the source."""
    hints, notes = get_type_hints(cls, include_extras=True), comments(cls)
    lines = []
    for name in names:
        note = f": {notes[name]}" if notes.get(name) else ""
        lines.append(f"- `{name}` ({kind_of_value(hints[name])}{default(cls.model_fields[name])}){note}")
    return joined("Fields:", "\n".join(lines)).strip() if lines else ""


def default(field: FieldInfo) -> str:
    """What follows the type of a field: whether it is required, or its default."""
    if field.is_required():
        return ", required"
    return "" if field.default is None else f", default `{plain(field.default)}`"


def plain(value: Any) -> str:
    """A default as YAML."""
    if isinstance(value, Config):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.dump().items()) + "}"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def kind_of_value(hint: Any) -> str:
    """A type in words."""
    if hint in NUMBERS:
        return NUMBERS[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of_value(member) for member in inner if member is not type(None))
    if origin is Literal:
        *others, last = (f"`{choice}`" for choice in inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        return f"list, each a {kind_of_value(inner[0])}"
    if isinstance(hint, type) and issubclass(hint, Part):
        fitting = [kind for kind in own_kinds(hint.slot) if issubclass(kind_class(hint.slot, kind), hint)]
        assert is_slot(hint)
        if fitting == own_kinds(hint.slot):
            return f"any of [{hint.slot}]({hint.slot}.md)"
        return ", ".join(link(hint.slot, kind) for kind in fitting)
    if isinstance(hint, type) and issubclass(hint, Config):
        return f"[{hint.__name__}](model.md#{hint.__name__.lower()})"
    limits = [item for constraint in hint.__metadata__[0].metadata for item in asdict(constraint).items()]
    bounds = [f"{BOUNDS[key]} {limit:g}" for key, limit in limits if key in BOUNDS]  # all numbers are finite
    return f"{NUMBERS[inner[0]]} {' and '.join(bounds)}".strip()


def kernels_intro() -> str:
    """What the tables of kernels mean."""
    return (
        "An operation has kernels, best first. A call takes the first kernel that supports it; shapes, dtypes and the\n"
        "layout alone decide. `heddle show` prints the chosen kernel, and why the others were rejected. To force one,\n"
        'use `--kernel attention=reference`, or `with heddle.kernels(attention="reference"):`. The last kernel, the\n'
        "reference, supports every call."
    )


def kernel_blocks() -> Iterator[str]:
    """Each operation: what it computes, and its kernels."""
    described: dict[str | None, str] = {}
    for name, operation in OPERATIONS.items():
        yield f"## {name}"
        text = sys.modules[operation.kernels[-1].run.__module__].__doc__
        yield f"Described under [{described[text]}](#{described[text]})." if text in described else prose(text)
        described.setdefault(text, name)
        yield f"Kernels: {', '.join(f'`{kernel.name}`' for kernel in operation.kernels)}."


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
