"""RoPE in config.json: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before.

Both formats are read, and both are written, with the same meaning.
"""

from collections.abc import Mapping
from typing import Any

from heddle.config import Config
from heddle.errors import ConfigError
from heddle.exchange.config_reader import ConfigReader, short_repr
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.longrope import LongropeConfig
from heddle.parts.scalings.ntk import NtkConfig
from heddle.parts.scalings.yarn import YarnConfig

# By rope_type: field of heddle's scaling config -> field of `rope_parameters`. `original_length` may also stand at the
# top level of config.json.
SCALING_FIELDS: dict[str, dict[str, str]] = {
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
ROPE_TYPES: dict[type[Config], str] = {
    LinearConfig: "linear",
    NtkConfig: "dynamic",
    Llama3Config: "llama3",
    LongropeConfig: "longrope",
    YarnConfig: "yarn",
}
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL_LENGTH = "original_max_position_embeddings"
NO_PARTIAL_ROTARY = "models of this family rotate all dims of their heads; leave it out"
FLOAT_FIELDS = frozenset({"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"})
FLOAT_FIELDS |= {"low_freq_factor", "high_freq_factor"}
IMAGE_FIELDS = frozenset({"mrope_section", "mrope_interleaved"})  # a text has one position on every axis


def read_rope(
    config: ConfigReader,
    head_dim: int,
    theta: float = 10000.0,
    partial_rotary_factor: float | None = None,
    original_length: int | None = None,
) -> dict[str, Any]:
    """The plain data of a `rope` position for heads of `head_dim` dims.

    theta, partial_rotary_factor (rotated dims / head_dim) and original_length are the family's defaults.
    partial_rotary_factor None: models of the family rotate all dims and ignore that field. Raises ConfigError for an
    unknown type of scaling, one that lacks a field, or a partial_rotary_factor that the family ignores.
    """
    name = "rope_scaling" if config.optional("rope_scaling") else "rope_parameters"  # an empty table is none
    table = config.optional(name) or {}
    if not isinstance(table, dict):
        raise config.invalid(name, "should be a table of fields")
    theta, factor = config.get("rope_theta", theta), config.get("partial_rotary_factor", partial_rotary_factor or 1.0)
    config.unread -= {"rope_parameters", ORIGINAL_LENGTH}
    if partial_rotary_factor is None and factor != 1.0:
        raise config.invalid("partial_rotary_factor", NO_PARTIAL_ROTARY)
    factor_or_none = None if partial_rotary_factor is None else factor
    return read_rope_table(config, table, head_dim, theta, factor_or_none, original_length)


def read_rope_or(config: ConfigReader, head_dim: int, theta: float, default: Mapping[str, Any]) -> dict[str, Any]:
    """As `read_rope`; from the table `default` if the config has no RoPE at all."""
    older = any(config.data.get(name) for name in ("rope_scaling", "rope_theta"))
    if older or config.data.get("rope_parameters") is not None:
        return read_rope(config, head_dim, theta)
    return read_rope_table(config, default, head_dim, theta)


def read_rope_table(
    config: ConfigReader,
    table: Mapping[str, Any],
    head_dim: int,
    theta: float,
    partial_rotary_factor: float | None = None,
    original_length: int | None = None,
) -> dict[str, Any]:
    """As `read_rope`, from one `rope_parameters` table, such as one layer type's."""
    if not isinstance(table, dict):
        raise config.invalid("rope_parameters", "should be a table of fields")
    parameters = ConfigReader(table, f"{config.source}, rope_parameters")
    theta = parameters.get("rope_theta", theta)
    factor = parameters.get("partial_rotary_factor", partial_rotary_factor or 1.0)
    if partial_rotary_factor is None and factor != 1.0:
        raise parameters.invalid("partial_rotary_factor", NO_PARTIAL_ROTARY)
    if not 0.0 < factor <= 1.0:
        raise parameters.invalid("partial_rotary_factor", "should be above 0 and at most 1")
    rotary_dim = int(head_dim * factor)
    rope: dict[str, Any] = {"kind": "rope", "base": theta}
    if rotary_dim != head_dim:
        rope["rotary_dim"] = rotary_dim
    scaling = _read_scaling(config, parameters, original_length)
    parameters.unread -= IMAGE_FIELDS
    parameters.check_all_read()
    return rope if scaling is None else rope | {"scaling": scaling}


def _read_scaling(config: ConfigReader, parameters: ConfigReader, original_length: int | None) -> dict[str, Any] | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        parameters.unread -= {"factor", ORIGINAL_LENGTH}  # transformers ignores them here
        return None
    if kind == "su":  # the older name
        kind = "longrope"
    if kind not in SCALING_FIELDS:
        known = ", ".join(("default", *SCALING_FIELDS))
        raise ConfigError(f"{parameters.source}: rope_type {short_repr(kind)} is not known; heddle reads {known}")
    scaling: dict[str, Any] = {name: parameters.optional(hf_name) for name, hf_name in SCALING_FIELDS[kind].items()}
    if kind == "yarn":
        scaling["truncate"] = parameters.get("truncate", True)
    parameters.unread.discard(ORIGINAL_LENGTH)
    max_positions: Any = config.data.get("max_position_embeddings")
    if "original_length" in SCALING_FIELDS[kind]:
        lengths = (config.optional(ORIGINAL_LENGTH), original_length, scaling["original_length"], max_positions)
        scaling["original_length"] = next((length for length in lengths if length is not None), None)
    if kind == "dynamic":
        scaling |= {"kind": "ntk", "original_length": config.require("max_position_embeddings", int)}
    has_lengths = isinstance(max_positions, int) and isinstance(scaling.get("original_length"), int)
    if kind in ("longrope", "yarn") and scaling["factor"] is None and has_lengths:
        scaling["factor"] = max_positions / scaling["original_length"]
    if kind == "longrope" and scaling["attention_factor"] is not None:
        scaling["factor"] = None
    if kind == "longrope" and isinstance(scaling["factor"], int | float):
        scaling["factor"] = max(1.0, scaling["factor"])
    uses_mscale = kind == "yarn" and scaling["attention_factor"] is None
    if kind == "yarn" and not (uses_mscale and scaling["mscale"] and scaling["mscale_all_dim"]):
        scaling["mscale"] = scaling["mscale_all_dim"] = None
    floats = {name: float(scaling[name]) for name in FLOAT_FIELDS if isinstance(scaling.get(name), int)}
    data = {"kind": kind} | scaling | floats
    return {name: value for name, value in data.items() if value is not None}


def read_ropes_by_layer_type(
    config: ConfigReader, head_dim: int, full_theta: float, sliding_theta: float
) -> dict[str, dict[str, Any]]:
    """The plain data of `rope` by layer type; full_theta and sliding_theta are defaults.

    `rope_parameters` has one table per layer type. Older files have rope_theta and rope_scaling, for full layers only.
    Files that the first versions of transformers 5 saved have one table for all layers, perhaps beside the two. Later
    versions ignore it: raises ConfigError if it says anything else than the two.
    """
    empty: dict[str, Any] = {}
    tables, scaling = config.get("rope_parameters", empty), config.get("rope_scaling", empty)
    if any(table.get("truncate") is False for table in (scaling, tables, *tables.values()) if isinstance(table, dict)):
        raise config.invalid("rope_parameters", "transformers ignores 'truncate' in a layer type's table; leave it out")
    full, sliding = (ConfigReader(tables, config.source).get(kind, empty) for kind in (FULL, SLIDING))
    if (top := config.optional(ORIGINAL_LENGTH)) is not None and (full | scaling).get(ORIGINAL_LENGTH) != top:
        raise config.invalid(ORIGINAL_LENGTH, f"transformers reads only that of {FULL}'s table; leave this one out")
    ropes = {
        FULL: read_rope_table(config, full | scaling, head_dim, full_theta),
        SLIDING: read_rope_table(config, sliding, head_dim, sliding_theta),
    }
    flat = {name: value for name, value in tables.items() if name not in (FULL, SLIDING)}
    if flat and read_rope_table(config, flat, head_dim, full_theta) not in ropes.values():
        remedy = f"it should have a table for {FULL} and one for {SLIDING}, and nothing that differs from both"
        raise config.invalid("rope_parameters", remedy)
    return ropes


def write_rope(
    rope: RopeConfig, head_dim: int, max_positions: int, partial_rotary_factor: float | None = None
) -> dict[str, Any]:
    """The config fields of a RoPE, in both formats.

    max_positions: the max_position_embeddings that the config will have. partial_rotary_factor as in `read_rope`.
    """
    table = write_rope_table(rope, head_dim, partial_rotary_factor)
    is_scaled = table["rope_type"] != "default"
    config = {
        "rope_parameters": table,
        "rope_theta": rope.base,
        "rope_scaling": table | {"type": table["rope_type"]} if is_scaled else None,
    }
    config |= {name: table[name] for name in ("partial_rotary_factor", ORIGINAL_LENGTH) if name in table}
    if isinstance(rope.scaling, NtkConfig):
        config["max_position_embeddings"] = rope.scaling.original_length or max_positions
    return config


def write_ropes_by_layer_type(full: RopeConfig, sliding: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The config fields of two RoPEs, in both formats; the older one has no scaling for sliding layers."""
    tables = {FULL: write_rope_table(full, head_dim), SLIDING: write_rope_table(sliding, head_dim)}
    for table in tables.values():
        table.pop("truncate", None)  # see `read_ropes_by_layer_type`
    kind = tables[FULL]["rope_type"]
    scaling = None if kind == "default" else tables[FULL] | {"type": kind}
    return {"rope_parameters": tables, "rope_theta": full.base, "rope_scaling": scaling}


def write_rope_table(rope: RopeConfig, head_dim: int, partial_rotary_factor: float | None = None) -> dict[str, Any]:
    """`rope_parameters` for heads of `head_dim` dims; partial_rotary_factor as in `read_rope`."""
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.scaling is not None and type(rope.scaling) in ROPE_TYPES:
        kind = ROPE_TYPES[type(rope.scaling)]
        table["rope_type"] = kind
        for name, hf_name in SCALING_FIELDS[kind].items():
            value = getattr(rope.scaling, name)
            if value is not None:
                table[hf_name] = list(value) if isinstance(value, tuple) else value
    if partial_rotary_factor is not None:
        table["partial_rotary_factor"] = _rotary_factor(rope.rotary_dim or head_dim, head_dim)
    return table


def _rotary_factor(rotary_dim: int, head_dim: int) -> float:
    """A factor for which int(head_dim · factor) == rotary_dim, despite rounding."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else (rotary_dim + 0.5) / head_dim
