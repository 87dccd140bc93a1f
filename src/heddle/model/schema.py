"""JSON Schema of designs, for editors. A field that holds a part allows every kind that fits there, by any name."""

from typing import Any

from heddle.config import Config, Part, is_slot, kind_class, kinds
from heddle.model.config import ModelConfig

SLOTS = ("feedforwards", "mixers", "norms", "positions", "residuals", "scalings")


def schema() -> dict[str, Any]:
    """Return the schema of a design file (JSON Schema draft 2020-12)."""
    definitions: dict[str, Any] = {}
    root = _config_schema(ModelConfig, definitions)
    for slot in SLOTS:
        choices_by_base: dict[str, list[dict[str, Any]]] = {}
        for kind in kinds(slot):
            cls = kind_class(slot, kind)
            part = _config_schema(cls, definitions)
            names = [kind, *cls.aliases]
            word = [] if "required" in part else [{"enum": names}]  # a kind that needs no field is also a word
            part["properties"] = {"kind": {"enum": names} if cls.aliases else {"const": kind}, **part["properties"]}
            part["required"] = ["kind", *part.get("required", [])]
            for base in cls.__mro__:
                if issubclass(base, Part) and is_slot(base):
                    choices = choices_by_base.setdefault(base.__name__, [])
                    choices += [{"$ref": f"#/$defs/{slot}.{kind}"}, *word]
            definitions[f"{slot}.{kind}"] = part
        definitions |= {name: {"oneOf": choices} for name, choices in choices_by_base.items()}
    # load_config has defaults for norm and residual. A design may contain a design (its encoder), hence a definition.
    design = definitions[ModelConfig.__name__]
    design["required"] = [name for name in design["required"] if name not in ("norm", "residual")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _config_schema(config: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one config class, and add the schemas that it refers to to `definitions`."""
    schema: dict[str, Any] = config.model_json_schema(ref_template="#/$defs/{model}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions.setdefault(name, definition)
    return schema
