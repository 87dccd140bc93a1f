"""Linear attention (Katharopoulos et al. 2020), and the double softmax of efficient attention (Shen et al. 2018).

    kernel           S_t = S_{t−1} + ψ(k_t) v_tᵀ,  z_t = z_{t−1} + ψ(k_t),   y_t = φ(q_t)ᵀ S_t / φ(q_t)ᵀ z_t
    double_softmax   softmax_d(Q) (softmax_n(K)ᵀ V),   n over the tokens, d over a head's channels

φ and ψ are elu + 1, relu, or learned (Hedgehog, Zhang et al. 2024): [softmax(W x) ; softmax(−W x)] with one W per head.
Where the denominator is zero, y is zero. A rotary embedding rotates φ(q) and ψ(k) in the numerator only (RoFormer,
eq. 19). With `causal: false`, S and z are sums over the whole document. `value_embedding` adds rows of a
table of token embeddings to v (see `ValueEmbeddingConfig`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, Width, build_under, refuse
from heddle.numerics.attention.observer import notify_implied_weights
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.numerics.recurrent.causal_sums import causal_means, causal_sums
from heddle.numerics.recurrent.chunked_sums import safe_quotient
from heddle.numerics.recurrent.linear_attention import (
    document_sums,
    elu_features,
    hedgehog_features,
    relu_features,
    softmax_over_tokens,
)
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, RecurrentMixer, check_double_softmax, merge_heads, split_heads
from heddle.parts.modules.eager import eager
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.value_embedding import EmbeddedValuesConfig, build_value_embedding
from heddle.parts.positions import RotationConfig
from heddle.parts.states import RecurrentState, StateSpec, call_layout, without_padding

FeatureMapName = Literal["elu", "relu", "learned"]
MAP_FIELDS = ("feature_map", "key_feature_map")

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu_features, "relu": relu_features}


class LinearAttentionConfig(EmbeddedValuesConfig):
    """Fields of `linear_attention`. Feature maps and a rotation are only for `normalization: kernel`."""

    later_fields = ("value_embedding",)

    heads: Width
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    feature_map: FeatureMapName | None = None  # φ, of queries; default: elu
    key_feature_map: FeatureMapName | None = None  # ψ, of keys; default: feature_map
    normalization: Literal["kernel", "double_softmax"] = "kernel"
    causal: bool = True
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.normalization == "double_softmax":
            if self.causal:
                refuse("causal", "the softmax over tokens of double_softmax sees later tokens; set it to false")
            for name in (*MAP_FIELDS, "position"):
                if getattr(self, name) is not None:
                    refuse(name, "is only for normalization: kernel; leave it out with double_softmax")
        if (self.feature_maps[0] == "learned") != (self.feature_maps[1] == "learned"):
            refuse(
                "key_feature_map",
                f"{self.feature_maps[1]} and {self.feature_maps[0]} differ in width; use learned for both or neither",
            )
        return self

    @property
    def feature_maps(self) -> tuple[str, str]:
        """The names of φ and ψ."""
        return self.feature_map or "elu", self.key_feature_map or self.feature_map or "elu"

    def resolved(self, context: BuildContext) -> Self:
        """Widths, feature maps and rotary dims written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        feature_dim = 2 * dim if self.feature_maps[0] == "learned" else dim
        position = None if self.position is None else self.position.resolved(feature_dim)
        maps = {} if self.normalization == "double_softmax" else dict(zip(MAP_FIELDS, self.feature_maps, strict=True))
        fields = {"head_dim": dim, "value_dim": self.value_dim or dim, "position": position}
        return super().resolved(context).replace(**fields, **maps)

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """As for every mixer; and kernel normalization, which unlike double_softmax reads no later tokens."""
        inner = previous.template if isinstance(previous, MixerConfig) else previous
        is_double = getattr(inner, "normalization", None) == "double_softmax"
        return {**super().default_fields(previous, width), **({"normalization": "kernel"} if is_double else {})}

    def build(self, context: BuildContext) -> "LinearAttention":
        """Build the module.

        Raises DesignError if width is not divisible by heads and head_dim is not given, or if double_softmax would
        normalize over a single dim.
        """
        return LinearAttention(self, context)


class FeatureMap(SelfInitialized):
    """The learned feature map: one matrix per head, initialized near the identity."""

    matrix_parameters = ("weight",)

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, dim, dim))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """The identity plus normal noise."""
        fill_normal(self.weight, std, draws("weight"), torch.eye(self.weight.shape[1], device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, T, dim] -> [B, H, T, 2 dim]."""
        return hedgehog_features(x, self.weight)


class LinearAttention(RecurrentMixer):
    """The module. Its state is a `RecurrentState` [B, H, d_φ, d_v + 1]: S, with z as the last column."""

    input_projections: Sequence[str] | None = ("q", "k", "v")

    def __init__(self, config: LinearAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads = config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        check_double_softmax(config.normalization, self.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.causal = config.causal
        self.uses_kernel = config.normalization == "kernel"
        self.q = Linear(context.width, self.heads * self.head_dim)
        self.k = Linear(context.width, self.heads * self.head_dim)
        self.v = Linear(context.width, self.heads * self.value_dim, value_projection=True)
        self.value_embedding = build_value_embedding(config.value_embedding, context, self.heads, self.value_dim)
        if config.value_embedding is not None:
            self.input_projections = None  # its gate reads a part of x
        self.out = Linear(self.heads * self.value_dim, context.width, output_projection=True)
        self.q_map, self.k_map = (
            FEATURE_MAPS.get(name) or FeatureMap(self.heads, self.head_dim) for name in config.feature_maps
        )
        self.feature_dim = self.head_dim * (2 if config.feature_maps[0] == "learned" else 1)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.feature_dim)
        if self.position is not None and self.position.cast is not None:
            raise DesignError("position.cast", "does nothing here, because features are at least float32; leave it out")

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """The shape of the values."""
        return {"heads": self.heads, "value_dim": self.value_dim}

    def init_state(self, spec: StateSpec) -> RecurrentState:
        """Zeros; the size does not depend on the cache length."""
        return RecurrentState.empty(
            (spec.batch, self.heads, self.feature_dim, self.value_dim + 1), spec.dtype, spec.device
        )

    def forward(
        self, x: Tensor, layout: Layout, state: RecurrentState | None = None
    ) -> tuple[Tensor, RecurrentState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v = (split_heads(y, self.heads) for y in fused_projections(x, self.q, self.k, self.v))
        if self.value_embedding is not None:
            v = self.value_embedding(x, v, layout, self.table_source, self.table_target)
        if self.uses_kernel:
            y, state = self._kernel_attention(self.q_map(q), self.k_map(k), v, layout, state)
        else:
            y = self._double_softmax(q, k, v, layout)
        return self.out(merge_heads(y).to(x.dtype)), state

    @eager  # layouts differ from call to call, so this stays out of compiled regions
    def _kernel_attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState | None]:
        """φ(q), ψ(k) [B, H, T, d_φ], v [B, H, T, d_v] -> [B, H, T, d_v] and the new state."""
        k = without_padding(k, layout)
        notify_implied_weights(lambda one_hot: self._sums(q, k, one_hot, layout, None)[0], v, layout.padding)
        return self._sums(q, k, v, layout, state)

    def _sums(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: RecurrentState | None
    ) -> tuple[Tensor, RecurrentState | None]:
        sums = None if state is None else state.kv_sums
        if self.causal and self.position is None:
            y, sums = causal_means(q, k, v, call_layout(layout), sums)
            return y, None if sums is None else RecurrentState(sums)
        ones = torch.ones_like(v[..., :1])
        rotated_q, rotated_k = (x if self.position is None else self.position(x, layout) for x in (q, k))
        if not self.causal:
            numerator = document_sums(rotated_q, rotated_k, v, layout.call_segment_ids)
            return safe_quotient(numerator, document_sums(q, k, ones, layout.call_segment_ids)), None
        parts = (None, None) if sums is None else (sums[..., :-1], sums[..., -1:])
        numerator, numerator_state = causal_sums(rotated_q, rotated_k, v, None, call_layout(layout), parts[0])
        denominator, denominator_state = causal_sums(q, k, ones, None, call_layout(layout), parts[1])
        y = safe_quotient(numerator, denominator)
        if numerator_state is None or denominator_state is None:
            return y, None
        return y, RecurrentState(torch.cat((numerator_state, denominator_state), dim=-1))

    @eager
    def _double_softmax(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        q, k = at_least_float32(q).softmax(-1), softmax_over_tokens(k, layout.padding, layout.call_segment_ids)
        notify_implied_weights(lambda one_hot: document_sums(q, k, one_hot, layout.call_segment_ids), v, layout.padding)
        return document_sums(q, k, v, layout.call_segment_ids)
