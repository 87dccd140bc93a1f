"""The page of families for the documentation: each family, and how closely it agrees with transformers."""

import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from heddle.exchange.family import NOT_READ_FILE, Family, families, missing_parts
from heddle.exchange.family_match import HEDDLE
from tests.exchange.cases import CASES
from tools.markdown import joined, prose

INTRO = """A family is a `model_type` of transformers, here with its class: one `Family` in
`src/heddle/exchange/families` maps config fields and tensor names both ways. Logits in float32 are within 1e-5 of
transformers', in bfloat16 as close to the float32 logits as transformers' own."""
MEANING = """Tests check variants of every family (`tests/exchange/cases.py`) against transformers' models with random
weights and uneven shapes:

- Logits: a batch padded on the left, and a single row, longer than windows and original lengths. In bfloat16 the median
  error is at most 1.25 times transformers'. *Bit for bit* below: the batch's logits are equal.
- Greedy text: 64 tokens are equal, with heddle's state and transformers' cache. Logits of masked language models are
  within 1e-10 in float64.
- Files: `export` writes the names, dtypes and bytes that were read; transformers reads the same class and config.
- Fields: each number and boolean of a config is changed to a value that both sides accept; both must then compute the
  same other logits, unless only training reads the field.

Unknown fields are refused by name; fields without effect on the model are read, and named by an import. Code that
`auto_map` names is never run. Multi-token modules are read where heddle has the same, else ignored: they do not change
the next token's logits. Balancing biases keep their values; set `bias_update` to train them.
[published.md](published.md) lists published models."""


def page(written: str) -> str:
    """docs/huggingface/families.md."""
    return joined("# Families", written, INTRO, MEANING, *_families(), *_not_read())


def _families() -> Iterator[str]:
    for name, family in sorted(families().items()):
        yield f"## {name}"
        yield prose(about(family))
        notes = [f"`{family.architecture}`{_equal(name)}."]
        if family.ignored_tensors:
            where = "" if family.multi_token is None else " where no modules are read"
            notes.append(f"Ignored tensors{where}: {', '.join(f'`{pattern}`' for pattern in family.ignored_tensors)}.")
        yield " ".join(notes)


def about(family: Family) -> str:
    """What a family is: the docstring of its file where it is alone there, else that of its `read_config`."""
    file = inspect.getmodule(family.read_config)
    in_file = [value for value in vars(file).values() if isinstance(value, Family)]
    return (file if in_file == [family] else family.read_config).__doc__ or ""


def _equal(name: str) -> str:
    """In which dtypes the tests demand equal bits."""
    if name not in CASES or not CASES[name].exact:
        return ""
    exceptions = "".join(f" (except `{variant}`)" for variant in sorted(CASES[name].inexact))
    return f", bit for bit in float32{exceptions}{' and bfloat16' if CASES[name].narrow else ''}"


def _not_read() -> Iterator[str]:
    other = json.loads(NOT_READ_FILE.read_text(encoding="utf-8"))["as"]
    writable = [f"`{name}`" for name, missing in missing_parts().items() if not missing]
    needs = defaultdict(list)
    for name, missing in missing_parts().items():
        if missing:
            needs[missing].append(f"`{name}`")
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {HEDDLE}  # registered where its class was imported
    read = sum(name in families() or name in other for name in names)
    yield "## Not read"
    renamed = _listed(f"`{name}` as `{target}`" for name, target in other.items())
    yield f"""transformers {transformers.__version__} has {len(names)} causal types. heddle reads {read} of them:
families above (BERT and its followers as encoders), and {renamed}."""
    if writable:
        yield f"No family reads these yet, though no part is missing ({len(writable)}): {', '.join(writable)}."
    yield "The others, and some that are no causal types, are refused by name, with what they need and heddle lacks:"
    yield "\n".join(f"- {missing}: {', '.join(types)}" for missing, types in sorted(needs.items()))


def _listed(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}"
