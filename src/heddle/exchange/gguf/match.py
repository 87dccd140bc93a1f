"""Whether a graph of llama.cpp runs a design: a design that differs from what the graph assumes is refused by field."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange import design_parts
from heddle.exchange.family import families
from heddle.exchange.family_match import MISSING, FamilyMatch, Mismatch, describe_mismatch, exact_matches, match_family
from heddle.exchange.gguf.architectures import ARCHITECTURES, LEFT_OUT, POSITION, Architecture
from heddle.exchange.gguf.keys_from_config import ConfigFields
from heddle.model.config import HeadConfig, ModelConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.yarn import YarnConfig

MAX_LISTED = 6  # mismatches that an error lists
# A GGUF can hold other betas, but programs built on llama.cpp ignore them.
YARN_DEFAULTS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None, "mscale": None,
    "mscale_all_dim": None,
}  # fmt: skip


def architecture_of(design: ModelConfig, preferred: str | None = None) -> tuple[FamilyMatch, Architecture] | None:
    """The family and the graph for a design, None if llama.cpp cannot run it.

    If several match, the family that the model came from, `preferred`, comes first.
    """
    for match, _ in exact_matches(design, [(families()[name], True) for name in _names(preferred)]):
        graph = ARCHITECTURES[match.family.model_type]
        if not _outermost(_graph_mismatches(design, match.config, graph)):
            return match, graph
    return None


def match_architecture(design: ModelConfig, preferred: str | None = None) -> tuple[FamilyMatch, Architecture]:
    """As `architecture_of`. Raises ConfigError naming what to change for `preferred`, or for the nearest family."""
    if (found := architecture_of(design, preferred)) is not None:
        return found
    candidates: list[tuple[bool, list[Mismatch], Architecture]] = []
    for name in _names(preferred):
        match, graph = match_family(design, families()[name]), ARCHITECTURES[name]
        family_mismatches = [mismatch for mismatch in match.mismatches if mismatch.actual != mismatch.required]
        if mismatches := _outermost([*family_mismatches, *_graph_mismatches(design, match.config, graph)]):
            candidates.append((name != preferred, mismatches, graph))
    if preferred in LEFT_OUT:
        remedy = "choose --format hf"
        raise ConfigError(f"llama.cpp cannot run this design: its {preferred} lacks {LEFT_OUT[preferred]}; {remedy}")
    if not candidates:
        raise ConfigError("llama.cpp cannot run this design or one near it; start from preset:gqa-tiny")
    _, mismatches, graph = min(candidates, key=lambda each: (each[0], sum(one.weight for one in each[1])))
    reasons = ", ".join(describe_mismatch(design, each) for each in mismatches[:MAX_LISTED])
    changes = " ".join(str(each) for each in mismatches[:MAX_LISTED])
    raise ConfigError(f"llama.cpp cannot run this design: {reasons}; its {graph.name} runs it with {changes}")


def _names(preferred: str | None) -> list[str]:
    return sorted((name for name in ARCHITECTURES if name in families()), key=lambda name: name != preferred)


def _outermost(mismatches: Iterable[Mismatch]) -> list[Mismatch]:
    """One mismatch per path, without fields inside another mismatch, and without values that only seem to differ."""
    by_path = {mismatch.path: mismatch for mismatch in mismatches}
    return [
        mismatch
        for path, mismatch in by_path.items()
        if mismatch.actual != mismatch.required and not any(path.startswith(f"{outer}.") for outer in by_path)
    ]


def ropes_of(design: ModelConfig) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of layers without a window, and with one (None: there are none). Layers without RoPE are skipped."""
    mixers = [mixer for mixer in design_parts.mixers(design.resolved()) if design_parts.has_rope(mixer)]
    full = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is None]
    sliding = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is not None]
    return (full or sliding or [RopeConfig()])[0], sliding[0] if sliding else None


def _graph_mismatches(design: ModelConfig, config: ConfigFields, graph: Architecture) -> Iterator[Mismatch]:
    """Where a design that matches the family differs from what llama.cpp's graph assumes."""
    graph = graph.of_depth(design.depth)
    for name, (path, required) in graph.fixed_fields.items():
        actual = config.get(name, required)
        if actual != required:
            yield Mismatch(path, _heddle_value(path, actual), _heddle_value(path, required))
    for path, actual, required in graph.assumed(design.resolved()):
        if actual != required and (None in (actual, required) or not math.isclose(actual, required)):
            yield Mismatch(path, MISSING if actual is None else actual, MISSING if required is None else required)
    mixer = design_parts.first_attention(design.resolved())
    head_dim = mixer.head_dim or design.width
    scaled_dim = design.width / mixer.heads if design.depth == graph.width_scaled_depth else head_dim
    for scale in {getattr(each, "scale", None) for each in design_parts.mixers(design)}:
        if not graph.any_scale and scale is not None and not math.isclose(scale, scaled_dim**-0.5, rel_tol=1e-6):
            yield Mismatch("layers.*.mixer.scale", scale, scaled_dim**-0.5)
    if graph.encoder:
        plain, head = HeadConfig().dump(), design.head.dump()
        for name in dict.fromkeys((*head, *plain)) if head != plain else ():  # all of them: none is as in the family
            yield Mismatch(f"head.{name}", head.get(name, MISSING), plain.get(name, MISSING))
    if not graph.qk_norm and mixer.qk_norm is not None:
        yield Mismatch("layers.*.mixer.qk_norm", mixer.qk_norm, MISSING)
    if mixer.qkv_clip is not None:
        yield Mismatch("layers.*.mixer.qkv_clip", mixer.qkv_clip, MISSING)
    if graph.square_heads and mixer.heads * head_dim != design.width:
        yield Mismatch("layers.*.mixer.head_dim", head_dim, design.width / mixer.heads)
    if not graph.grouped_heads and mixer.kv_heads not in (None, mixer.heads):
        yield Mismatch("layers.*.mixer.kv_heads", mixer.kv_heads, mixer.heads)
    layers = [(path.replace("[", ".").replace("]", ""), layer) for path, layer in design.expand()]
    sparse = design_parts.has_experts(design)
    for index, (path, layer) in enumerate(layers):
        if not sparse[index] and (graph.moe_in_every_layer or (graph.moe_to_the_end and any(sparse[:index]))):
            kind = MISSING if layer.feedforward is None else layer.feedforward.kind
            yield Mismatch(f"{path}.feedforward.kind", kind, "moe")
    if graph.nope_period is not None:
        yield from _position_mismatches([(path, layer.mixer) for path, layer in layers], graph.nope_period)
    yield from _window_mismatches([(path, getattr(layer.mixer, "window", None)) for path, layer in layers], graph)
    full, sliding = ropes_of(design)
    rotary_dim = full.rotary_dim if graph.partial_rope else head_dim
    yield from _rope_mismatches(full, rotary_dim or head_dim, graph)
    if sliding is not None:
        yield from _rope_mismatches(sliding, head_dim, graph if graph.scaled_windows else UNSCALED)
        if sliding.base != full.base and graph.window_base != "own":
            yield Mismatch(f"{POSITION}.base", sliding.base, full.base)


# Values of configs that have another name in heddle, by the end of the path.
HEDDLE_VALUES: dict[str, dict[Any, str]] = {
    "activation": design_parts.HEDDLE_ACTIVATIONS,
    "layout": {True: "interleaved", False: "half"},
    "residual.kind": {True: "parallel", False: "pre_norm"},
    "routing": {"greedy": "softmax_topk", "group_limited_greedy": "softmax_group_max"},
}


def _heddle_value(path: str, value: Any) -> Any:
    """A config value under heddle's name."""
    names = next((names for end, names in HEDDLE_VALUES.items() if path.endswith(end)), {})
    return names.get(value, value)


def _window_mismatches(layers: list[tuple[str, int | None]], graph: Architecture) -> Iterator[Mismatch]:
    """Layers with another window than the graph assumes. layers: (path, window) of each."""
    windows = [window for _, window in layers]
    first = next((window for window in windows if window is not None), None)
    if graph.full_attention_period is None:
        if first is not None and windows == [first] * len(windows):
            yield Mismatch("layers.*.mixer.window", first, MISSING)
            return
        required: list[int | None] = [None] * len(windows)
    else:
        period = graph.full_attention_period
        required = [first or 1024 if (index + 1) % period else None for index in range(len(windows))]
    for (path, actual), window in zip(layers, required, strict=True):
        if actual != window:
            yield Mismatch(f"{path}.mixer.window", actual or MISSING, window or MISSING)


def _position_mismatches(mixers: list[tuple[str, Any]], period: int) -> Iterator[Mismatch]:
    """Layers with RoPE where the graph has none, or without RoPE where it has some.

    mixers: (path, mixer) of each layer.

    period: as `nope_period` of the graph.
    """
    for index, (path, mixer) in enumerate(mixers):
        actual = "rope" if design_parts.has_rope(mixer) else MISSING
        required = "rope" if not period or (index + 1) % period else MISSING
        if actual != required:
            yield Mismatch(f"{path}.mixer.position", actual, required)


UNSCALED = Architecture("", rope_scalings=())


def _rope_mismatches(rope: RopeConfig, rotary_dim: int, graph: Architecture) -> Iterator[Mismatch]:
    if rope.rotary_dim not in (None, rotary_dim):
        yield Mismatch(f"{POSITION}.rotary_dim", rope.rotary_dim, rotary_dim)
    scaling = rope.scaling
    if scaling is not None and not isinstance(scaling, graph.rope_scalings):
        yield Mismatch(f"{POSITION}.scaling", scaling.kind, MISSING)
    elif isinstance(scaling, YarnConfig):
        all_dim = scaling.mscale_all_dim or 1.0
        mscales = {"mscale": all_dim if graph.latent else 1.0, "mscale_all_dim": all_dim}
        defaults = YARN_DEFAULTS | ({} if graph.yarn_log is None else mscales)
        for name, value in defaults.items():
            actual = getattr(scaling, name)
            if actual != value:
                yield Mismatch(f"{POSITION}.scaling.{name}", actual, MISSING if value is None else value)
