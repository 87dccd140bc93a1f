"""RoPE as config.json tells it: in `rope_parameters` since transformers 5, in `rope_theta` and `rope_scaling` before.

Both spellings are read and both are written; readers of either find the same angles.
"""

from collections.abc import Mapping
from typing import Any

from heddle.config import Config
from heddle.errors import ConfigError
from heddle.exchange.fields import Fields
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.longrope import LongropeConfig
from heddle.parts.scalings.ntk import NtkConfig
from heddle.parts.scalings.yarn import YarnConfig

# Our field -> theirs, by kind; of these, `original_length` may be told at the top of the file.
NAMES: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "longrope": {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "original_length": "original_max_position_embeddings",
        "factor": "factor",
        "attention_factor": "attention_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
KINDS: dict[type[Config], str] = {
    LinearConfig: "linear",
    NtkConfig: "dynamic",
    Llama3Config: "llama3",
    LongropeConfig: "longrope",
    YarnConfig: "yarn",
}
FULL, SLIDING = "full_attention", "sliding_attention"
TOP = "original_max_position_embeddings"
WHOLE = "models of this family turn all dims of their heads; leave it out"
FLOATS = frozenset({"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"})
FLOATS |= {"low_freq_factor", "high_freq_factor"}


def read_rope(
    fields: Fields, head_dim: int, base: float = 10000.0, part: float | None = None, original: int | None = None
) -> dict[str, Any]:
    """The plain data of `rope` for heads of `head_dim` dims; base, part and original length are the family's defaults.

    part: that of the dims that are turned; None: the family turns all and looks at no partial_rotary_factor. Raises
    ConfigError for a type of scaling that is not known, one that lacks a field, or a part that nobody would look at.
    """
    older = fields.find("rope_scaling")
    table = fields.find("rope_parameters") if older is None else older
    theta, told = fields.take("rope_theta", base), fields.take("partial_rotary_factor", part or 1.0)
    fields.unread -= {"rope_parameters", TOP}
    if part is None and told != 1.0:
        raise fields.wrong("partial_rotary_factor", WHOLE)
    return rope_of(fields, table or {}, head_dim, theta, None if part is None else told, original)


def rope_of(
    fields: Fields,
    table: Mapping[str, Any],
    head_dim: int,
    theta: float,
    part: float | None = None,
    original: int | None = None,
) -> dict[str, Any]:
    """The same of one table of `rope_parameters`, such as that of one type of layers."""
    if not isinstance(table, dict):
        raise fields.wrong("rope_parameters", "should be a table of fields")
    inner = Fields(table, f"{fields.place}, rope_parameters")
    theta, told = inner.take("rope_theta", theta), inner.take("partial_rotary_factor", part or 1.0)
    if part is None and told != 1.0:
        raise inner.wrong("partial_rotary_factor", WHOLE)
    if not 0.0 < told <= 1.0:
        raise inner.wrong("partial_rotary_factor", "should be above 0 and at most 1")
    dim = int(head_dim * told)
    rope: dict[str, Any] = {"kind": "rope", "base": theta}
    if dim != head_dim:
        rope["dim"] = dim
    scaling = _scaling(fields, inner, original)
    inner.finish()
    return rope if scaling is None else rope | {"scaling": scaling}


def _scaling(fields: Fields, inner: Fields, original: int | None) -> dict[str, Any] | None:
    kind = inner.take("rope_type", inner.take("type", "default"))
    if kind == "default":
        inner.unread -= {"factor", TOP}  # read by nobody
        return None
    if kind == "su":  # as it was called before
        kind = "longrope"
    if kind not in NAMES:
        known = ", ".join(("default", *NAMES))
        raise ConfigError(f"{inner.place}: rope_type '{kind}' is not known; heddle reads {known}")
    found: dict[str, Any] = {ours: inner.find(theirs) for ours, theirs in NAMES[kind].items()}
    inner.unread.discard(TOP)
    longest: Any = fields.data.get("max_position_embeddings")
    if "original_length" in NAMES[kind]:
        found["original_length"] = fields.take(TOP, 0) or original or found["original_length"] or longest
    if kind == "dynamic":
        found |= {"kind": "ntk", "original_length": longest}
    both = isinstance(longest, int) and isinstance(found.get("original_length"), int)
    if kind in ("longrope", "yarn") and found["factor"] is None and both:
        found["factor"] = longest / found["original_length"]
    if kind == "longrope" and found["attention_factor"] is not None:
        found["factor"] = None
    if kind == "longrope" and isinstance(found["factor"], int | float):
        found["factor"] = max(1.0, found["factor"])
    if kind == "yarn" and (found["attention_factor"] is not None or not (found["mscale"] and found["mscale_all_dim"])):
        found["mscale"] = found["mscale_all_dim"] = None
    floats = {name: float(found[name]) for name in FLOATS if isinstance(found.get(name), int)}
    data = {"kind": kind} | found | floats
    return {name: value for name, value in data.items() if value is not None}


def read_ropes(fields: Fields, head_dim: int, base: float, local: float) -> dict[str, dict[str, Any]]:
    """The rotation of each type of layers; base and local are theta of full and of sliding layers if no table tells.

    `rope_parameters` has a table a type; before, rope_theta and rope_scaling told that of full layers.
    """
    nothing: dict[str, Any] = {}
    tables, scaling = fields.take("rope_parameters", nothing), fields.take("rope_scaling", nothing)
    if set(tables) - {FULL, SLIDING}:
        raise fields.wrong("rope_parameters", f"should have a table for {FULL} and one for {SLIDING}")
    if any(table.get("truncate") is False for table in (scaling, *tables.values()) if isinstance(table, dict)):
        raise fields.wrong("rope_parameters", "transformers reads no 'truncate' in the table of one type of layers")
    full, sliding = (Fields(tables, fields.place).take(kind, nothing) for kind in (FULL, SLIDING))
    return {
        FULL: rope_of(fields, full | scaling, head_dim, base),
        SLIDING: rope_of(fields, sliding, head_dim, local),
    }


def write_rope(rope: RopeConfig, head_dim: int, longest: int, part: float | None = None) -> dict[str, Any]:
    """Both spellings of a rotation; `longest` is what max_position_embeddings will say, part as in `read_rope`."""
    table = rope_table(rope, head_dim, part)
    scaled = table["rope_type"] != "default"
    fields = {
        "rope_parameters": table,
        "rope_theta": rope.base,
        "rope_scaling": table | {"type": table["rope_type"]} if scaled else None,
    }
    fields |= {name: table[name] for name in ("partial_rotary_factor", TOP) if name in table}
    if isinstance(rope.scaling, NtkConfig):
        fields["max_position_embeddings"] = rope.scaling.original_length or longest
    return fields


def write_ropes(full: RopeConfig, sliding: RopeConfig, head_dim: int) -> dict[str, Any]:
    """Both spellings of two rotations; the older one has no scaling of sliding layers."""
    tables = {FULL: rope_table(full, head_dim), SLIDING: rope_table(sliding, head_dim)}
    for table in tables.values():
        table.pop("truncate", None)  # see `read_ropes`
    kind = tables[FULL]["rope_type"]
    scaling = None if kind == "default" else tables[FULL] | {"type": kind}
    return {"rope_parameters": tables, "rope_theta": full.base, "rope_scaling": scaling}


def rope_table(rope: RopeConfig, head_dim: int, part: float | None = None) -> dict[str, Any]:
    """`rope_parameters` of a rotation of heads of `head_dim` dims; part as in `read_rope`."""
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.scaling is not None and type(rope.scaling) in KINDS:
        kind = KINDS[type(rope.scaling)]
        table["rope_type"] = kind
        for ours, theirs in NAMES[kind].items():
            value = getattr(rope.scaling, ours)
            if value is not None:
                table[theirs] = list(value) if isinstance(value, tuple) else value
    dim = rope.dim or head_dim
    if part is not None:
        table["partial_rotary_factor"] = _part(dim, head_dim)
    return table


def _part(dim: int, head_dim: int) -> float:
    """A factor of which int(head_dim · factor) is dim, whatever the rounding."""
    part = dim / head_dim
    return part if int(head_dim * part) == dim else (dim + 0.5) / head_dim
