"""What llama.cpp runs of the families that heddle writes: its name for each, and what its graph takes for granted.

A design goes into a GGUF by way of its Hugging Face family. llama.cpp computes less than a family's config can say:
what its graph has fixed stands here as (path in a design, value), and a design that differs is refused by that path.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from heddle.errors import ConfigError
from heddle.exchange import views
from heddle.exchange.fit import MISSING, Fit, Obstacle, fits
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.linear import LinearConfig
from heddle.parts.scalings.llama3 import Llama3Config
from heddle.parts.scalings.yarn import YarnConfig

Told = dict[str, Any]  # fields of a config.json, or keys of a GGUF
POSITION = "layers.*.mixer.position"
MOST = 6  # differences that are told


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs.

    name: as llama.cpp calls it. fixed: field of the config -> (its path in a design, the value of the graph).
    keys: what a GGUF tells of it beside what all do. wrong: what else the graph has otherwise.
    interleaved: its rotation turns dims (2i, 2i + 1), so rows of q and k change places.
    offset: its norms multiply by the weight itself, where the family's multiply by 1 + weight.
    partial: whether it can turn some dims of a head only.
    """

    name: str
    fixed: dict[str, tuple[str, Any]] = field(default_factory=dict)
    keys: Callable[[Told], Told] = lambda config: {}
    wrong: Callable[[Told], Iterator[Obstacle]] = lambda config: iter(())
    interleaved: bool = False
    offset: bool = False
    partial: bool = False
    scalings: tuple[type, ...] = (LinearConfig, YarnConfig)


GEMMA2_CAPS = {
    "attn_logit_softcapping": ("layers.*.mixer.softcap", 50.0),
    "final_logit_softcapping": ("head.softcap", 30.0),
}


def _expert_keys(config: Told) -> Told:
    hidden = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": hidden,
    }


def _gemma_keys(config: Told) -> Told:
    told: Told = {"attention.sliding_window": config["sliding_window"]}
    return told | {name: float(config[name]) for name in GEMMA2_CAPS}


def _pattern(config: Told, period: int, full: int) -> Iterator[Obstacle]:
    """Every layer has a window but number `full` of each `period`."""
    types = config.get("layer_types") or []
    for index, kind in enumerate(types):
        need = "full_attention" if index % period == full else "sliding_attention"
        if kind != need:
            window = config.get("sliding_window")
            have, wanted = (window, MISSING) if need == "full_attention" else (MISSING, window or "some")
            yield Obstacle(f"layers.{index}.mixer.window", have, wanted)


def _scale(config: Told) -> Iterator[Obstacle]:
    """Scores are divided by the root of the head's width."""
    told, dim = config.get("query_pre_attn_scalar"), config["head_dim"]
    if told is not None and told != dim:
        yield Obstacle("layers.*.mixer.scale", told**-0.5, dim**-0.5)


def _gemma2_wrong(config: Told) -> Iterator[Obstacle]:
    yield from _pattern(config, 2, 1)
    yield from _scale(config)
    for name, (path, usual) in GEMMA2_CAPS.items():
        if not config.get(name):
            yield Obstacle(path, MISSING, usual)


def _dense(config: Told) -> Iterator[Obstacle]:
    """Qwen3-MoE: every layer has experts."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        yield Obstacle("layers.*.feedforward.kind", "gated", "moe")


SILU = ("layers.*.feedforward.activation", "silu")
GELU = ("layers.*.feedforward.activation", "gelu_tanh")
NO_WINDOW = {"sliding_window": ("layers.*.mixer.window", None)}
LLAMA3 = (LinearConfig, YarnConfig, Llama3Config)

# By the model_type of the family. Mistral is Llama with a window, which this graph has not.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", {"hidden_act": SILU}, interleaved=True, scalings=LLAMA3),
    "mistral": Architecture("llama", {"hidden_act": SILU, **NO_WINDOW}, interleaved=True, scalings=LLAMA3),
    "mixtral": Architecture(
        "llama", {"hidden_act": SILU, **NO_WINDOW}, keys=_expert_keys, interleaved=True, scalings=LLAMA3
    ),
    "qwen2": Architecture("qwen2", {"hidden_act": SILU, **NO_WINDOW}),
    "qwen3": Architecture(
        "qwen3", {"hidden_act": SILU, "attention_bias": ("layers.*.mixer.bias", False), **NO_WINDOW}
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        {
            "hidden_act": SILU,
            "attention_bias": ("layers.*.mixer.bias", False),
            "norm_topk_prob": ("layers.*.feedforward.renormalise", True),
            **NO_WINDOW,
        },
        keys=_expert_keys,
        wrong=_dense,
    ),
    "gemma2": Architecture(
        "gemma2", {"hidden_activation": GELU}, keys=_gemma_keys, wrong=_gemma2_wrong, offset=True, scalings=()
    ),
}


def runs_as(design: ModelConfig) -> tuple[Fit, Architecture]:
    """The family and the graph that a design is written for. Raises ConfigError naming what fits none, and a change."""
    found = []
    for one in fits(design):
        graph = ARCHITECTURES.get(one.family.model_type)
        if graph is None:
            continue
        obstacles = one.obstacles or tuple(_obstacles(design, one.config, graph))
        if not obstacles:
            return one, graph
        found.append((obstacles, graph))
    obstacles, graph = min(found, key=lambda pair: len(pair[0]))
    told = list(dict.fromkeys(obstacles))[:MOST]
    reasons = ", ".join(f"{one.path} is {one.have}" for one in told)
    changes = " ".join(str(one) for one in told)
    raise ConfigError(f"llama.cpp cannot run this design: {reasons}; its {graph.name} runs it with {changes}")


def _obstacles(design: ModelConfig, config: Told, graph: Architecture) -> Iterator[Obstacle]:
    """What a design that fits the family has otherwise than llama.cpp's graph."""
    for name, (path, value) in graph.fixed.items():
        told = config.get(name)
        have = views.READ.get(told, told) if isinstance(told, str) else told
        if have != value and not (have is None and name not in config):
            yield Obstacle(path, MISSING if have is None else have, MISSING if value is None else value)
    yield from graph.wrong(config)
    mixer = views.attention(design.resolved())
    yield from _rotation(views.rope(mixer), mixer.head_dim or 0, graph)


def _rotation(rope: RopeConfig, head_dim: int, graph: Architecture) -> Iterator[Obstacle]:
    if rope.dim not in (None, head_dim) and not graph.partial:
        yield Obstacle(f"{POSITION}.dim", rope.dim, head_dim)
    scaling = rope.scaling
    if scaling is None:
        return
    if not isinstance(scaling, graph.scalings):
        yield Obstacle(f"{POSITION}.scaling", scaling.kind, MISSING)
    elif isinstance(scaling, YarnConfig):
        for name, value in (("truncate", True), ("attention_factor", None), ("mscale", None), ("mscale_all_dim", None)):
            have = getattr(scaling, name)
            if have != value:
                yield Obstacle(f"{POSITION}.scaling.{name}", have, MISSING if value is None else value)
