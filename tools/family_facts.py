"""The page of families for the documentation: each family, and how closely it agrees with transformers."""

import sys
from collections.abc import Iterator

from heddle.exchange.family import MISSING_PARTS, families
from heddle.exchange.family_match import HEDDLE
from tests.exchange.cases import CASES
from tools.markdown import joined, prose, table

PACKAGE = "heddle.exchange.families"
INTRO = """A family is a `model_type` of transformers: one file in `src/heddle/exchange/families`, which maps config
fields and tensor names both ways. Logits in float32 are within 1e-5 of transformers', in bfloat16 as
close to the float32 logits as transformers' own."""
HEADS = ("family", "class", "bit for bit")
MEANING = """The tests check several variants of every family (`tests/exchange/cases.py`), with models that transformers
creates with random weights and uneven shapes, and saves in shards:

- Logits: a batch of different lengths padded on the left, and a single row, longer than windows and original lengths.
  In bfloat16 the median error is at most 1.25 times transformers'. *Bit for bit*: the logits of the batch are equal.
- Greedy text: 64 tokens are equal, with heddle's state and transformers' cache. Masked language models write no text;
  their logits are within 1e-10 in float64 (ModernBERT's rotations, which transformers computes in float32, in float64
  too).
- Files: `export` writes the names, dtypes and bytes that were read; transformers reads the same class and config, and
  computes the same bits. New weights are exported and read again without a changed bit.
- Fields: each number and boolean of each config is changed, one at a time, to a value that both sides accept. Both
  must then compute the same logits, and the logits must change, unless only training reads the field.

Unknown fields are refused by name. Fields that are off or null, defaults and old spellings are read, and so are
fields that change nothing that the model computes, which an import names. Code that `auto_map` names is never run.
[published.md](published.md) lists published models."""


def page(written: str) -> str:
    """docs/huggingface/families.md."""
    return joined("# Families", written, INTRO, table(HEADS, list(_rows())), MEANING, *_families(), *_not_read())


def _rows() -> Iterator[tuple[str, ...]]:
    for name, family in families().items():
        if name == HEDDLE:
            continue
        case = CASES[name]
        exceptions = "".join(f" except `{variant}`" for variant in sorted(case.inexact))
        equal = f"float32{exceptions}{', bfloat16' if case.narrow else ''}" if case.exact else ""
        yield (f"[`{name}`](#{name})", f"`{family.architecture}`", equal)


def _families() -> Iterator[str]:
    for name, family in families().items():
        yield f"## {name}"
        yield prose(sys.modules[f"{PACKAGE}.{name.replace('-', '_')}"].__doc__)
        if family.ignored_tensors:
            yield f"Ignored tensors: {', '.join(f'`{pattern}`' for pattern in family.ignored_tensors)}."


def _not_read() -> Iterator[str]:
    yield "## Not read"
    yield "Published since 2025, and refused by name, with what they need and heddle lacks:"
    yield table(("family", "needs"), [(f"`{name}`", missing) for name, missing in MISSING_PARTS.items()])
