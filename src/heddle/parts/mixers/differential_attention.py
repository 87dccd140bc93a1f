"""Differential attention (Ye et al. 2024): the difference of two softmax maps, which cancels what both attend to.

    y_h = (1 − λ_init) · N((A_1 − λ A_2) V),   A_i = softmax(Q_i K_iᵀ / sqrt(d) + mask),   output W_out [y_1 … y_heads]
    λ = exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_init,   λ_init = 0.8 − 0.6 exp(−0.3 · layer_index)

Each head has two queries and keys of head_dim = d dims and one value of 2 d dims; λ is one number per layer, and N a
norm over each head's output. The first layer has the index 0. Query head h reads key and value head
h // (heads / kv_heads). Observed attention maps are of both softmaxes: all A_1, then all A_2. `value_embedding` adds
rows of a table of token embeddings to the values (see `ValueEmbeddingConfig`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, PositiveFloat, PositiveInt, Width, build_under
from heddle.numerics.attention.mask import ScoreModifiers
from heddle.numerics.attention.softmax import attention
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import (
    Mixer,
    MixerConfig,
    check_head_groups,
    check_norm_width,
    merge_heads,
    split_heads,
)
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.value_embedding import EmbeddedValuesConfig, build_value_embedding
from heddle.parts.norms import NormConfig
from heddle.parts.positions import MixerPositionConfig, build_mixer_position
from heddle.parts.states import KVCache, StateSpec

LAMBDA_STD = 0.1


class DifferentialAttentionConfig(EmbeddedValuesConfig):
    """Fields of `differential_attention`. None or false: off, or the default named in the comment."""

    aliases = ("diff_attention",)
    later_fields = ("value_embedding",)

    heads: Width  # each with two queries
    kv_heads: Width | None = None  # default: heads
    head_dim: Width | None = None  # of each query and key; default: width / (2 · heads)
    value_dim: Width | None = None  # default: 2 · head_dim
    window: PositiveInt | None = None
    causal: bool = True
    bias: bool = False  # of q, k, v and out
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)
    norm: NormConfig | None = None  # of each head's output; default: the model's norm
    position: MixerPositionConfig | None = None  # a rotation of q and k, or a score bias, the same for both maps

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("kv_heads", self.kv_heads, self.heads)
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths, scale, norm and rotary dims written out."""
        dim = self.query_dim(context)
        position = None if self.position is None else self.position.resolved(dim)
        return (
            super()
            .resolved(context)
            .replace(
                kv_heads=self.kv_heads or self.heads,
                head_dim=dim,
                value_dim=self.value_dim or 2 * dim,
                scale=self.scale or dim**-0.5,
                norm=self.norm or context.norm,
                position=position,
            )
        )

    def query_dim(self, context: BuildContext) -> int:
        """The width of each query and key. Raises DesignError if it does not follow from the model's width."""
        if self.head_dim is None and context.width % (2 * self.heads):
            reason = f"two queries for each of {self.heads} heads do not divide width = {context.width}"
            raise DesignError("heads", f"{reason}; give head_dim, or other heads")
        return self.head_dim or context.width // (2 * self.heads)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window, if there is one."""
        return () if self.window is None else (self.window,)

    def with_window(self, window: int) -> Self:
        """The same config with this window, or its own if that is smaller."""
        return self.replace(window=min(self.window or window, window))

    def head_shape(self, width: int) -> tuple[int, int]:
        """Heads, and the width of their values."""
        return self.heads, self.value_dim or 2 * (self.head_dim or width // (2 * self.heads))

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """A head_dim, half the previous mixer's, if two queries per head do not divide the width."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        return {"head_dim": max(1, dim // 2)} if heads and width % (2 * heads) else {}

    def build(self, context: BuildContext) -> "DifferentialAttention":
        """Build the module. Raises DesignError if 2 · heads do not divide the width and head_dim is not given."""
        return DifferentialAttention(self, context)


class DifferentialAttention(SelfInitialized, Mixer):
    """The module. Its state is a `KVCache` whose keys [B, kv_heads, slots, 2 d] are the two keys of each head."""

    input_projections: Sequence[str] | None = ("q", "k", "v")
    uses_layer_index = True
    fast_graph = True

    def __init__(self, config: DifferentialAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = config.query_dim(context)
        self.value_dim = config.value_dim or 2 * self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        self.window, self.causal = config.window, config.causal
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * context.layer_index)
        self.q = Linear(context.width, 2 * self.heads * self.head_dim, config.bias)
        self.k = Linear(context.width, 2 * self.kv_heads * self.head_dim, config.bias)
        self.v = Linear(context.width, self.kv_heads * self.value_dim, config.bias, value_projection=True)
        self.value_embedding = build_value_embedding(config.value_embedding, context, self.kv_heads, self.value_dim)
        if config.value_embedding is not None:
            self.input_projections = None  # its gate reads a part of x
        self.out = Linear(self.heads * self.value_dim, context.width, config.bias, output_projection=True)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(self.head_dim)) for _ in range(4)
        )
        check_norm_width("value_dim", self.value_dim)
        self.norm = build_under("norm", (config.norm or context.norm).build, self.value_dim)
        self.position, self.score_bias = build_mixer_position(config.position, self.head_dim, self.heads, self.causal)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal vectors of λ. The projections initialize themselves."""
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            fill_normal(self.get_parameter(name), LAMBDA_STD, draws(name))

    @property
    def logit_rows(self) -> str:
        """Its logits are not measured."""
        return "is differential attention, for which QK-clip is not defined"

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """The shape of the values."""
        return {"kv_heads": self.kv_heads, "value_dim": self.value_dim}

    def init_state(self, spec: StateSpec) -> KVCache:
        """An empty cache for every token, or a ring buffer of `window` tokens and `rollback` more."""
        shape = (spec.batch, self.kv_heads, 2 * self.head_dim, self.value_dim)
        return KVCache.empty(shape, None if self.window is None else self.window + spec.rollback, spec)

    def forward(self, x: Tensor, layout: Layout, state: KVCache | None = None) -> tuple[Tensor, KVCache | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = fused_projections(x, self.q, self.k, self.v)
        queries, keys = self._pairs(q, self.heads, layout), self._pairs(k, self.kv_heads, layout)
        values = split_heads(v, self.kv_heads)
        if self.value_embedding is not None:
            values = self.value_embedding(x, values, layout, self.table_source, self.table_target)
        first, second, state = self._attend(queries, keys, values, layout, state)
        y = self.norm((first - self._lambda().to(first.dtype) * second).transpose(1, 2))
        return self.out(merge_heads(y.transpose(1, 2)) * (1.0 - self.lambda_init)), state

    def _lambda(self) -> Tensor:
        """λ, in at least float32."""
        q1, k1, q2, k2 = (at_least_float32(x) for x in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def _pairs(self, x: Tensor, heads: int, layout: Layout) -> Tensor:
        """Projection [B, T, heads · 2 d] -> both rotated queries or keys of each head, [B, heads, T, 2 d]."""
        single = split_heads(x, 2 * heads)
        if self.position is not None:
            single = self.position(single, layout)
        return torch.cat((single[:, 0::2], single[:, 1::2]), dim=-1)

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: KVCache | None
    ) -> tuple[Tensor, Tensor, KVCache | None]:
        """Both maps times the values: two tensors [B, heads, T, value_dim]."""
        if state is None:
            mask = layout.attention_mask(self.window, self.causal)
        else:
            k, v, mask, state = state.extend(k, v, layout, self.window)
        score_bias = self.call_bias(self.score_bias, layout, q.dtype)
        modifiers = ScoreModifiers(score_bias=score_bias)
        first, second = (
            attention(query, key, v, mask, self.scale, None, modifiers)
            for query, key in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)
        )
        return first, second, state
