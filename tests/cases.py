"""The designs that every law runs on: one line per part or option, each a small design with awkward sizes."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from heddle.config import Config, Part, parse_config
from heddle.model.config import ModelConfig
from heddle.model.load_config import DEFAULTS

Data = dict[str, Any]

ROPE: Data = {"kind": "rope"}
YARN: Data = {
    "kind": "rope",
    "base": 100.0,
    "layout": "interleaved",
    "scaling": {
        "kind": "yarn", "factor": 8.0, "original_length": 64, "beta_fast": 4.0, "mscale": 1.3, "mscale_all_dim": 0.8,
    },
}  # fmt: skip
ALIBI: Data = {"kind": "alibi"}
BUCKETS: Data = {"kind": "relative_bias", "buckets": 6, "max_distance": 5}
MLP: Data = {"kind": "mlp", "hidden": 20}
# Texts of two or more tokens count as long. In a text of one token, at position 0, nothing is rotated.
LONG: Data = {
    "kind": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 7.0], "original_length": 1,
    "attention_factor": 1.2,
}  # fmt: skip


def attention(heads: int = 4, position: Data | None = ROPE, **fields: Any) -> Data:
    """An attention mixer, with rotary positions by default."""
    return {"kind": "attention", "heads": heads, "position": position, **fields}


def indexer(top_k: int = 3, heads: int = 2, head_dim: int = 8, **fields: Any) -> Data:
    """The indexer of a sparse attention."""
    return {"top_k": top_k, "heads": heads, "head_dim": head_dim, **fields}


MOBA: Data = {"top_k": 2, "block": 3, "block_score": "mean", "local": 1}  # the attention's own queries and keys


def cross(heads: int = 4, **fields: Any) -> Data:
    """A cross-attention mixer."""
    return {"kind": "cross_attention", "heads": heads, **fields}


def layer(mixer: Data | None, feedforward: Data | None = MLP, repeat: int = 1) -> Data:
    """A layer's entry."""
    return {"repeat": repeat, "mixer": mixer, "feedforward": feedforward}


def design(*layers: Data, width: int = 24, **fields: Any) -> Data:
    """A design of these layers."""
    return DEFAULTS | {"vocab_size": 61, "width": width, "layers": list(layers), **fields}


def alone(**fields: Any) -> Data:
    """A design of two equal layers whose attention has these fields."""
    return design(layer(attention(**fields), repeat=2))


def latent(position: Data | None = ROPE, **fields: Any) -> Data:
    """A latent attention mixer with small widths, all different."""
    rope_dim = {} if position is None else {"rope_dim": 4}
    sizes = {"heads": 3, "kv_rank": 10, "nope_dim": 7, "value_dim": 5, **rope_dim}
    return {"kind": "latent_attention", "position": position, **sizes, **fields}


def compressed(position: Data | None = ROPE, **fields: Any) -> Data:
    """A compressed attention mixer with a short window."""
    return {"kind": "compressed_attention", "heads": 4, "window": 4, "position": position, **fields}


def differential(heads: int = 3, position: Data | None = ROPE, **fields: Any) -> Data:
    """A differential attention mixer."""
    return {"kind": "differential_attention", "heads": heads, "position": position, **fields}


def delta(heads: int = 4, repeat: int = 2, **fields: Any) -> Data:
    """Layers whose mixer is a gated delta rule."""
    return layer({"kind": "gated_delta", "heads": heads, **fields}, repeat=repeat)


def rwkv7(heads: int = 3, **fields: Any) -> Data:
    """An RWKV-7 mixer with small ranks."""
    return {"kind": "rwkv7", "heads": heads, "decay_rank": 5, "rate_rank": 3, "gate_rank": 6, **fields}


def convolution(*names: str, **fields: Any) -> Data:
    """Short convolutions of these."""
    return {"of": list(names), **fields}


def forward(kind: str, **fields: Any) -> Data:
    """A design of two layers with this feed-forward."""
    return design(layer(attention(3), {"kind": kind, "hidden": 17, **fields}, repeat=2))


SHARED: Data = {"shared": True}
LAYER_NORM: Data = {"kind": "layer"}
ALL_DROP: Data = {"kind": "gated", "hidden": 13, "dropout": 0.3}

CASES: dict[str, Data] = {
    "attention-mha": alone(),
    "attention-gqa": alone(heads=6, kv_heads=2),
    "attention-mqa": alone(kv_heads=1),
    "attention-gqa-odd-groups": alone(heads=6, kv_heads=3, head_dim=10),
    "attention-one-head": alone(heads=1),
    "attention-value-wider": alone(kv_heads=2, value_dim=9),
    "attention-value-narrower": alone(kv_heads=2, head_dim=8, value_dim=3),
    "attention-own-head-dim": alone(heads=3, head_dim=14),
    "attention-bias": alone(bias=True),
    "attention-bias-qkv": alone(kv_heads=2, bias="qkv"),
    "attention-bias-out": alone(kv_heads=2, bias="out", gate="head"),
    "attention-qk-norm-head": alone(kv_heads=2, qk_norm="head"),
    "attention-qk-norm-per-head": alone(kv_heads=2, qk_norm="per_head"),
    "attention-qk-norm-projection": alone(kv_heads=2, qk_norm="projection"),
    "attention-qk-layer-norm-per-head": design(
        layer(attention(kv_heads=2, qk_norm="per_head"), repeat=2), norm={"kind": "layer"}
    ),
    "attention-qk-layer-norm-projection": design(layer(attention(qk_norm="projection")), norm={"kind": "layer"}),
    "attention-qk-dynamic-tanh-per-head": design(
        layer(attention(kv_heads=2, qk_norm="per_head"), repeat=2), norm={"kind": "dynamic_tanh"}
    ),
    "attention-dynamic-tanh-erf": design(
        layer(attention(qk_norm="head"), repeat=2), norm={"kind": "dynamic_tanh", "function": "erf", "alpha": 0.8}
    ),
    "attention-dynamic-tanh-without-weight": design(
        layer(attention(), repeat=2), norm={"kind": "dynamic_tanh", "weight": False}
    ),
    "attention-norm-after-rotation": alone(kv_heads=2, qk_norm="head", norm_after_rotation=True),
    "attention-projection-norm-after-rotation": design(
        layer(attention(kv_heads=2, qk_norm="projection", norm_after_rotation=True)),
        layer(attention(qk_norm="per_head", norm_after_rotation=True, window=3)),
        norm={"kind": "layer"},
    ),
    "attention-scale": alone(scale=0.7),
    "attention-temperature": alone(kv_heads=2, temperature_beta=0.6, temperature_length=3),
    "attention-temperature-smooth": alone(
        kv_heads=2, temperature_beta=0.6, temperature_length=3, temperature_growth="smooth"
    ),
    "attention-temperature-from-one": alone(
        kv_heads=2, temperature_beta=0.6, temperature_length=3, temperature_growth="stepwise_from_one"
    ),
    "attention-exclusive": alone(heads=6, kv_heads=2, exclusive=True),
    "attention-exclusive-window": alone(kv_heads=2, value_dim=5, window=3, sink=True, gate="channel", exclusive=True),
    "attention-exclusive-bidirectional": alone(kv_heads=1, causal=False, window=1, dropout=0.2, exclusive=True),
    "attention-shared-keys": design(
        layer(attention(kv_heads=2, qk_norm="head", window=3)),
        layer(attention(kv_heads=1, bias=True, value_dim=5)),
        layer(attention(kv_heads=2, qk_norm="head", window=3, shared_kv=True, softcap=1.5, exclusive=True)),
        layer(attention(heads=2, head_dim=6, kv_heads=1, value_dim=5, bias="qkv", shared_kv=True), repeat=2),
    ),
    "attention-shared-keys-repeated": design(
        {"repeat": 2, "layers": [layer(attention(kv_heads=2)), layer(attention(kv_heads=2, shared_kv=True), None)]}
    ),
    "attention-value-residual": design(
        layer(attention(kv_heads=2, value_dim=5, window=3)),
        layer(attention(kv_heads=2, value_dim=5, qk_norm="head", exclusive=True, value_residual="learned"), repeat=2),
        layer(attention(heads=6, kv_heads=2, head_dim=6, value_dim=5, window=2, value_residual=[0.7, -0.4])),
        layer(attention(heads=6, kv_heads=2, head_dim=6, value_dim=5, window=2, shared_kv=True)),
    ),
    "attention-value-residual-repeated": design(
        layer(attention(kv_heads=2, bias="qkv"), None),
        {
            "repeat": 2,
            "layers": [
                layer(attention(kv_heads=1, head_dim=4, value_dim=6)),
                layer(attention(kv_heads=2, value_residual="learned")),
            ],
        },
    ),
    "attention-value-residual-bidirectional": design(
        layer(attention(kv_heads=2, causal=False)),
        layer(attention(kv_heads=2, causal=False, dropout=0.2, position=None, value_residual="learned"), repeat=2),
    ),
    "attention-value-embedding": design(
        layer(attention(kv_heads=2, value_dim=5, window=3, value_norm=True, value_embedding={"table": 3})),
        layer(attention(kv_heads=1, head_dim=4, k_eq_v=True, value_embedding={"mix": "learned"}), repeat=2),
        layer(
            attention(
                heads=6,
                kv_heads=2,
                head_dim=6,
                value_dim=5,
                qk_norm="head",
                exclusive=True,
                value_residual="learned",
                value_embedding={"gate_channels": 7, "gate_bound": 3.0, "shared": True, "table": 3},
            )
        ),
        layer(attention(kv_heads=1, head_dim=4, value_embedding={"mix": [0.8, -0.6], "shared": True})),
        layer(attention(heads=6, kv_heads=1, head_dim=4, shared_kv=True)),
    ),
    "attention-value-embedding-bidirectional": design(
        layer(attention(kv_heads=2, causal=False, dropout=0.2, value_embedding={})),
        layer(attention(kv_heads=2, causal=False, window=2, position=None, value_embedding={"shared": True})),
    ),
    "pair-value-embedding": design(
        layer(
            {
                "kind": "pair",
                "first": attention(kv_heads=1, value_embedding={}),
                "second": {"kind": "retention", "heads": 3, "value_embedding": {"mix": "learned"}},
            }
        ),
        layer(None),
    ),
    "value-embeddings-of-other-mixers": design(
        layer({"kind": "retention", "heads": 3, "value_dim": 5, "gate": "silu", "value_embedding": {"table": 0}}, None),
        layer({"kind": "linear_attention", "heads": 3, "value_embedding": {"gate_channels": 4}}, None),
        layer(differential(kv_heads=1, value_embedding={"mix": "learned"}), None),
        layer({"kind": "retention", "heads": 3, "value_dim": 5, "value_embedding": {"shared": True, "table": 0}}),
        layer({"kind": "linear_attention", "heads": 3, "value_embedding": {"mix": [1.0, 0.5]}}),
        layer(differential(kv_heads=1, window=3, value_embedding={"shared": True})),
    ),
    "attention-shared-keys-bidirectional": design(
        layer(attention(kv_heads=1, causal=False, position=BUCKETS)),
        layer(attention(kv_heads=1, causal=False, dropout=0.2, sink=True, position=None, shared_kv=True)),
    ),
    "attention-values-are-keys": alone(kv_heads=2, k_eq_v=True, value_norm=True, qk_norm="head", bias="qkv"),
    "attention-value-norm": design(
        layer(attention(kv_heads=2, value_dim=5, window=3, value_norm=True, exclusive=True)),
        layer(attention(kv_heads=2, value_dim=5, window=3, shared_kv=True, scale=1.0)),
        layer(attention(kv_heads=2, head_dim=5, position=None, k_eq_v=True, value_residual="learned")),
    ),
    "attention-indexer": alone(kv_heads=2, indexer=indexer()),
    "attention-indexer-window": alone(
        kv_heads=1,
        value_dim=4,
        window=5,
        sink=True,
        gate="head",
        dropout=0.2,
        indexer=indexer(top_k=2, heads=3, rope_layout="interleaved"),
    ),
    "attention-indexer-bidirectional": alone(
        heads=6, kv_heads=3, causal=False, qk_norm="head", softcap=1.5, indexer=indexer(top_k=4, loss=0.3)
    ),
    "attention-indexer-bidirectional-window": alone(causal=False, window=3, position=None, indexer=indexer(head_dim=5)),
    "attention-indexer-bias": design(
        layer(attention(position=ALIBI, indexer=indexer(top_k=2, heads=1))), layer(attention(position=None), None)
    ),
    "attention-indexer-blocks": alone(kv_heads=2, indexer=MOBA),
    "attention-indexer-nsa": alone(
        kv_heads=2, indexer={"top_k": 3, "block": 2, "block_score": "attention", "local": 1, "first": 1}
    ),
    "attention-indexer-blocks-window": alone(
        kv_heads=2,
        window=5,
        sink=True,
        indexer=indexer(top_k=2, block=2, local=1, per_head=True, loss_keys="selected"),
    ),
    "attention-indexer-norms": alone(
        kv_heads=2,
        indexer=indexer(top_k=2, block=2, per_head=True, norm={"kind": "rms", "offset": 1.0}, query_norm=True),
    ),
    "attention-indexer-pool": alone(
        kv_heads=2, indexer=indexer(top_k=1, block=2, pool="mean", head_weights=False, query_norm=True)
    ),
    "attention-indexer-pool-per-head": design(
        layer(attention(kv_heads=2, position=ALIBI, indexer=indexer(top_k=1, block=3, per_head=True, pool="gated"))),
        layer(attention(forget=True, indexer=indexer(top_k=2, block=2, pool="gated", loss_keys="selected")), None),
    ),
    "latent-indexer-pool": design(
        layer(latent(query_rank=9, indexer=indexer(top_k=1, block=3, pool="gated"))),
        layer(latent(shared_index=True), None),
        layer(latent(None, indexer=indexer(top_k=1, heads=3, block=2, pool="mean"))),
    ),
    "latent-indexer-query-norm": design(layer(latent(query_rank=9, indexer=indexer(query_norm=True)), repeat=2)),
    "attention-indexer-blocks-bidirectional": alone(
        kv_heads=1, causal=False, position=None, indexer=indexer(top_k=2, block=3, block_score="mean")
    ),
    "attention-forget": alone(kv_heads=2, forget=True),
    "attention-forget-window": alone(heads=6, kv_heads=3, window=3, sink=True, position=None, forget=True),
    "attention-forget-mixed": design(
        layer(attention(kv_heads=1, forget=True, indexer=indexer(top_k=2), short_convolution=convolution("q", "k"))),
        layer(attention(window=3, chunked=True, softcap=1.5, dropout=0.2, forget=True)),
        layer(attention(kv_heads=2, value_dim=5, forget=True, relative_dim=3, relative_extent=4)),
        layer(attention(kv_heads=2, value_dim=5, shared_kv=True, relative_dim=2, relative_extent=3)),
    ),
    "attention-relative": alone(kv_heads=2, position=None, relative_dim=3, relative_extent=4),
    "attention-relative-window": alone(
        kv_heads=1,
        window=5,
        position=ALIBI,
        sink=True,
        relative_dim=2,
        relative_extent=9,
        temperature_beta=0.6,
        temperature_length=3,
    ),
    "attention-chunked": alone(kv_heads=2, window=4, chunked=True),
    "attention-chunked-sink-bias": alone(heads=6, kv_heads=3, window=3, chunked=True, sink=True, position=BUCKETS),
    "attention-chunked-bidirectional": alone(
        kv_heads=2, causal=False, window=3, chunked=True, qk_norm="head", qk_norm_weight=False
    ),
    "attention-chunked-mixed": design(
        layer(attention(kv_heads=2, window=5, chunked=True, qk_norm="head", qk_norm_weight=False, dropout=0.2)),
        layer(attention(kv_heads=2, window=5, chunked=True, qk_norm="head", qk_norm_weight=False, shared_kv=True)),
        layer(attention(3, None, window=2, chunked=True, temperature_beta=0.6, temperature_length=3)),
        layer(attention(kv_heads=1, window=7, chunked=True, indexer=indexer(top_k=2))),
        layer(attention(window=4)),
    ),
    "attention-clip": alone(kv_heads=2, bias=True, qkv_clip=0.7),
    "attention-clip-norm": alone(kv_heads=2, value_dim=5, qkv_clip=0.4, qk_norm="projection", qk_norm_weight=False),
    "attention-value-scale": alone(kv_heads=2, value_dim=5, value_scale=0.6, bias="qkv", window=3, sink=True),
    "attention-window-1": alone(window=1),
    "attention-window-2": alone(kv_heads=2, window=2),
    "attention-window-7": alone(heads=3, kv_heads=1, window=7),
    "attention-window-mixed": design(layer(attention(window=3)), layer(attention(window=5, value_dim=4))),
    "attention-bidirectional": alone(causal=False),
    "attention-bidirectional-window": alone(kv_heads=2, causal=False, window=3),
    "attention-dropout": alone(kv_heads=2, dropout=0.4),
    "attention-no-position": alone(position=None),
    "latent-full-query": design(layer(latent(), repeat=2)),
    "latent-low-rank-query": design(layer(latent(query_rank=9, value_dim=9), repeat=2)),
    "latent-indexer": design(layer(latent(query_rank=9, indexer=indexer()), repeat=2)),
    "latent-indexer-shared": design(
        layer(latent(query_rank=9, indexer=indexer())), layer(latent(shared_index=True), None, repeat=2)
    ),
    "latent-indexer-full-query": design(
        layer(latent(YARN, indexer=indexer(top_k=2, heads=3, loss=2.0))),
        layer(latent(None, indexer=indexer(top_k=4, head_dim=5)), None),
    ),
    "latent-indexer-blocks": design(
        layer(latent(query_rank=9, indexer=indexer(top_k=2, block=2, local=1))), layer(latent(shared_index=True), None)
    ),
    "latent-indexer-blocks-per-head": design(
        layer(latent(indexer=indexer(top_k=2, heads=3, block=2, per_head=True))), layer(latent(indexer=MOBA), None)
    ),
    "latent-interleaved": design(layer(latent({"kind": "rope", "layout": "interleaved"}, heads=4), repeat=2)),
    "latent-query-bias": design(
        layer(latent(query_bias=True)),
        layer(latent({"kind": "rope", "layout": "interleaved"}, query_rank=9, query_bias=True)),
    ),
    "latent-gate": design(layer(latent(gate="head", query_rank=9)), layer(latent(heads=4, gate="channel", bias=True))),
    "latent-beside": design(
        layer(latent(query_rank=9, query_norm="beside", gate="channel", gate_input="queries", indexer=indexer())),
        layer(latent(query_rank=6, query_norm="beside", gate="head"), None),
        layer(latent(query_rank=7, gate="head", gate_input="queries", query_bias=True), None),
    ),
    "latent-sink": design(
        layer(latent(query_rank=9, sink=True, gate="channel", indexer=indexer())),
        layer(latent(sink=True, shared_index=True), None),
        layer(latent(None, heads=4, sink=True), None),
    ),
    "latent-no-rope": design(layer(latent(None), repeat=2)),
    "latent-shared-unturned": design(layer(latent(None, rope_dim=3, heads=1, bias=True), repeat=2)),
    "latent-no-norms": design(layer(latent(query_rank=11, kv_norm="none", query_norm="none"), repeat=2)),
    "latent-norm-eps": design(layer(latent(query_rank=11, norm_eps=0.05)), layer(latent(norm_eps=0.3), None)),
    "latent-bias-scale": design(layer(latent(query_rank=6, bias=True, scale=0.4), repeat=2), norm={"kind": "layer"}),
    "latent-yarn": design(layer(latent(YARN, rope_dim=8), repeat=2)),
    "latent-hybrid": design(layer(latent()), layer(attention(kv_heads=2, window=3)), layer(latent(kv_rank=5))),
    "rope-yarn": alone(kv_heads=2, head_dim=11, position=YARN | {"rotary_dim": 8, "layout": "half"}),
    "rope-yarn-attention-factor": alone(
        kv_heads=2,
        head_dim=11,
        position=ROPE
        | {
            "base": 100.0,
            "rotary_dim": 8,
            "scaling": {
                "kind": "yarn",
                "factor": 8.0,
                "original_length": 64,
                "beta_fast": 4.0,
                "attention_factor": 1.1,
            },
        },
    ),
    "rope-linear": alone(position=ROPE | {"scaling": {"kind": "linear", "factor": 4.0}}),
    "rope-proportional": alone(
        head_dim=8, position=ROPE | {"base": 100.0, "scaling": {"kind": "proportional", "rotated_share": 0.5}}
    ),
    "rope-proportional-slower": alone(
        kv_heads=2,
        head_dim=10,
        position=ROPE
        | {
            "layout": "interleaved",
            "rotary_dim": 8,
            "scaling": {"kind": "proportional", "rotated_share": 0.75, "factor": 4.0},
        },
    ),
    "rope-ntk": alone(kv_heads=2, position=ROPE | {"base": 100.0, "scaling": {"kind": "ntk", "factor": 8.0}}),
    "rope-ntk-dynamic": alone(
        window=5, position=ROPE | {"scaling": {"kind": "ntk", "factor": 8.0, "original_length": 500}}
    ),
    "rope-llama3": alone(
        head_dim=10,
        position=ROPE | {"rotary_dim": 8, "scaling": {"kind": "llama3", "factor": 8.0, "original_length": 64}},
    ),
    "rope-longrope": alone(kv_heads=2, position=ROPE | {"scaling": LONG}),
    "rope-longrope-short": alone(
        window=4, position=ROPE | {"scaling": LONG | {"short_factor": [1.0, 1.5, 2.5], "original_length": 500}}
    ),
    "rope-longrope-factor": alone(
        window=4,
        position=ROPE
        | {
            "scaling": LONG
            | {"short_factor": [1.0, 1.5, 2.5], "original_length": 500, "factor": 4.0, "attention_factor": None}
        },
    ),
    "alibi": alone(heads=6, kv_heads=2, position=ALIBI),
    "alibi-window": alone(heads=6, kv_heads=3, value_dim=9, window=5, position=ALIBI),
    "alibi-bidirectional": alone(kv_heads=2, causal=False, position=ALIBI),
    "alibi-bidirectional-window": alone(kv_heads=1, causal=False, window=3, sink=True, position=ALIBI),
    "alibi-sink-dropout": alone(kv_heads=2, sink=True, dropout=0.3, position=ALIBI),
    "alibi-softcap-sink-window": alone(heads=6, kv_heads=2, window=4, softcap=1.1, sink=True, position=ALIBI),
    "alibi-softcap": alone(heads=3, kv_heads=1, softcap=0.9, gate="head", position=ALIBI),
    "alibi-mixed": design(
        layer(attention(position=ALIBI)), layer(attention(window=3)), layer(attention(position=None))
    ),
    "relative-bias": alone(heads=6, kv_heads=2, position=BUCKETS),
    "relative-bias-softcap-sink-window": alone(heads=3, window=4, softcap=1.1, sink=True, position=BUCKETS),
    "relative-bias-bidirectional-window": alone(
        kv_heads=2, causal=False, window=3, scale=1.0, position=BUCKETS | {"buckets": 8}
    ),
    "relative-bias-shared": design(
        layer(attention(6, kv_heads=2, position=BUCKETS)),
        layer(differential(6, kv_heads=3, window=4, position=BUCKETS | SHARED)),
        layer(attention(6, window=3, softcap=1.1, sink=True, position=BUCKETS | SHARED), None),
        layer(attention(3, position=BUCKETS | {"buckets": 4})),
        layer(attention(3, kv_heads=1, value_dim=5, position=BUCKETS | {"buckets": 4} | SHARED), repeat=2),
    ),
    "relative-bias-shared-bidirectional": design(
        layer(attention(kv_heads=2, causal=False, position=BUCKETS | {"buckets": 8})),
        layer(attention(kv_heads=1, causal=False, dropout=0.2, position=BUCKETS | {"buckets": 8} | SHARED)),
        layer(attention(causal=False, window=3, scale=1.0, position=BUCKETS | {"buckets": 8} | SHARED), repeat=2),
    ),
    "attention-sink": alone(heads=6, kv_heads=2, sink=True),
    "attention-sink-window": alone(kv_heads=2, window=3, value_dim=9, sink=True),
    "attention-sink-bidirectional": alone(kv_heads=2, value_dim=4, sink=True, causal=False, dropout=0.3),
    "attention-softcap": alone(heads=6, kv_heads=2, softcap=0.9, scale=0.7),
    "attention-softcap-sink-window": alone(heads=6, kv_heads=3, window=4, softcap=1.1, sink=True, gate="head"),
    "attention-gate-head": alone(kv_heads=2, gate="head", bias="qkv"),
    "attention-gate-softplus": alone(kv_heads=2, gate="channel", gate_activation="softplus", bias=True),
    "attention-gate-channel": alone(kv_heads=2, value_dim=5, gate="channel"),
    "path": design(layer({"kind": "path_attention", "heads": 4}, repeat=2)),
    "path-forget": design(layer({"kind": "path_attention", "heads": 4, "kv_heads": 2, "forget": True}, repeat=2)),
    "path-convolution": design(
        layer({"kind": "path_attention", "heads": 3, "short_convolution": convolution("input")}, repeat=2)
    ),
    "path-own-widths": design(
        layer(
            {
                "kind": "path_attention",
                "heads": 6,
                "kv_heads": 2,
                "head_dim": 5,
                "value_dim": 7,
                "vector_rank": 3,
                "conv_kernel": 2,
                "scale": 0.7,
            },
            repeat=2,
        ),
        norm={"kind": "layer"},
    ),
    "compressed": design(layer(compressed(compress_ratio=3, rope_dim=4), repeat=2)),
    "compressed-index": design(
        layer(
            compressed(
                YARN,
                heads=6,
                head_dim=7,
                query_rank=9,
                window=5,
                compress_ratio=2,
                overlap=True,
                top_k=2,
                index_heads=3,
                index_head_dim=5,
                groups=3,
                out_rank=8,
                rope_dim=4,
            ),
            repeat=2,
        )
    ),
    "compressed-index-full-query": design(
        layer(
            compressed(
                None,
                heads=3,
                window=2,
                compress_ratio=3,
                top_k=1,
                index_heads=2,
                index_head_dim=4,
                index_loss=0.3,
                scale=0.7,
                sink=False,
                groups=1,
                out_rank=5,
            ),
            repeat=2,
        ),
        norm={"kind": "layer"},
    ),
    "compressed-overlap": design(layer(compressed(compress_ratio=2, overlap=True, query_rank=7), repeat=2)),
    "compressed-window": design(
        layer(compressed(window=3, head_dim=5, rope_dim=2, short_convolution=convolution("input")), repeat=2)
    ),
    "differential": design(layer(differential(kv_heads=1), repeat=2)),
    "differential-window-own-widths": design(
        layer(differential(4, kv_heads=2, head_dim=5, value_dim=7, window=3, bias=True, position=BUCKETS))
    ),
    "differential-bidirectional": design(layer(differential(2, causal=False, scale=0.7, norm={"kind": "layer"}))),
    "delta": design(delta()),
    "delta-key-heads": design(delta(heads=6, key_heads=2, head_dim=5, value_dim=3)),
    "delta-convolution-1": design(delta(heads=3, conv_kernel=1, value_dim=10)),
    "delta-convolution-2": design(delta(heads=2, key_heads=1, head_dim=7, conv_kernel=2), norm={"kind": "layer"}),
    "delta-sigmoid-gate": design(delta(heads=3, gate="sigmoid")),
    "delta-norm": design(delta(heads=3, norm={"kind": "rms", "eps": 1e-6}), norm={"kind": "rms", "offset": 1.0}),
    "delta-negative-eigenvalues": design(delta(heads=4, key_heads=2, head_dim=5, negative_eigenvalues=True)),
    "delta-steps": design(
        delta(heads=4, key_heads=2, head_dim=5, value_dim=3, steps=3, negative_eigenvalues=True), norm={"kind": "layer"}
    ),
    "delta-preconditioned": design(
        delta(heads=4, key_heads=2, head_dim=5, value_dim=3, preconditioned=True), norm={"kind": "layer"}
    ),
    "delta-hybrid": design(
        layer({"kind": "gated_delta", "heads": 4, "key_heads": 2, "head_dim": 6, "value_dim": 8}, None, repeat=3),
        layer(attention(kv_heads=2)),
    ),
    "rope-cast-after": alone(kv_heads=2, position=ROPE | {"cast": "after", "layout": "interleaved"}),
    "rope-half": alone(head_dim=6, position={"kind": "rope", "layout": "half"}),
    "rope-interleaved": alone(kv_heads=2, position={"kind": "rope", "layout": "interleaved"}),
    "rope-partial": alone(head_dim=11, position={"kind": "rope", "rotary_dim": 4}),
    "rope-partial-interleaved": alone(head_dim=7, position={"kind": "rope", "rotary_dim": 6, "layout": "interleaved"}),
    "rope-base": alone(position={"kind": "rope", "base": 500000.0}),
    "rope-frequencies": alone(position={"kind": "rope", "inv_freq": [1.0, 0.31, 0.007]}),
    "axial-mha": alone(head_dim=8, position={"kind": "axial_rope"}),
    "axial-partial-interleaved": alone(
        heads=6,
        kv_heads=2,
        head_dim=11,
        position={"kind": "axial_rope", "rotary_dim": 8, "layout": "interleaved", "base": 50.0},
    ),
    "axial-bidirectional": alone(
        kv_heads=2, head_dim=12, causal=False, position={"kind": "axial_rope", "inv_freq": [1.0, 0.25, -0.02]}
    ),
    "axial-window-beside-rope": design(
        layer(attention(3, window=3, position={"kind": "axial_rope"})),
        layer(
            {"kind": "linear_attention", "heads": 3, "head_dim": 4, "position": {"kind": "axial_rope", "rotary_dim": 4}}
        ),
        layer(attention(kv_heads=2)),
    ),
    "rope-mixed": design(
        layer(attention()), layer(attention(position={"kind": "rope", "base": 100.0})), layer(attention(position=None))
    ),
    "sinusoidal": design(
        layer(attention(position=None), repeat=2), embedding={"scale": True, "position": {"kind": "sinusoidal"}}
    ),
    "sinusoidal-halves": design(
        layer(attention(position=None), repeat=2),
        embedding={"position": {"kind": "sinusoidal", "layout": "halves", "offset": 2, "endpoint": True}},
    ),
    "learned": design(
        layer(attention(position=None), repeat=2), embedding={"position": {"kind": "learned", "length": 90}}
    ),
    "learned-offset": design(
        layer(attention(position=None), repeat=2),
        embedding={"position": {"kind": "learned", "length": 90, "offset": 2}, "norm": True, "multiplier": 1.5},
    ),
    "token-types": design(
        layer(attention(position=None, bias=True), repeat=2),
        norm=LAYER_NORM,
        residual={"kind": "post_norm"},
        embedding={"token_types": 3, "position": {"kind": "learned", "length": 90}, "norm": True},
        head={"bias": True, "transform": "gelu", "transform_bias": True},
    ),
    "norm-rms-offset-cast": design(
        layer(attention(), repeat=2), norm={"kind": "rms", "offset": 1.0, "cast": "after", "eps": 1e-6}
    ),
    "norm-layer": design(layer(attention(), repeat=2), norm={"kind": "layer"}),
    "norm-layer-no-bias": design(layer(attention(), repeat=2), norm={"kind": "layer", "bias": False, "eps": 1e-3}),
    "norm-layer-offset": design(layer(attention(qk_norm="head"), repeat=2), norm={"kind": "layer", "offset": 1.0}),
    "norm-rms-no-weight": design(layer(attention(qk_norm="head"), repeat=2), norm={"kind": "rms", "weight": False}),
    "norm-layer-no-weight": design(
        layer(attention(), repeat=2), norm={"kind": "layer", "weight": False, "bias": False}
    ),
    "mlp-relu": forward("mlp", activation="relu"),
    "mlp-relu2": forward("mlp", activation="relu2"),
    "mlp-gelu-bias": forward("mlp", activation="gelu", bias=True),
    "mlp-gelu-tanh": forward("mlp", activation="gelu_tanh"),
    "mlp-silu": forward("mlp", activation="silu"),
    "mlp-xielu": forward("mlp", activation="xielu"),
    "gated-silu": forward("gated"),
    "gated-relu": forward("gated", activation="relu"),
    "gated-relu2": forward("gated", activation="relu2"),
    "gated-gelu-tanh": forward("gated", activation="gelu_tanh"),
    "gated-gelu-bias": forward("gated", activation="gelu", bias=True),
    "gated-sparse": forward("gated", activation="gelu_tanh", sparsity=0.6),
    "gated-clamped": forward("gated", activation="swiglu_clamped", limit=0.8, alpha=2.3, bias=True, dropout=0.2),
    "cross-grouped": design(layer(attention(kv_heads=2), None), layer(cross(6, kv_heads=2)), layer(cross(scale=0.7))),
    "cross-own-widths": design(
        layer(attention()), layer(cross(3, head_dim=5, value_dim=7, encoder_width=10, bias=True), repeat=2)
    ),
    "cross-double-softmax": design(
        layer(cross(6, kv_heads=2, head_dim=5, value_dim=3, normalization="double_softmax", bias="qkv"), repeat=2)
    ),
    "cross-alone": design(layer(cross(encoder_width=7, value_dim=9), repeat=2)),
    "encoder": design(
        layer(attention(kv_heads=2), None),
        layer(cross(encoder_width=14), ALL_DROP),
        encoder=DEFAULTS
        | {
            "vocab_size": 17,
            "width": 14,
            "norm": {"kind": "layer"},
            "layers": [layer(attention(2, head_dim=6, causal=False, dropout=0.2), repeat=2)],
        },
    ),
    "pair-windows": design(
        layer({"kind": "pair", "first": attention(3, window=2), "second": attention(kv_heads=2, window=5)}, repeat=2)
    ),
    "pair-multipliers": design(
        layer(
            {
                "kind": "pair",
                "first": attention(kv_heads=2),
                "second": {"kind": "mamba2", "heads": 4, "state_size": 3},
                "input_multipliers": [1.3, 0.8],
                "output_multipliers": [0.7, 1.2],
            },
            {"kind": "gated", "hidden": 13, "gate_multiplier": 0.6, "multiplier": 1.4},
            repeat=2,
        )
    ),
    "pair-cross": design(
        layer({"kind": "pair", "first": attention(kv_heads=1), "second": cross(3, encoder_width=9)}), layer(attention())
    ),
    "pair-bidirectional": design(
        layer({"kind": "pair", "first": attention(causal=False), "second": attention(2, causal=False, window=2)})
    ),
    "residual-pre-norm-drop-path": design(
        layer(attention(), repeat=3), residual={"kind": "pre_norm", "drop_path": 0.5}
    ),
    "residual-parallel-one-norm": design(layer(attention(), repeat=2), residual={"kind": "parallel", "drop_path": 0.4}),
    "residual-parallel-two-norms": design(layer(attention(), repeat=2), residual={"kind": "parallel", "norms": 2}),
    "layers-apart": design(layer(attention(kv_heads=2), None), layer(None), layer(attention(window=3), None)),
    "layers-feedforward-only": design(layer(None, repeat=2)),
    "layers-nested": design(
        {"repeat": 2, "layers": [layer(attention(window=3), repeat=2), layer(attention(kv_heads=1))]}, width=16
    ),
    "head-untied": design(layer(attention()), head={"tied": False}),
    "embedding-scale": design(layer(attention()), embedding={"scale": True}),
    "embedding-multiplier": design(layer(attention()), embedding={"scale": True, "multiplier": 1.5}),
    "dropout-everywhere": design(
        layer(attention(kv_heads=2, dropout=0.2), ALL_DROP, repeat=2),
        embedding={"dropout": 0.2},
        residual={"kind": "pre_norm", "drop_path": 0.3},
    ),
}


def moe(experts: int = 5, top_k: int = 2, hidden: int = 9, **fields: Any) -> Data:
    """A design of two layers whose feed-forward is a mixture of experts."""
    return design(
        layer(attention(3), {"kind": "moe", "experts": experts, "top_k": top_k, "hidden": hidden, **fields}, 2)
    )


CASES |= {
    "moe": moe(),
    "moe-router-layers": moe(router_rank=4, bias_update=0.1, aux_loss=0.1),
    "moe-router-layers-groups": design(
        layer(attention(3), {"kind": "moe", "experts": 6, "top_k": 2, "hidden": 7, "routing": "softmax_group_max",
                             "groups": 3, "top_groups": 2, "router_rank": 3, "router_bias": True}),
        norm={"kind": "rms"},
    ),
    "moe-mlp-bias": moe(expert="mlp", bias=True, activation="relu2", renormalize=False, scale=1.7),
    "moe-topk-softmax": moe(6, 3, routing="topk_softmax", router_bias=True, bias=True),
    "moe-sigmoid-groups": moe(
        8, 3, routing="sigmoid", groups=4, top_groups=2, scale=2.5, bias_update=0.25, shared=2, z_loss=0.03
    ),
    "moe-sigmoid": moe(4, 2, routing="sigmoid", renormalize=False, bias_update=0.1, router_bias=True, aux_loss=0.1),
    "moe-sigmoid-logits": moe(
        5, 2, routing="sigmoid_logits", renormalize=False, bias_update=0.1, router_softcap=0.8, z_loss=0.02
    ),
    "moe-group-max": moe(
        6, 2, routing="softmax_group_max", groups=3, top_groups=2, renormalize=False, shared=1, scale=3.0, aux_loss=0.2
    ),
    "moe-shared-gate": moe(shared=1, shared_hidden=11, shared_gate=True, bias=True, dropout=0.3, aux_loss=0.5),
    "moe-shared-scale": moe(shared=2, shared_scale=0.5, scale=0.5, shared_gate=True),
    "moe-shared-unlimited": moe(shared=1, activation="swiglu_limited", limit=0.3, shared_limit=False),
    "moe-output-norm": moe(shared=1, output_norm=True, scale=0.5),
    "moe-output-norm-layer": design(
        layer(attention(3), moe(4, 2, output_norm=True, expert="mlp")["layers"][0]["feedforward"]), norm=LAYER_NORM
    ),
    "moe-sparse-mixer": moe(5, 2, routing="sparse_mixer", renormalize=False, router_tolerance=0.8, aux_loss=0.1),
    "moe-sparse-mixer-renormalized": moe(4, 3, routing="sparse_mixer", router_tolerance=1.5, bias_update=0.1),
    "moe-shared-bias": moe(4, 2, shared=2, bias="shared", capacity_factor=0.8),
    "moe-mlp-shared": moe(expert="mlp", shared=2, shared_gate=True, aux_loss=0.3, z_loss=0.01, bias_update=0.5),
    "moe-hash": moe(5, 2, selection="hash", aux_loss=0.2, shared=1),
    "moe-table": moe(
        5, 2, selection="table", id_range=40, routing="sqrt_softplus", activation="swiglu_limited", limit=0.6
    ),
    "moe-sqrt-softplus": moe(6, 2, routing="sqrt_softplus", renormalize=False, bias_update=0.1, z_loss=0.03),
    "ngram-memory": design(
        layer(None, {"kind": "ngram_memory", "dim": 3, "slots": 20}),
        layer(attention(3)),
        layer(attention(3), {"kind": "ngram_memory", "dim": 2, "slots": 9, "order": 2, "heads": 2, "conv_kernel": 2,
                             "fill": 5, "hash_seed": 3, "index": 1, "id_range": 100,
                             "short_convolution": convolution("input")}),
    ),
    "ngram-memory-streams": design(
        layer(None, {"kind": "ngram_memory", "dim": 3, "slots": 20, "streams": True, "cut": True, "fill": 4,
                     "multiple": 16}),
        layer(attention(3)),
        layer(attention(3), {"kind": "ngram_memory", "dim": 2, "slots": 9, "heads": 2, "conv_kernel": 2, "cut": True,
                             "streams": True, "index": 1}),
        residual={"kind": "hyper_connections", "streams": 2, "mixing": False, "gate_rank": 3, "collapse": "weighted"},
    ),
    "moe-hash-sigmoid": design(
        layer(attention(3), {"kind": "moe", "experts": 4, "top_k": 1, "hidden": 7, "selection": "hash", "hash_seed": 3,
                             "routing": "sigmoid", "renormalize": False, "capacity_factor": 0.7}),
        layer(attention(3), {"kind": "moe", "experts": 6, "top_k": 3, "hidden": 5, "selection": "hash",
                             "routing": "topk_softmax", "scale": 1.5}),
    ),
    "moe-every-expert": moe(3, 3, renormalize=False, z_loss=0.1, expert="mlp"),
    "moe-one-expert": moe(1, 1, routing="sigmoid", renormalize=False),
    "moe-sigmoid-eps": moe(6, 2, routing="sigmoid", renormalize_eps=0.5, scale=1.5, bias_update=0.1),
    "moe-group-max-eps": moe(
        6, 2, routing="softmax_group_max", groups=3, top_groups=2, renormalize_eps=0.3, weighted="inputs"
    ),
    "moe-weighted-inputs": moe(5, 1, routing="sigmoid", renormalize=False, weighted="inputs", shared=1, aux_loss=0.1),
    "moe-weighted-inputs-mlp-bias": moe(
        4, 2, expert="mlp", bias=True, weighted="inputs", dropout=0.2, capacity_factor=0.7
    ),
    "moe-capacity": moe(4, 2, capacity_factor=0.6, aux_loss=0.2, dropout=0.2),
    "moe-clamped": moe(5, 2, activation="swiglu_clamped", limit=0.6, bias=True, routing="topk_softmax", shared=1),
    "moe-after-dense": design(
        layer(attention(kv_heads=2, window=3), ALL_DROP),
        layer(delta()["mixer"], moe(6, 1, renormalize=False, aux_loss=0.4)["layers"][0]["feedforward"], 2),
        layer(None, {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 5, "shared": 1}),
        residual={"kind": "parallel", "norms": 2, "drop_path": 0.3},
    ),
}  # fmt: skip


LINEAR: Data = {"kind": "linear_attention", "heads": 3}
RETENTION: Data = {"kind": "retention", "heads": 3}

CASES |= {
    "linear-attention-elu": design(layer(LINEAR, repeat=2), norm={"kind": "layer"}),
    "linear-attention-relu": design(layer({**LINEAR, "feature_map": "relu", "value_dim": 5}, repeat=2)),
    "linear-attention-mixed-maps": design(layer({**LINEAR, "feature_map": "relu", "key_feature_map": "elu"})),
    "linear-attention-learned": design(layer({**LINEAR, "head_dim": 5, "feature_map": "learned"}, repeat=2)),
    "linear-attention-rope": design(layer({**LINEAR, "head_dim": 6, "position": ROPE}, repeat=2)),
    "linear-attention-learned-rope": design(
        layer({**LINEAR, "head_dim": 3, "value_dim": 7, "feature_map": "learned", "position": ROPE}, repeat=2)
    ),
    "linear-attention-bidirectional": design(layer({**LINEAR, "causal": False}, repeat=2), norm={"kind": "layer"}),
    "linear-attention-bidirectional-rope": design(layer({**LINEAR, "causal": False, "position": ROPE}, repeat=2)),
    "linear-attention-double-softmax": design(
        layer({**LINEAR, "value_dim": 5, "normalization": "double_softmax", "causal": False}, repeat=2)
    ),
    "retention-plain": design(layer(RETENTION, repeat=2), norm={"kind": "layer"}),
    "retention-rope-gate": design(layer({**RETENTION, "value_dim": 5, "gate": "silu", "position": ROPE}, repeat=2)),
    "retention-given-decays": design(
        layer({**RETENTION, "head_dim": 5, "decay": [1.0, 0.5, 0.01], "gate": "sigmoid"}, repeat=2)
    ),
    "retention-learned-decays": design(layer({**RETENTION, "decay": "learned", "position": ROPE}, repeat=2)),
    "retention-lightning": design(
        layer({**RETENTION, "activation": "silu", "gate": "sigmoid", "output_norm": "projection"}),
        layer({**RETENTION, "head_dim": 5, "value_dim": 3, "output_norm": "projection", "norm": {"kind": "rms"}}),
    ),
    "retention-own-norm": design(
        layer({**RETENTION, "activation": "relu", "norm": {"kind": "rms", "eps": 0.01}}), norm={"kind": "layer"}
    ),
    "retention-beside-attention": design(
        layer({**RETENTION, "gate": "silu"}), layer(attention(window=3)), layer(LINEAR)
    ),
}

SHIFT = convolution("input", conv_kernel=2, residual=False, token_shift=True)

CASES |= {
    "rwkv7": design(layer(rwkv7(), repeat=2), norm={"kind": "layer"}),
    "rwkv7-own-widths": design(
        layer(rwkv7(4, head_dim=5, value_dim=3, norm={"kind": "rms", "eps": 0.01}), repeat=2)
    ),
    "rwkv7-value-residual": design(
        layer(rwkv7(value_dim=5)),
        layer(attention(kv_heads=2)),
        layer(rwkv7(value_dim=5, value_rank=4, value_residual=True), repeat=2),
        norm={"kind": "layer"},
    ),
    "rwkv7-convolution": design(
        layer(rwkv7(short_convolution=convolution("input", conv_kernel=2))), layer(rwkv7(value_residual=True))
    ),
    "kda": design(layer({"kind": "kda", "heads": 3}, repeat=2), norm={"kind": "layer"}),
    "kda-own-widths": design(
        layer({"kind": "kda", "heads": 4, "head_dim": 5, "value_dim": 3, "gate_rank": 2, "conv_kernel": 2}, repeat=2)
    ),
    "kda-negative-eigenvalues": design(
        layer({"kind": "kda", "heads": 3, "value_dim": 5, "negative_eigenvalues": True}, repeat=2)
    ),
    "kda-decay-bound": design(layer({"kind": "kda", "heads": 2, "head_dim": 5, "decay_bound": 1.5}, repeat=2)),
    "kda-full-gates": design(
        layer({"kind": "kda", "heads": 3, "value_dim": 5, "full_gates": True, "decay_bound": 2.0}, repeat=2)
    ),
    "kda-channel-gates": design(
        layer({"kind": "kda", "heads": 3, "channel_gates": True, "negative_eigenvalues": True}, repeat=2)
    ),
    "kda-preconditioned": design(
        layer({"kind": "kda", "heads": 2, "head_dim": 5, "preconditioned": True, "channel_gates": True}, repeat=2)
    ),
    "mamba": design(layer({"kind": "mamba", "state_size": 5}, repeat=2), norm={"kind": "layer"}),
    "mamba-norms": design(
        layer(
            {
                "kind": "mamba", "hidden": 27, "state_size": 3, "time_step_rank": 4, "conv_kernel": 2,
                "conv_bias": False, "bias": True, "norm": {"kind": "rms", "eps": 1e-3},
                "short_convolution": convolution("input"),
            },
            repeat=2,
        )
    ),
    "nsa": design(
        layer(
            {
                "kind": "native_sparse_attention", "heads": 4, "kv_heads": 2, "block": 2, "top_k": 3, "local": 1,
                "first": 1, "window": 3, "position": ROPE,
            },
            repeat=2,
        )
    ),
    "nsa-own-widths": design(
        layer(
            {
                "kind": "native_sparse_attention", "heads": 3, "head_dim": 5, "value_dim": 4, "block": 3, "top_k": 2,
                "local": 1, "first": 0, "window": 4, "scale": 0.5, "short_convolution": convolution("input"),
            },
            repeat=2,
        ),
        norm={"kind": "layer"},
    ),
    "rg-lru": design(layer({"kind": "rg_lru", "heads": 3}, repeat=2), norm={"kind": "layer"}),
    "rg-lru-own-width": design(
        layer(
            {
                "kind": "rg_lru", "heads": 5, "hidden": 15, "conv_kernel": 2, "activation": "silu", "bias": False,
                "short_convolution": convolution("input"),
            },
            repeat=2,
        )
    ),
    "mamba2": design(layer({"kind": "mamba2", "heads": 6, "state_size": 5}, repeat=2), norm={"kind": "layer"}),
    "mamba2-groups": design(
        layer(
            {
                "kind": "mamba2", "heads": 4, "groups": 2, "head_dim": 7, "state_size": 3, "conv_kernel": 1,
                "conv_bias": False, "bias": True, "time_step_limit": [0.02, 0.5], "norm": {"kind": "rms", "eps": 1e-6},
            },
            repeat=2,
        )
    ),
    "mamba2-norm-before-gate": design(
        layer({
            "kind": "mamba2", "heads": 4, "groups": 2, "head_dim": 3, "state_size": 5, "gated_norm": "before",
            "multipliers": [0.9, 1.3, 0.6, 1.2, 0.7],
        }, repeat=2)
    ),
    "mamba2-no-norm": design(layer({"kind": "mamba2", "heads": 6, "state_size": 5, "gated_norm": "none"}, repeat=2)),
    "short-conv": design(layer({"kind": "short_conv"}, repeat=2), norm={"kind": "layer"}),
    "short-conv-biases": design(
        layer({"kind": "short_conv", "conv_kernel": 2, "conv_bias": True, "bias": True}), layer(attention())
    ),
    "short-convolution": design(
        layer(
            attention(kv_heads=2, short_convolution=convolution("input", "q", "k", "v")),
            MLP | {"short_convolution": convolution("input", "hidden", conv_kernel=3)},
            repeat=2,
        ),
        norm={"kind": "layer"},
    ),
    "short-convolution-window": design(
        layer(
            attention(kv_heads=2, window=3, short_convolution=convolution("k", "v", conv_kernel=3, activation="silu")),
            {"kind": "gated", "hidden": 11, "short_convolution": convolution("hidden", conv_kernel=2, residual=False)},
        ),
        layer(attention(window=2, short_convolution=convolution("q", conv_kernel=5)), None),
        layer(None, {"kind": "gated", "hidden": 7, "short_convolution": convolution("input", conv_kernel=5)}),
    ),
    "short-convolution-moe": design(
        layer(
            {"kind": "gated_delta", "heads": 3, "short_convolution": convolution("input", residual=False)},
            {"kind": "moe", "experts": 3, "top_k": 2, "hidden": 7, "short_convolution": convolution("input")},
        ),
        layer(
            {
                "kind": "pair", "first": attention(window=4, short_convolution=convolution("v", conv_kernel=2)),
                "second": {"kind": "linear_attention", "heads": 4},
                "short_convolution": convolution("input", conv_kernel=2),
            },
        ),
        norm={"kind": "layer"},
    ),
    "token-shift": design(
        layer(rwkv7(), {"kind": "mlp", "hidden": 17, "activation": "relu2", "short_convolution": SHIFT}),
        layer(
            attention(kv_heads=2, short_convolution=SHIFT | {"of": ["k", "v"]}),
            {"kind": "gated", "hidden": 11, "short_convolution": SHIFT | {"of": ["input", "hidden"]}},
        ),
        norm={"kind": "layer"},
    ),
    "short-convolution-kinds": design(
        *(
            layer(mixer | {"short_convolution": convolution("input", conv_kernel=kernel)}, None)
            for kernel, mixer in enumerate(
                (
                    latent(), differential(), {"kind": "linear_attention", "heads": 4},
                    {"kind": "retention", "heads": 4}, {"kind": "kda", "heads": 3, "head_dim": 5},
                    {"kind": "mamba2", "heads": 6, "state_size": 5}, {"kind": "short_conv"},
                ),
                2,
            )
        )
    ),
    "short-convolution-cross": design(
        layer(attention()),
        layer(cross(encoder_width=14, short_convolution=convolution("input", conv_kernel=3)), None),
        encoder=DEFAULTS | {"width": 14, "layers": [layer(attention(2, head_dim=4, causal=False))]},
    ),
    "short-convolution-shared-keys": design(
        layer(attention(kv_heads=2, short_convolution=convolution("k", conv_kernel=1))),
        layer(attention(kv_heads=2, shared_kv=True, short_convolution=convolution("q", "input", conv_kernel=2))),
    ),
    "short-convolution-bidirectional": design(
        layer(attention(causal=False, window=2, short_convolution=convolution("input", "q", "k"))),
        layer(attention(causal=False, window=2, short_convolution=convolution("q", conv_kernel=6))),
    ),
}  # fmt: skip


def wired(kind: str, *layers: Data, norm: Data = LAYER_NORM, **fields: Any) -> Data:
    """A design with this residual block; two full layers unless others are given."""
    return design(*(layers or (layer(attention(), repeat=2),)), norm=norm, residual={"kind": kind, **fields})


APART = (layer(attention(kv_heads=2, window=3), None), layer(None), layer(attention(kv_heads=1)))

CASES |= {
    "residual-pre-norm-dropout": wired("pre_norm", dropout=0.3),
    "residual-pre-norm-no-first": wired(
        "pre_norm", layer(attention(), repeat=3), norm={"kind": "rms"}, first_norm=False, drop_path=0.3
    )
    | {"embedding": {"norm": True}, "head": {"tied": False, "transform": "silu"}},
    "residual-pre-norm-gated": wired("pre_norm", gate_rank=3, drop_path=0.4, dropout=0.1),
    "residual-pre-norm-gated-mixtures": wired(
        "pre_norm",
        layer(attention(kv_heads=2)),
        layer(attention(kv_heads=1, window=3), {"kind": "moe", "experts": 3, "top_k": 2, "hidden": 7}),
        gate_rank=2,
        gated_feedforwards="mixtures",
    ),
    "residual-pre-norm-multiplier": wired("pre_norm", multiplier=0.6, drop_path=0.4),
    "residual-parallel-dropout": wired("parallel", *APART, norms=2, dropout=0.2, drop_path=0.3),
    "residual-post-norm": wired("post_norm", drop_path=0.4, dropout=0.2),
    "residual-post-norm-apart": wired("post_norm", *APART, norm={"kind": "rms"}),
    "residual-post-norm-outer-sum": wired("post_norm", outer_sum=True, drop_path=0.4, drop_path_first=0.2),
    "residual-deep-norm": wired("deep_norm", drop_path=0.4, dropout=0.2),
    "residual-deep-norm-factors": wired(
        "deep_norm", *APART, alpha=1.7, feedforward_alpha=0.6, multiplier=0.8, feedforward_multiplier=1.3, drop_path=0.3
    ),
    "residual-sandwich": wired("sandwich", drop_path=0.5, dropout=0.1),
    "residual-sandwich-apart": wired("sandwich", *APART, norm={"kind": "rms", "offset": 1.0}),
    "residual-sandwich-multiplier": wired("sandwich", multiplier=0.6, laurel_rank=3, drop_path=0.4),
    "residual-laurel": wired("sandwich", *APART, laurel_rank=4, drop_path=0.4, dropout=0.1),
    "residual-altup": wired("sandwich", *APART, altup_streams=3, drop_path=0.4, dropout=0.1),
    "residual-altup-laurel": wired("sandwich", altup_streams=2, laurel_rank=3, final_norm=False)
    | {"embedding": {"per_layer": {"dim": 4, "vocab_size": 40}}},
    "residual-layer-scalar": wired("sandwich", layer_scalar=True, drop_path=0.3),
    "residual-layer-scalar-apart": wired("parallel", *APART, norms=2, layer_scalar=True, dropout=0.2),
    "residual-reordered": wired("reordered", drop_path=0.5, dropout=0.2),
    "residual-reordered-apart": wired("reordered", *APART, norm={"kind": "rms", "cast": "after"}),
    "residual-reordered-norms-first": wired(
        "reordered",
        layer(attention(kv_heads=2, window=3), None),
        layer({"kind": "retention", "heads": 2}),
        layer(attention(kv_heads=1)),
        norms_first=["attention"],
        drop_path=0.3,
    ),
    "residual-no-final-norm": wired("reordered", final_norm=False, drop_path=0.5, drop_path_first=0.3),
    "residual-dual": wired("residual_dual", drop_path=0.4, dropout=0.3),
    "residual-dual-apart": wired("residual_dual", *APART, norm={"kind": "rms"}, drop_path=0.3),
    "residual-hyper": wired("hyper_connections", streams=3, iterations=9, drop_path=0.4, dropout=0.2),
    "residual-hyper-apart": wired("hyper_connections", *APART, norm={"kind": "rms"}, streams=2, iterations=4),
    "residual-hyper-weighted": wired(
        "hyper_connections", streams=3, iterations=3, norm_weight=False, eps=1e-3, collapse="weighted", drop_path=0.3
    ),
    "residual-hyper-whole": wired(
        "hyper_connections", streams=3, iterations=3, norm_weight=False, eps=1e-3, collapse="weighted", whole_bias=True
    ),
    "residual-hyper-not-mixed": wired(
        "hyper_connections", *APART, streams=2, mixing=False, magnitude=0.7, eps=1e-3, drop_path=0.3
    ),
    "residual-hyper-gates": wired(
        "hyper_connections", streams=2, mixing=False, gate_rank=5, collapse="weighted", drop_path=0.3
    ),
    "residual-hyper-gates-apart": wired(
        "hyper_connections", *APART, norm={"kind": "rms", "offset": 1.0}, streams=3, mixing=False, gate_rank=3
    ),
    "residual-attention": wired("attention_residuals", drop_path=0.4, dropout=0.2),
    "residual-attention-apart": wired(
        "attention_residuals", *APART, norm={"kind": "rms"}, value_norm=True, eps=1e-3, drop_path=0.3
    ),
    "residual-attention-blocks": wired(
        "attention_residuals", layer(attention(), repeat=4), block_size=2, drop_path=0.4, drop_path_first=0.3
    ),
    "residual-attention-blocks-apart": wired("attention_residuals", *APART, block_size=1, value_norm=True),
}
CASES |= {
    "per-layer-embedding": design(
        layer(attention(kv_heads=2, window=3), ALL_DROP, repeat=2),
        layer(None),
        embedding={"per_layer": {"dim": 5}, "scale": True, "norm": True, "dropout": 0.2},
        residual={"kind": "sandwich", "layer_scalar": True},
        norm=LAYER_NORM,
    ),
    "per-layer-embedding-shared": design(
        layer(attention(kv_heads=2), repeat=3) | SHARED,
        embedding={"per_layer": {"dim": 3, "activation": "silu"}},
        head={"tied": False},
    ),
    "head-bias-scale-softcap": design(
        layer(attention(), repeat=2), head={"tied": False, "bias": True, "scale": 0.7, "softcap": 1.5}
    ),
    "multi-token": design(
        layer(attention(kv_heads=1)),
        layer(attention(6, kv_heads=2, window=3), {"kind": "gated", "hidden": 11, "dropout": 0.2}),
        multi_token={"depth": 2, "loss_weight": 0.5},
    ),
    "head-width-scale": design(layer(attention()), head={"width_scale": 0.5}),
    "head-tied-bias": design(layer(attention(kv_heads=2)), head={"bias": True}),
}
# Layers that are visited several times with the same weights.
CASES |= {
    "shared-layer": design(layer(attention(kv_heads=2), repeat=3) | SHARED),
    "shared-adapters": design(
        layer(attention(kv_heads=2), {"kind": "gated", "hidden": 9}, repeat=3) | SHARED | {"adapter_rank": 2}
    ),
    "shared-group-adapters": design(
        layer(attention()),
        SHARED
        | {
            "repeat": 2,
            "layers": [
                layer(latent(query_rank=9, gate="head"), {"kind": "moe", "hidden": 9, "experts": 3, "top_k": 2})
                | {"adapter_rank": 1},
                layer({"kind": "mamba2", "heads": 3, "state_size": 6}, MLP | {"bias": True}) | {"adapter_rank": 3},
            ],
        },
        head={"tied": False},
        multi_token={"depth": 1},
    ),
    "shared-group": design(
        layer(attention(kv_heads=2)),
        SHARED | {"repeat": 2, "layers": [layer(attention(window=3, dropout=0.2)), delta(3, repeat=1)]},
        residual={"kind": "pre_norm", "drop_path": 0.4, "dropout": 0.2},
    ),
    "shared-block": design(
        {
            "repeat": 2,
            "layers": [
                layer({"kind": "mamba2", "heads": 3, "state_size": 6}, None),
                layer(differential(), {"kind": "moe", "hidden": 9, "experts": 4, "top_k": 2, "bias_update": 0.05})
                | SHARED,
            ],
        },
        residual={"kind": "deep_norm", "drop_path": 0.3},
    ),
    "shared-block-reads-keys": design(
        layer(attention(kv_heads=2)),
        {"repeat": 2, "layers": [layer(attention(kv_heads=2, shared_kv=True)), layer(attention(kv_heads=2))]} | SHARED,
    ),
    "shared-encoder": design(
        layer({"kind": "pair", "first": attention(), "second": cross()}, repeat=2) | SHARED,
        encoder=DEFAULTS
        | {"width": 24, "layers": [layer(attention(causal=False)), layer(attention(causal=False), repeat=2) | SHARED]},
    ),
}


@cache
def case(name: str) -> ModelConfig:
    """The config of a case."""
    return parse_config(ModelConfig, CASES[name])


def each_part(names: Iterable[str] = ()) -> list[Any]:
    """Cases as parameters of a test: each that has a part which no earlier one has; the others are for the night."""
    parameters, seen = [], set[tuple[str, str]]()
    for name in names or CASES:
        parts = parts_of(case(name))
        parameters.append(pytest.param(name, marks=() if parts - seen else pytest.mark.nightly))
        seen |= parts
    return parameters


def by_day(days: int, number: int) -> list[Any]:
    """The numbers below `number` as parameters of a test: the first `days` by day, the others in the night."""
    return [pytest.param(each, marks=() if each < days else pytest.mark.nightly) for each in range(number)]


def in_turn(parameters: Iterable[Any], turn: int, turns: int = 4) -> list[Any]:
    """One of `turns` parameters by day, beginning with number `turn`; the others in the night.

    Tests of the same parameters take different turns, so that each parameter is in one of them by day.
    """
    result = []
    for number, parameter in enumerate(parameters):
        values = parameter if isinstance(parameter, tuple) else (parameter,)
        result.append(pytest.param(*values, marks=() if number % turns == turn else pytest.mark.nightly))
    return result


def written(kind: str, data: Any = CASES) -> Data:
    """The first part of a kind in the cases, as it is written there; empty without one."""
    if isinstance(data, dict) and data.get("kind") == kind:
        return data
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return next(filter(None, (written(kind, each) for each in inner)), {})


@cache
def parts_of(config: Config) -> set[tuple[str, str]]:
    """(slot, kind) of every part within a config."""
    parts = {(config.slot, config.kind)} if isinstance(config, Part) else set()
    for name in type(config).model_fields:
        value = getattr(config, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Config):
                parts |= parts_of(inner)
    return parts
