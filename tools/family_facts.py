"""The page of families for the documentation: each family, and how often each property of it is tested."""

import sys
from collections.abc import Iterator

from heddle.exchange.family import families
from heddle.exchange.family_match import HEDDLE
from tests.exchange.cases import CASES
from tests.exchange.test_families import FIELDS
from tools.markdown import joined, prose, table

INTRO = """What transformers calls a family, heddle reads and writes as a table of fields and of tensor names, one file
each in `src/heddle/exchange/families`. Every number here counts tests that run in every build and pass; none is left
out. The models of these tests are made by transformers with random weights and awkward shapes, saved by it in shards,
and read by heddle: it is transformers that says what is right."""
HEADS = (
    "family", "class", "variants", "same logits", "in bfloat16", "same greedy text", "same files again",
    "back and forth", "numbers changed",
)  # fmt: skip
MEANING = """- *same logits*: within 1e-5 in float32, for rows of unlike lengths padded on the left and for a row alone,
  beyond windows and original lengths; so many of padded rows bit for bit.
- *in bfloat16*: as near to the logits in float32 as transformers' own are; where it says *bits*, theirs bit for bit.
- *same greedy text*: 64 tokens, written by `heddle.generate` with its state and by transformers with its cache.
- *same files again*: `export` writes tensors with the names, types and bytes of the files that were read;
  transformers reads them as the same class with the same config, and computes the same bits.
- *back and forth*: other weights in heddle, exported and read again: design and weights are equal bit for bit.
- *numbers changed*: each number and truth value of each config is changed, one at a time, to a value that both
  sides accept. Both must then compute alike; and unless training alone reads the field, logits must have moved.

A field that heddle does not know is refused by name in every family."""


def page(written: str) -> str:
    """docs/huggingface/families.md."""
    return joined("# Families", written, INTRO, table(HEADS, list(_rows())), MEANING, *_families())


def _rows() -> Iterator[tuple[str, ...]]:
    for name, family in families().items():
        if name == HEDDLE:
            continue
        case = CASES[name]
        count = str(len(case.variants))
        changed = str(sum(field[0] == name for field in FIELDS))
        same = f"{count}, {len(case.variants) - len(case.inexact)} in bits" if case.exact else count
        narrow = f"{count}, bits" if case.narrow else count
        yield (f"[`{name}`](#{name})", f"`{family.architecture}`", count, same, narrow, count, count, count, changed)


def _families() -> Iterator[str]:
    for name, family in families().items():
        yield f"## {name}"
        yield prose(sys.modules[family.read_config.__module__].__doc__)
        if name != HEDDLE:
            yield f"Variants tested: {', '.join(f'`{variant}`' for variant in CASES[name].variants)}."
        if family.ignored_tensors:
            yield f"Ignored tensors: {', '.join(f'`{pattern}`' for pattern in family.ignored_tensors)}."
