"""What llama.cpp runs of the families that heddle writes: its name for each, and what its graph takes for granted.

A design goes into a GGUF by way of its Hugging Face family. llama.cpp computes less than a family's config can say:
what its graph has fixed stands here as (path in a design, value), and a design that differs is refused by that path.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange import views
from heddle.exchange.family import families
from heddle.exchange.fit import MISSING, Fit, Obstacle, fit
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig

Told = dict[str, Any]  # fields of a config.json, or keys of a GGUF
POSITION = "layers.*.mixer.position"
MOST = 6  # differences that are told
# A GGUF can tell other betas, but what is built on llama.cpp goes by its defaults.
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None, "mscale": None,
    "mscale_all_dim": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs.

    name: as llama.cpp calls it. fixed: field of the config -> (its path in a design, the value of the graph).
    keys: what a GGUF tells of it beside what all do. interleaved: its rotation turns dims (2i, 2i + 1), so rows of q
    and k change places. offset: its norms multiply by the weight itself, where the family's multiply by 1 + weight.
    period: every so many layers one has no window, and all others have one; None: no layer has one. capped: scores and
    logits are. by_width: the depth at which scores are divided by the root of width / heads, as in the largest Gemmas,
    and not by that of the head's width. square: heads
    together are as wide as the model. sparse: every layer has experts. scalings: of rotations.
    """

    name: str
    fixed: dict[str, tuple[str, Any]] = field(default_factory=dict)
    keys: Callable[[Told], Told] = lambda config: {}
    interleaved: bool = False
    offset: bool = False
    period: int | None = None
    capped: bool = False
    by_width: int | None = None
    square: bool = False
    sparse: bool = False
    scalings: tuple[type, ...] = (LinearConfig, YarnConfig)


def _expert_keys(config: Told) -> Told:
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"],
    }


def _local_keys(config: Told) -> Told:
    caps = {name: float(config[name]) for name in CAPS if config.get(name)}
    return {"attention.sliding_window": config["sliding_window"]} | caps


CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SILU = {"hidden_act": ("layers.*.feedforward.activation", "silu")}
GELU = {"hidden_activation": ("layers.*.feedforward.activation", "gelu_pytorch_tanh")}
PLAIN = {"attention_bias": ("layers.*.mixer.bias", False)}
TIED = {"tie_word_embeddings": ("head.tied", True)}
UNTIED = {"tie_word_embeddings": ("head.tied", False)}
RENORMALISED = {"norm_topk_prob": ("layers.*.feedforward.renormalise", True)}
LLAMA3 = (LinearConfig, YarnConfig, Llama3Config)

# By the model_type of the family. Mistral is Llama, as long as it has no window.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", SILU, interleaved=True, scalings=LLAMA3),
    "mistral": Architecture("llama", SILU, interleaved=True, scalings=LLAMA3),
    "mixtral": Architecture("llama", SILU, keys=_expert_keys, interleaved=True, scalings=LLAMA3),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU | PLAIN),
    "qwen3_moe": Architecture("qwen3moe", SILU | PLAIN | RENORMALISED, keys=_expert_keys, sparse=True),
    "gemma2": Architecture(
        "gemma2", GELU | PLAIN | TIED, keys=_local_keys, offset=True, period=2, capped=True, by_width=46, scalings=()
    ),
    "gemma3_text": Architecture(
        "gemma3", GELU | PLAIN, keys=_local_keys, offset=True, period=6, by_width=62, scalings=(LinearConfig,)
    ),
    "olmo2": Architecture("olmo2", SILU | PLAIN | UNTIED, square=True),
    "olmo3": Architecture("olmo2", SILU | PLAIN | UNTIED, keys=_local_keys, period=4, square=True),
}


def runs_as(design: ModelConfig) -> tuple[Fit, Architecture]:
    """The family and the graph that a design is written for. Raises ConfigError naming what fits none, and a change."""
    found = []
    for name in (name for name in ARCHITECTURES if name in families()):
        one, graph = fit(design, families()[name]), ARCHITECTURES[name]
        told = [obstacle for obstacle in one.obstacles if obstacle.have != obstacle.need]
        obstacles = _outermost([*told, *_obstacles(design, one.config, graph)])
        if not obstacles and not one.obstacles:
            return one, graph
        if obstacles:
            found.append((obstacles, graph))
    if not found:
        raise ConfigError("llama.cpp cannot run this design, nor one near it; begin with preset:gqa-tiny")
    obstacles, graph = min(found, key=lambda pair: len(pair[0]))
    reasons = ", ".join(f"{one.path} is {one.have}" for one in obstacles[:MOST])
    changes = " ".join(str(one) for one in obstacles[:MOST])
    raise ConfigError(f"llama.cpp cannot run this design: {reasons}; its {graph.name} runs it with {changes}")


def _outermost(obstacles: list[Obstacle]) -> list[Obstacle]:
    """One of each path, and none of a field within another that is to go."""
    by_path = {one.path: one for one in obstacles}
    return [one for path, one in by_path.items() if not any(path.startswith(f"{other}.") for other in by_path)]


def rotations(design: ModelConfig) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of layers without a window, and of those with one (None: there are none)."""
    mixers = [layer.mixer for layer in views.layers(design.resolved())]
    full = [views.rope(mixer) for mixer in mixers if getattr(mixer, "window", None) is None]
    local = [views.rope(mixer) for mixer in mixers if getattr(mixer, "window", None) is not None]
    return (full or local)[0], local[0] if local else None


def _obstacles(design: ModelConfig, config: Told, graph: Architecture) -> Iterator[Obstacle]:
    """What a design that fits the family has otherwise than llama.cpp's graph."""
    for name, (path, value) in graph.fixed.items():
        told = config.get(name, value)
        if told != value:
            yield Obstacle(path, *(views.READ.get(one, one) if isinstance(one, str) else one for one in (told, value)))
    mixer = views.attention(design.resolved())
    dim = mixer.head_dim or design.width
    divisor = design.width / mixer.heads if design.depth == graph.by_width else dim
    if mixer.scale is not None and not math.isclose(mixer.scale, divisor**-0.5, rel_tol=1e-6):
        yield Obstacle("layers.*.mixer.scale", mixer.scale, divisor**-0.5)
    if graph.square and mixer.heads * dim != design.width:
        yield Obstacle("layers.*.mixer.head_dim", dim, design.width / mixer.heads)
    if graph.capped:
        for path, cap, usual in (
            ("layers.*.mixer.softcap", mixer.softcap, 50.0),
            ("head.softcap", design.head.softcap, 30.0),
        ):
            if cap is None:
                yield Obstacle(path, MISSING, usual)
    layers = [(path.replace("[", ".").replace("]", ""), layer) for path, layer in design.expand()]
    for path, layer in layers:
        kind = None if layer.feedforward is None else layer.feedforward.kind
        if graph.sparse and kind != "moe":
            yield Obstacle(f"{path}.feedforward.kind", kind or MISSING, "moe")
    yield from _windows([(path, getattr(layer.mixer, "window", None)) for path, layer in layers], graph)
    full, local = rotations(design)
    yield from _rotation(full, dim, graph.scalings)
    if local is not None:
        yield from _rotation(local, dim, ())


def _windows(layers: list[tuple[str, int | None]], graph: Architecture) -> Iterator[Obstacle]:
    """Windows stand where the graph has them, and nowhere else."""
    windows = [window for _, window in layers]
    some = next((one for one in windows if one is not None), None)
    if graph.period is None:
        if some is not None and windows == [some] * len(windows):
            yield Obstacle("layers.*.mixer.window", some, MISSING)
            return
        wanted: list[int | None] = [None] * len(windows)
    else:
        wanted = [some or 1024 if (index + 1) % graph.period else None for index in range(len(windows))]
    for (path, have), need in zip(layers, wanted, strict=True):
        if have != need:
            yield Obstacle(f"{path}.mixer.window", *(MISSING if one is None else one for one in (have, need)))


def _rotation(rope: RopeConfig, dim: int, scalings: tuple[type, ...]) -> Iterator[Obstacle]:
    if rope.dim not in (None, dim):
        yield Obstacle(f"{POSITION}.dim", rope.dim, dim)
    scaling = rope.scaling
    if scaling is not None and not isinstance(scaling, scalings):
        yield Obstacle(f"{POSITION}.scaling", scaling.kind, MISSING)
    elif isinstance(scaling, YarnConfig):
        for name, value in YARN.items():
            have = getattr(scaling, name)
            if have != value:
                yield Obstacle(f"{POSITION}.scaling.{name}", have, MISSING if value is None else value)
