"""The size of a design from the formulas of its parts, as the explorer computes it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from heddle.config import Part, kind_class
from heddle.lab.explore.formulas import Formulas, Refusal, _function, _value, formulas_of, model_formulas, values_of
from heddle.model.config import DistinctLayer, ModelConfig

WIDE = 4  # bytes of a number that is float32 at least


@dataclass(frozen=True)
class DeclaredSize:
    """As the fields of `heddle.model.size.Size`; the state is that of the layers, without the table of positions."""

    parameters: int
    active_parameters: int
    flops: int
    state_bytes: int


def declared_size(config: ModelConfig, tokens: int, element_bytes: int = WIDE) -> DeclaredSize | None:
    """The size of a design with a `vocab_size`, for one row of `tokens` tokens. An encoder is not counted.

    None if a part declares no costs.
    """
    sums = [0] * 5
    config = config.resolved()
    before = [0, 0]
    for layer in config.distinct_layers:
        if not _add(sums, config, layer, tokens, before):
            return None
    surroundings = {"width": config.width, "tokens": tokens} | around_norms(config.norm)
    surroundings |= {"layers": before[0], "all_branches": before[1]}
    final = formulas_of(config.residual.slot, config.residual.kind)
    if final is None:
        return None
    _accumulate(sums, evaluated(final.final, values_of(config.residual) | surroundings), 1)
    if config.embedding.position is not None:
        _accumulate(sums, _costs(config.embedding.position, surroundings) or (0,) * 5, 1)
    _accumulate(sums, costs_of(model_formulas(), _around_layers(config) | surroundings), 1)
    parameters, inactive, flops, cached, recurrent = sums
    return DeclaredSize(parameters, parameters - inactive, flops, cached * element_bytes + recurrent * WIDE)


def _around_layers(config: ModelConfig) -> dict[str, Any]:
    """The numbers of the formulas of the embedding and the head."""
    embedding, head = config.embedding, config.head
    return {
        "vocab_size": config.vocab_size,
        "token_types": embedding.token_types or 0,
        "embedding_norm": embedding.norm,
        "head_tied": head.tied,
        "head_bias": head.bias,
        "head_transform": head.transform is not None,
        "transform_bias": head.transform_bias,
    }


def evaluated(formulas: tuple[Any, ...], values: dict[str, Any]) -> tuple[int, ...]:
    """The values of formulas, rounded."""
    return tuple(round(_compiled(formula)(values)) for formula in formulas)


def costs_of(formulas: Formulas, values: dict[str, Any]) -> tuple[int, ...]:
    """The costs of a part with these `values_of` its fields; defaults are added to them."""
    _complete(formulas, values)
    return evaluated(formulas.costs, values)


def refused(formulas: Formulas, values: dict[str, Any]) -> list[tuple[str, str]]:
    """(path, sentence) of each refusal."""
    _complete(formulas, values)
    return [(each.path, _sentence(each, values)) for each in formulas.refusals if _compiled(each.condition)(values) > 0]


def _complete(formulas: Formulas, values: dict[str, Any]) -> None:
    """Add the defaults of missing fields."""
    for name, formula in formulas.defaults.items():
        if not values.get(f"has_{name}"):
            values[name] = _compiled(formula)(values)


def _sentence(refusal: Refusal, values: dict[str, Any]) -> str:
    shown = (piece if isinstance(piece, str) else _value(piece, values) for piece in refusal.sentence)
    return "".join(piece if isinstance(piece, str) else f"{piece:.15g}" for piece in shown)


_compiled = cache(_function)


def around_norms(norm: Part) -> dict[str, int]:
    """Parameters of a norm: for each element, and beside them."""
    none, one = (costs[0] if (costs := _costs(norm, {"width": width})) else width for width in (0, 1))
    return {"norm_weights": one - none, "norm_scalars": none}


def refused_fields(part: Part, width: int, branches: int = 2, layers: int = 1) -> list[tuple[str, str]]:
    """(path, sentence) of what the formulas refuse of a part that may be invalid."""
    formulas: Formulas | None = formulas_of(part.slot, part.kind)
    values = values_of(part) | {"width": width, "branches": branches, "layers": layers}
    found = [] if formulas is None else refused(formulas, values)
    rotation = getattr(part, "position", None)
    if rotation is not None and getattr(rotation, "scaling", None) is not None:
        scaling: Any = formulas_of("scalings", rotation.scaling.kind)
        dims = rotation.rotary_dim or values.get("rope_dim") or values["head_dim"]
        around = {"rotation_dims": dims, "rotation_base": rotation.base}
        found += [(f"position.{path}", text) for path, text in refused(scaling, values_of(rotation.scaling) | around)]
    for name, inner in _inner(part):
        found += [(f"{name}.{path}", text) for path, text in refused_fields(inner, width)]
    return found


def unchecked(slot: str, fields: dict[str, Any]) -> Part:
    """A part of plain data, with its defaults and without its checks."""
    kind: Any = kind_class(slot, fields["kind"])
    slots = {"position": "positions", "scaling": "scalings", "first": "mixers", "second": "mixers"}
    parts = {
        name: unchecked(slots.get(name, "norms"), value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name != "kind"
    }
    part: Part = kind.model_construct(**parts)
    return part


def _add(sums: list[int], config: ModelConfig, layer: DistinctLayer, tokens: int, before: list[int]) -> bool:
    """before: layers and branches below, to which these are added."""
    count, parts = layer.count, [part for part in (layer.config.mixer, layer.config.feedforward) if part is not None]
    surroundings = {"width": config.width, "tokens": tokens, "branches": len(parts)}
    surroundings |= {"count": count, "layers_before": before[0], "branches_before": before[1]}
    before[:] = before[0] + count, before[1] + count * len(parts)
    surroundings |= around_norms(config.norm)
    for part in (*parts, config.residual):
        costs = _costs(part, surroundings)
        if costs is None:
            return False
        _accumulate(sums, (*costs[:2], 0, 0, 0), layer.weights)
        _accumulate(sums, (0, 0, *costs[2:]), count)
    return True


def _costs(part: Part, surroundings: dict[str, Any]) -> tuple[int, ...] | None:
    """The costs of a part and of the mixers within it."""
    formulas, inner = formulas_of(part.slot, part.kind), [each for _, each in _inner(part)]
    if formulas is None and not inner:
        return None
    own = getattr(part, "norm", None)
    if own is not None:
        surroundings = surroundings | around_norms(own)
    sums = [0] * 5 if formulas is None else [*costs_of(formulas, values_of(part) | surroundings)]
    for each in inner:
        costs = _costs(each, surroundings)
        if costs is None:
            return None
        _accumulate(sums, costs, 1)
    return tuple(sums)


def _inner(part: Part) -> list[tuple[str, Part]]:
    """The mixers within a mixer, by field."""
    values = ((name, getattr(part, name)) for name in type(part).model_fields)
    return [(name, value) for name, value in values if isinstance(value, Part) and value.slot == part.slot]


def _accumulate(sums: list[int], costs: tuple[int, ...], count: int) -> None:
    for index, cost in enumerate(costs):
        sums[index] += cost * count
