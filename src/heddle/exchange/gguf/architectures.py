"""The families that llama.cpp runs: the name of its graph for each, and what that graph assumes.

A design is written to a GGUF through its Hugging Face family. A graph of llama.cpp supports less than the family's
config can express. What a graph assumes is listed here; a design that differs is refused, naming the field.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange import design_parts
from heddle.exchange.family import families
from heddle.exchange.family_match import MISSING, FamilyMatch, Mismatch, match_family
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig

ConfigFields = dict[str, Any]  # fields of a config.json, or keys of a GGUF
POSITION = "layers.*.mixer.position"
MAX_LISTED = 6  # mismatches that an error lists
# A GGUF can hold other betas, but programs built on llama.cpp ignore them.
YARN_DEFAULTS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None, "mscale": None,
    "mscale_all_dim": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A graph of llama.cpp.

    name: its name in llama.cpp. fixed_fields: config field -> (path in a design, the value that the graph assumes).
    extra_keys: GGUF keys that only this graph has. interleaved_rope: it rotates dims (2i, 2i + 1), so the rows of q
    and k are reordered. norm_plus_one: its norms multiply by the weight, but the family's by 1 + weight, so 1 is added.
    full_attention_period: every so many layers there is one without a window, and all others have one; None: no layer
    has a window. requires_softcaps: it always caps scores and logits. width_scaled_depth: models of this depth scale
    scores by 1 / sqrt(width / heads) instead of 1 / sqrt(head_dim), as the largest Gemmas. square_heads: width must be
    heads · head_dim. grouped_heads: several heads may share keys and values. moe_in_every_layer: no dense layers.
    rope_scalings: the kinds of RoPE scaling that it supports.
    """

    name: str
    fixed_fields: dict[str, tuple[str, Any]] = field(default_factory=dict)
    extra_keys: Callable[[ConfigFields], ConfigFields] = lambda config: {}
    interleaved_rope: bool = False
    norm_plus_one: bool = False
    full_attention_period: int | None = None
    requires_softcaps: bool = False
    width_scaled_depth: int | None = None
    square_heads: bool = False
    grouped_heads: bool = True
    moe_in_every_layer: bool = False
    rope_scalings: tuple[type, ...] = (LinearConfig, YarnConfig)


def _expert_keys(config: ConfigFields) -> ConfigFields:
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
    }


def _local_keys(config: ConfigFields) -> ConfigFields:
    caps = {name: float(config[name]) for name in SOFTCAPS if config.get(name)}
    return {"attention.sliding_window": config["sliding_window"]} | caps


SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _shared_expert_keys(config: ConfigFields) -> ConfigFields:
    return _expert_keys(config) | {"expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


SILU = {"hidden_act": ("layers.*.feedforward.activation", "silu")}
GELU = {"hidden_activation": ("layers.*.feedforward.activation", "gelu_pytorch_tanh")}
NO_ATTENTION_BIAS = {"attention_bias": ("layers.*.mixer.bias", False)}
TIED = {"tie_word_embeddings": ("head.tied", True)}
UNTIED = {"tie_word_embeddings": ("head.tied", False)}
RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", True)}
NOT_RENORMALIZED = {"norm_topk_prob": ("layers.*.feedforward.renormalize", False)}
LLAMA_SCALINGS = (LinearConfig, YarnConfig, Llama3Config)

# By the model_type of the family. Mistral is Llama, as long as it has no window.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mistral": Architecture("llama", SILU, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS),
    "mixtral": Architecture(
        "llama", SILU, extra_keys=_expert_keys, interleaved_rope=True, rope_scalings=LLAMA_SCALINGS
    ),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU | NO_ATTENTION_BIAS),
    "qwen3_moe": Architecture(
        "qwen3moe", SILU | NO_ATTENTION_BIAS | RENORMALIZED, extra_keys=_expert_keys, moe_in_every_layer=True
    ),
    "qwen2_moe": Architecture(
        "qwen2moe", SILU | NOT_RENORMALIZED, extra_keys=_shared_expert_keys, moe_in_every_layer=True
    ),
    "olmoe": Architecture(
        "olmoe",
        SILU | NO_ATTENTION_BIAS | NOT_RENORMALIZED | UNTIED,
        extra_keys=_expert_keys,
        moe_in_every_layer=True,
        square_heads=True,
        grouped_heads=False,
    ),
    "ernie4_5": Architecture("ernie4_5", SILU | {"use_bias": ("layers.*.mixer.bias", False)}),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", SILU | NO_ATTENTION_BIAS),
    "gemma": Architecture("gemma", GELU | NO_ATTENTION_BIAS | TIED, norm_plus_one=True, rope_scalings=()),
    "gemma2": Architecture(
        "gemma2",
        GELU | NO_ATTENTION_BIAS | TIED,
        extra_keys=_local_keys,
        norm_plus_one=True,
        full_attention_period=2,
        requires_softcaps=True,
        width_scaled_depth=46,
        rope_scalings=(),
    ),
    "gemma3_text": Architecture(
        "gemma3",
        GELU | NO_ATTENTION_BIAS,
        extra_keys=_local_keys,
        norm_plus_one=True,
        full_attention_period=6,
        width_scaled_depth=62,
        rope_scalings=(LinearConfig,),
    ),
    "olmo2": Architecture("olmo2", SILU | NO_ATTENTION_BIAS | UNTIED, square_heads=True),
    "olmo3": Architecture(
        "olmo2", SILU | NO_ATTENTION_BIAS | UNTIED, extra_keys=_local_keys, full_attention_period=4, square_heads=True
    ),
}


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
    """The RoPE of layers without a window, and of layers with one (None: there are none)."""
    mixers = [layer.mixer for layer in design_parts.layers(design.resolved())]
    full = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is None]
    sliding = [design_parts.rope_of(mixer) for mixer in mixers if getattr(mixer, "window", None) is not None]
    return (full or sliding)[0], sliding[0] if sliding else None


def _graph_mismatches(design: ModelConfig, config: ConfigFields, graph: Architecture) -> Iterator[Mismatch]:
    """Where a design that matches the family differs from what llama.cpp's graph assumes."""
    for name, (path, required) in graph.fixed_fields.items():
        actual = config.get(name, required)
        if actual != required:
            yield Mismatch(path, _heddle_value(actual), _heddle_value(required))
    mixer = design_parts.first_attention(design.resolved())
    head_dim = mixer.head_dim or design.width
    scaled_dim = design.width / mixer.heads if design.depth == graph.width_scaled_depth else head_dim
    if mixer.scale is not None and not math.isclose(mixer.scale, scaled_dim**-0.5, rel_tol=1e-6):
        yield Mismatch("layers.*.mixer.scale", mixer.scale, scaled_dim**-0.5)
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
    yield from _window_mismatches([(path, getattr(layer.mixer, "window", None)) for path, layer in layers], graph)
    full, sliding = ropes_of(design)
    yield from _rope_mismatches(full, head_dim, graph.rope_scalings)
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


def _rope_mismatches(rope: RopeConfig, head_dim: int, scalings: tuple[type, ...]) -> Iterator[Mismatch]:
    if rope.rotary_dim not in (None, head_dim):
        yield Mismatch(f"{POSITION}.rotary_dim", rope.rotary_dim, head_dim)
    scaling = rope.scaling
    if scaling is not None and not isinstance(scaling, scalings):
        yield Mismatch(f"{POSITION}.scaling", scaling.kind, MISSING)
    elif isinstance(scaling, YarnConfig):
        for name, value in YARN_DEFAULTS.items():
            actual = getattr(scaling, name)
            if actual != value:
                yield Mismatch(f"{POSITION}.scaling.{name}", actual, MISSING if value is None else value)
