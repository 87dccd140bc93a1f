"""JSON Schema of designs, for editors: every place of a part is the choice of the kinds that fit there."""

from typing import Any

from heddle.config import Config, Part, is_slot, kind_class, kinds
from heddle.model.config import ModelConfig

SLOTS = ("feedforwards", "mixers", "norms", "positions", "residuals", "scalings")


def schema() -> dict[str, Any]:
    """The schema of a design on disk (JSON Schema draft 2020-12)."""
    definitions: dict[str, Any] = {}
    root = _of(ModelConfig, definitions)
    for slot in SLOTS:
        places: dict[str, list[dict[str, str]]] = {}
        for kind in kinds(slot):
            cls = kind_class(slot, kind)
            one = _of(cls, definitions)
            one["properties"] = {"kind": {"const": kind}, **one["properties"]}
            one["required"] = ["kind", *one.get("required", [])]
            for base in cls.__mro__:
                if issubclass(base, Part) and is_slot(base):
                    places.setdefault(base.__name__, []).append({"$ref": f"#/$defs/{slot}.{kind}"})
            definitions[f"{slot}.{kind}"] = one
        definitions |= {name: {"oneOf": choices} for name, choices in places.items()}
    # Both have defaults where a design is read. It refers to itself, as an encoder, so it is among the definitions.
    design = definitions[ModelConfig.__name__]
    design["required"] = [name for name in design["required"] if name not in ("norm", "residual")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _of(config: type[Config], definitions: dict[str, Any]) -> dict[str, Any]:
    """One config's schema, those it refers to put among the definitions."""
    made: dict[str, Any] = config.model_json_schema(ref_template="#/$defs/{model}")
    for name, definition in made.pop("$defs", {}).items():
        definitions.setdefault(name, definition)
    return made
