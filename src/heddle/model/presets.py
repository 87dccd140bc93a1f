"""Presets: named designs as plain data, `preset:KIND-SIZE`.

Sizes: tiny (1–2 M parameters), small (≈ 15 M), medium (≈ 100 M), and for three kinds 1b (≈ 1.2 B): gqa-1b has the sizes
of Llama 3.2 1B, and mla-1b the latent of DeepSeek-V2-Lite. Kinds differ in their mixers only. Mixers are sized
so that no design has more than 1 % more parameters than the mha of its size. A hybrid has three recurrent layers for
each layer of full attention if the depth is divisible by four (medium), else two (depth six); the last layer is full
attention. moe is gqa with experts: as many active parameters per token, and about twice as many in all. Its experts are
balanced as in DeepSeek-V3: a bias that only affects the selection adds no gradient, and its step size needs no tuning;
a small loss per sequence keeps single sequences from using few experts.
"""

from typing import Any, NamedTuple

from heddle.errors import ConfigError, choices_hint


class PresetSize(NamedTuple):
    """The sizes that all kinds of a preset share."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int | None  # None: the tokenizer's
    window: int
    kv_rank: int  # up to medium, the latent that gives mla the parameters of mha
    rope_base: float = 10_000.0
    kinds: tuple[str, ...] | None = None  # None: all


SIZES = {
    "tiny": PresetSize(width=128, depth=6, heads=4, kv_heads=2, hidden=352, vocab_size=None, window=64, kv_rank=56),
    "small": PresetSize(width=384, depth=6, heads=6, kv_heads=2, hidden=1024, vocab_size=8192, window=128, kv_rank=176),
    "medium": PresetSize(
        width=768, depth=12, heads=12, kv_heads=4, hidden=2048, vocab_size=32000, window=256, kv_rank=368
    ),
    "1b": PresetSize(
        width=2048,
        depth=16,
        heads=32,
        kv_heads=8,
        hidden=8192,
        vocab_size=128_256,
        window=1024,
        kv_rank=512,
        rope_base=500_000.0,
        kinds=("gqa", "mla", "hybrid"),
    ),
}

KINDS = {
    "mha": "every head has its own keys and values",
    "gqa": "groups of heads share keys and values",
    "mqa": "all heads share one pair of keys and values",
    "local_global": "five layers see a window, one sees everything",
    "mla": "heads read keys and values from one small latent",
    "linear": "a sum over earlier tokens instead of a softmax; the state is constant",
    "retention": "linear with exponential decay; the state is constant",
    "gated_delta": "a state that decays and corrects the value of each key; the state is constant",
    "moe": "gqa whose feed-forward is one shared expert and 2 of 8 routed experts for each token",
    "hybrid": "gated_delta, and every third or fourth layer sees everything",
    "hybrid_mla": "gated_delta, and every third or fourth layer is mla",
}


def names() -> list[str]:
    """All presets."""
    return [f"{kind}-{name}" for kind in KINDS for name, size in SIZES.items() if kind in (size.kinds or KINDS)]


def preset(name: str) -> dict[str, Any]:
    """The plain data of a preset. Raises ConfigError for an unknown name, and suggests the nearest one."""
    kind, _, size_name = name.rpartition("-")
    if name not in names():
        raise ConfigError(f"preset:{name}: unknown preset; {choices_hint(name, names(), prefix='preset:')}")
    size = SIZES[size_name]
    design: dict[str, Any] = {} if size.vocab_size is None else {"vocab_size": size.vocab_size}
    return design | {
        "width": size.width,
        "norm": {"kind": "rms"},
        "residual": {"kind": "pre_norm"},
        "layers": _layers(kind, size),
        "head": {"tied": True},
    }


def _layers(kind: str, size: PresetSize) -> list[dict[str, Any]]:
    full = _layer(kind if kind in ("mha", "mqa") else "gqa", size)
    if kind == "local_global":
        local = {**full, "mixer": {**full["mixer"], "window": size.window}}
        return [{"repeat": size.depth // 6, "layers": [{"repeat": 5, **local}, full]}]
    if kind == "moe":
        return [{"repeat": size.depth, **full, "feedforward": _experts(size)}]
    if kind in ("hybrid", "hybrid_mla"):
        delta, last = _layer("gated_delta", size), full if kind == "hybrid" else _layer("mla", size)
        group = 4 if size.depth % 4 == 0 else 3
        return [{"repeat": size.depth // group, "layers": [{"repeat": group - 1, **delta}, last]}]
    return [{"repeat": size.depth, **_layer(kind, size)}]


def _layer(kind: str, size: PresetSize) -> dict[str, Any]:
    heads, head_dim = size.heads, size.width // size.heads
    rope: dict[str, Any] = {"kind": "rope"} if size.rope_base == 10_000.0 else {"kind": "rope", "base": size.rope_base}
    groups = {"mha": heads, "gqa": size.kv_heads, "mqa": 1}
    mixers: dict[str, dict[str, Any]] = {
        **{name: {"kind": "attention", "kv_heads": kv_heads, "position": rope} for name, kv_heads in groups.items()},
        "mla": {
            "kind": "latent_attention",
            "kv_rank": size.kv_rank,
            "nope_dim": head_dim,
            "rope_dim": head_dim // 2,
            "value_dim": head_dim,
            "position": rope,
        },
        "linear": {"kind": "linear_attention", "head_dim": head_dim, "feature_map": "elu", "position": rope},
        "retention": {
            "kind": "retention",
            "head_dim": head_dim // 2,
            "value_dim": head_dim,
            "gate": "silu",
            "position": rope,
        },
        "gated_delta": {"kind": "gated_delta", "key_heads": heads // 2, "head_dim": head_dim, "conv_kernel": 4},
    }
    return {"mixer": {"heads": heads, **mixers[kind]}, "feedforward": {"kind": "gated", "hidden": size.hidden}}


def _experts(size: PresetSize) -> dict[str, Any]:
    """Each token uses three experts, each a third as wide as the dense feed-forward, in multiples of 8."""
    return {
        "kind": "moe",
        "experts": 8,
        "top_k": 2,
        "hidden": size.hidden // 24 * 8,
        "shared": 1,
        "routing": "sigmoid",
        "bias_update": 0.001,
        "aux_loss": 0.0001,
    }
