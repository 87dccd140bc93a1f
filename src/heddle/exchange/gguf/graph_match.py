"""Whether a graph of llama.cpp runs a design: a design that differs from what the graph assumes is refused by field."""

import math
from collections.abc import Iterator
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange import design_parts
from heddle.exchange.family import families
from heddle.exchange.family_match import MISSING, FamilyMatch, Mismatch, match_family
from heddle.exchange.gguf.architectures import ARCHITECTURES, Architecture, ConfigFields
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.yarn import YarnConfig

POSITION = "layers.*.mixer.position"
MAX_LISTED = 6  # mismatches that an error lists
# A GGUF can hold other betas, but programs built on llama.cpp ignore them.
YARN_DEFAULTS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None, "mscale": None,
    "mscale_all_dim": None,
}  # fmt: skip


def match_architecture(design: ModelConfig) -> tuple[FamilyMatch, Architecture]:
    """The family and the graph for a design. If none matches, raises ConfigError naming what to change."""
    candidates = []
    for name in (name for name in ARCHITECTURES if name in families()):
        match, graph = match_family(design, families()[name]), ARCHITECTURES[name]
        family_mismatches = [mismatch for mismatch in match.mismatches if mismatch.actual != mismatch.required]
        mismatches = _outermost([*family_mismatches, *_graph_mismatches(design, match.config, graph)])
        if not mismatches and not match.mismatches:
            return match, graph
        if mismatches:
            candidates.append((mismatches, graph))
    if not candidates:
        raise ConfigError("llama.cpp cannot run this design, nor one near it; begin with preset:gqa-tiny")
    mismatches, graph = min(candidates, key=lambda candidate: len(candidate[0]))
    reasons = ", ".join(f"{mismatch.path} is {mismatch.actual}" for mismatch in mismatches[:MAX_LISTED])
    changes = " ".join(str(mismatch) for mismatch in mismatches[:MAX_LISTED])
    raise ConfigError(f"llama.cpp cannot run this design: {reasons}; its {graph.name} runs it with {changes}")


def _outermost(mismatches: list[Mismatch]) -> list[Mismatch]:
    """One mismatch per path, without those of fields inside another mismatch."""
    by_path = {mismatch.path: mismatch for mismatch in mismatches}
    return [
        mismatch for path, mismatch in by_path.items() if not any(path.startswith(f"{outer}.") for outer in by_path)
    ]


def ropes_of(design: ModelConfig) -> tuple[RopeConfig, RopeConfig | None]:
    """The RoPE of layers without a window, and of layers with one (None: there are none), of those that have RoPE."""
    mixers = [mixer for mixer in design_parts.mixers(design.resolved()) if _has_rope(mixer)]
    full = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is None]
    sliding = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is not None]
    return (full or sliding or [RopeConfig()])[0], sliding[0] if sliding else None


def _has_rope(mixer: Any) -> bool:
    return isinstance(getattr(mixer, "position", None), RopeConfig)


def _graph_mismatches(design: ModelConfig, config: ConfigFields, graph: Architecture) -> Iterator[Mismatch]:
    """Where a design that matches the family differs from what llama.cpp's graph assumes."""
    for name, (path, required) in graph.fixed_fields.items():
        actual = config.get(name, required)
        if actual != required:
            yield Mismatch(path, _heddle_value(actual), _heddle_value(required))
    mixer = design_parts.first_attention(design.resolved())
    head_dim = mixer.head_dim or design.width
    scaled_dim = design.width / mixer.heads if design.depth == graph.width_scaled_depth else head_dim
    for scale in {getattr(each, "scale", None) for each in design_parts.mixers(design)}:
        if scale is not None and not math.isclose(scale, scaled_dim**-0.5, rel_tol=1e-6):
            yield Mismatch("layers.*.mixer.scale", scale, scaled_dim**-0.5)
    if not graph.qk_norm and mixer.qk_norm is not None:
        yield Mismatch("layers.*.mixer.qk_norm", mixer.qk_norm, MISSING)
    if graph.square_heads and mixer.heads * head_dim != design.width:
        yield Mismatch("layers.*.mixer.head_dim", head_dim, design.width / mixer.heads)
    if not graph.grouped_heads and mixer.kv_heads not in (None, mixer.heads):
        yield Mismatch("layers.*.mixer.kv_heads", mixer.kv_heads, mixer.heads)
    if graph.requires_softcaps:
        for path, softcap, default in (
            ("layers.*.mixer.softcap", mixer.softcap, 50.0),
            ("head.softcap", design.head.softcap, 30.0),
        ):
            if softcap is None:
                yield Mismatch(path, MISSING, default)
    layers = [(path.replace("[", ".").replace("]", ""), layer) for path, layer in design.expand()]
    for path, layer in layers:
        kind = None if layer.feedforward is None else layer.feedforward.kind
        if graph.moe_in_every_layer and kind != "moe":
            yield Mismatch(f"{path}.feedforward.kind", kind or MISSING, "moe")
    if graph.nope_period is not None:
        yield from _position_mismatches([(path, layer.mixer) for path, layer in layers], graph.nope_period)
    yield from _window_mismatches([(path, getattr(layer.mixer, "window", None)) for path, layer in layers], graph)
    full, sliding = ropes_of(design)
    rotary_dim = full.rotary_dim if graph.partial_rope else head_dim
    yield from _rope_mismatches(full, rotary_dim or head_dim, graph.rope_scalings)
    if sliding is not None:
        yield from _rope_mismatches(sliding, head_dim, ())


def _heddle_value(value: Any) -> Any:
    """A config value under heddle's name, if it is the name of an activation."""
    return design_parts.HEDDLE_ACTIVATIONS.get(value, value) if isinstance(value, str) else value


def _window_mismatches(layers: list[tuple[str, int | None]], graph: Architecture) -> Iterator[Mismatch]:
    """Layers whose window is not the one that the graph assumes. layers: (path, window) of each."""
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
    """Layers with RoPE where the graph has none, or without it where it has. mixers: (path, mixer) of each layer."""
    for index, (path, mixer) in enumerate(mixers):
        actual = "rope" if _has_rope(mixer) else MISSING
        required = "rope" if (index + 1) % period else MISSING
        if actual != required:
            yield Mismatch(f"{path}.mixer.position", actual, required)


def _rope_mismatches(rope: RopeConfig, rotary_dim: int, scalings: tuple[type, ...]) -> Iterator[Mismatch]:
    if rope.rotary_dim not in (None, rotary_dim):
        yield Mismatch(f"{POSITION}.rotary_dim", rope.rotary_dim, rotary_dim)
    scaling = rope.scaling
    if scaling is not None and not isinstance(scaling, scalings):
        yield Mismatch(f"{POSITION}.scaling", scaling.kind, MISSING)
    elif isinstance(scaling, YarnConfig):
        for name, value in YARN_DEFAULTS.items():
            actual = getattr(scaling, name)
            if actual != value:
                yield Mismatch(f"{POSITION}.scaling.{name}", actual, MISSING if value is None else value)
