"""Softmax attention: MHA (Vaswani et al. 2017), MQA (Shazeer 2019), GQA (Ainslie et al. 2023), full or local.

    softmax(Q Kᵀ / sqrt(d_k) + mask) V,   query head h reads key and value head h // (heads / kv_heads)

kv_heads = heads is MHA, kv_heads = 1 is MQA. Keys and values are projected, stored and cached kv_heads wide.
`window` w sees w keys, itself included (causal), or w to each side (bidirectional): the state is a ring of w.
`sink` adds a learned logit a head to the softmax's denominator (gpt-oss, 2025), `softcap` bounds the scores by
`cap · tanh(score / cap)` (Gemma 2, 2024), `gate` multiplies what is read by sigmoid(W_g x) (Qiu et al. 2025).
"""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import Count, Positive, Rate, build_under, refuse
from heddle.numerics.attention.score_modifiers import Extras
from heddle.numerics.attention.softmax import attention
from heddle.parts.context.kv_cache import Cache
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.mixers import Mixer, MixerConfig, Place, narrow, widen
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Leaf, Linear, fill_normal, together
from heddle.parts.positions import Bias, BiasConfig, InnerConfig, Rotation, RotationConfig


class AttentionConfig(MixerConfig):
    """Fields of `attention`; absent means off or the usual default."""

    heads: Count
    kv_heads: Count | None = None  # default: heads
    head_dim: Count | None = None  # default: width / heads
    value_dim: Count | None = None  # default: head_dim
    window: Count | None = None
    causal: bool = True
    # The norm of q and k before the rotation: one weight for all heads (Qwen3), one a head (Cohere),
    # or one over the whole projection (OLMo-2).
    qk_norm: Literal["head", "per_head", "projection"] | None = None
    bias: bool | Literal["qkv"] = False  # true: q, k, v and out; qkv: those three (Qwen2)
    sink: bool = False  # a learned logit a head, without a value
    gate: Literal["head", "channel"] | None = None  # one gate a head, or one a head and channel (Qwen3-Next)
    softcap: Positive | None = None
    scale: Positive | None = None  # default: 1 / sqrt(head_dim)
    dropout: Rate = 0.0  # of the attention weights
    position: InnerConfig | None = None  # a rotation of q and k, or a bias of the scores

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kv_heads is not None and self.heads % self.kv_heads:
            refuse("kv_heads", f"{self.kv_heads} does not divide heads = {self.heads}; choose a divisor of it")
        return self

    def resolved(self, place: Place) -> Self:
        """Heads, widths, scale and turned dims written out."""
        dim = place.head_dim(self.heads, self.head_dim)
        position = self.position.resolved(dim) if isinstance(self.position, RotationConfig) else self.position
        return self.replace(
            kv_heads=self.kv_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            scale=self.scale or dim**-0.5,
            position=position,
        )

    def build(self, place: Place) -> "Attention":
        """Make the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return Attention(self, place)


class Attention(Leaf, Mixer):
    """The module; its state is a `Cache`: kv_heads · (d_k + d_v) elements a token, or a ring of `window` tokens."""

    def __init__(self, config: AttentionConfig, place: Place) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = place.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        self.reach, self.causal = config.window, config.causal
        into = bool(config.bias)
        self.q = Linear(place.width, self.heads * self.head_dim, bias=into)
        self.k = Linear(place.width, self.kv_heads * self.head_dim, bias=into)
        self.v = Linear(place.width, self.kv_heads * self.value_dim, bias=into)
        self.out = Linear(self.heads * self.value_dim, place.width, bias=config.bias is True, last=True)
        gates = {"head": self.heads, "channel": self.heads * self.value_dim}
        self.gate = None if config.gate is None else Linear(place.width, gates[config.gate], bias=into)
        self.sink = nn.Parameter(torch.empty(self.heads)) if config.sink else None
        self.softcap = config.softcap
        self.qk_norm = config.qk_norm
        self.q_norm = self._norm(place, self.heads)
        self.k_norm = self._norm(place, self.kv_heads)
        self.position: Rotation | None = None
        self.distance: Bias | None = None
        if isinstance(config.position, RotationConfig):
            self.position = build_under("position", config.position.build, self.head_dim)
        elif isinstance(config.position, BiasConfig):
            self.distance = build_under("position", config.position.build, self.heads)
        self.dropout = Dropout(config.dropout)

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Normal sinks; the projections fill themselves."""
        if self.sink is not None:
            fill_normal(self.sink, std, generator)

    def _norm(self, place: Place, heads: int) -> nn.Module | None:
        if self.qk_norm is None:
            return None
        if self.qk_norm == "projection":
            return place.norm.build(heads * self.head_dim)
        return place.norm.build(self.head_dim, heads if self.qk_norm == "per_head" else None)

    def init_state(
        self,
        batch: int,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        rewind: int = 0,
    ) -> Cache:
        """Keys and values, every token or a ring of `window` and `rewind` more."""
        shape = (batch, self.kv_heads, self.head_dim, self.value_dim)
        kept = None if self.reach is None else self.reach + rewind
        return Cache.empty(shape, kept, capacity, dtype=dtype, device=device)

    def forward(self, x: Tensor, layout: Layout, state: Cache | None = None) -> tuple[Tensor, Cache | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = together(x, self.q, self.k, self.v)
        q = self._heads(q, self.q_norm, self.heads, layout)
        k = self._heads(k, self.k_norm, self.kv_heads, layout)
        v = widen(v, self.kv_heads)
        y, state = self._attend(q, k, v, layout, state)
        y = narrow(y)
        if self.gate is not None:
            gates = self.gate(x).sigmoid().unflatten(-1, (self.heads, -1))
            y = (y.unflatten(-1, (self.heads, -1)) * gates).flatten(-2)
        return self.out(y), state

    @eager  # layouts differ from call to call; what is compiled is around this
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        if state is None:
            seen = layout.seen(self.reach, self.causal)
        else:
            k, v, seen, state = state.extend(k, v, layout, self.reach)
        weigh = self.dropout if self.dropout.active else None
        slopes = None if self.distance is None else self.distance(layout, q.dtype)
        return attention(q, k, v, seen, self.scale, weigh, Extras(self.softcap, self.sink, slopes)), state

    def _heads(self, x: Tensor, norm: nn.Module | None, heads: int, layout: Layout) -> Tensor:
        """Projection [B, T, heads · d] -> normed, rotated heads [B, heads, T, d]."""
        if norm is not None and self.qk_norm == "projection":
            x = norm(x)
        x = x.unflatten(-1, (heads, self.head_dim))
        if norm is not None and self.qk_norm != "projection":
            x = norm(x)
        x = x.transpose(1, 2)
        return x if self.position is None else self.position(x, layout)
