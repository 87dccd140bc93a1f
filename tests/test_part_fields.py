"""A field of a kind is named in its own file, in the exchange with other formats, in conversions, and in presets."""

import ast
from collections.abc import Iterator

from heddle.config import Part, kind_class, kinds
from tests.source import Source, package_sources, slots

# Units that may name fields: kinds themselves, other formats, conversions of kinds, and designs written as data.
MAY_NAME = ("heddle.parts.", "heddle.exchange.", "heddle.conversion.", "heddle.model.presets", "heddle.numerics.")

# Names that are fields of kinds and also stand for something else, each with where that is.
ELSEWHERE = {
    "alpha": "LoRA's factor",
    "aux_loss": "a statistic of a training step",
    "experts": "the experts' statistics in logs and reports",
    "factor": "an optimizer's factor of a learning rate",
    "groups": "groups of heads on a page",
    "heads": "heads on a page",
    "layout": "the layout of a figure",
    "length": "tokens of a text",
    "norm": "the norm of a design",
    "position": "the position of an embedding",
    "scale": "of an embedding or a head",
    "bias": "of a head",
    "softcap": "of a head",
    "top_k": "a setting of sampling",
}


def fields_of_kinds() -> set[str]:
    """The fields that kinds define themselves, without those of slots."""
    names: set[str] = set()
    of_slots: set[str] = set()
    for slot in slots():
        for kind in kinds(slot):
            cls = kind_class(slot, kind)
            names |= set(cls.model_fields)
            of_slots |= {name for base in cls.__mro__[1:] if issubclass(base, Part) for name in base.model_fields}
    return names - of_slots


def names_used(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) where a text is a key, is compared, is in a set, or names what `replace` changes."""
    for node in ast.walk(source.tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Subscript):
            values = [node.slice]
        elif isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.Set):
            values = node.elts
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = node.args[:1] if node.func.attr in ("get", "pop") else []
            if node.func.attr == "replace":
                yield from ((node.lineno, keyword.arg or "") for keyword in node.keywords)
        for value in values:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def faults(sources: list[Source]) -> list[str]:
    """Where a field of a kind is named by another file."""
    fields = fields_of_kinds() - ELSEWHERE.keys()
    return [
        f"{source.name}:{line}: {name}"
        for source in sources
        if not source.name.startswith(MAY_NAME)
        for line, name in names_used(source)
        if name in fields
    ]


def test_fields_of_kinds_are_named_in_their_own_files() -> None:
    assert faults(package_sources()) == []


def test_a_field_named_elsewhere_is_found() -> None:
    texts = [
        'small["kv_rank"] = 8',
        'window = mixer.dump().get("window")',
        'name == "hidden"',
        "c.replace(rotary_dim=4)",
    ]
    sources = [Source("heddle.laws.shrink", text) for text in texts]
    assert len(faults(sources)) == len(texts)
    assert faults([Source("heddle.exchange.families.llama", texts[0])]) == []
