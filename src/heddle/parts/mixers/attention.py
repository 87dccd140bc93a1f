"""Softmax attention: MHA (Vaswani et al. 2017), MQA (Shazeer 2019), GQA (Ainslie et al. 2023), full or local.

    softmax(Q Kᵀ / sqrt(d_k) + mask) V,   query head h reads key and value head h // (heads / kv_heads)

Keys and values have kv_heads heads, also in the cache.
With `window` w a query sees w keys, itself included (causal), or w to each side (bidirectional); the state is then a
ring buffer of w tokens. With `chunked` the query at position i sees only its own chunk of w positions, keys at j with
⌊j / w⌋ = ⌊i / w⌋ (Llama 4, 2025). `qkv_clip` c bounds the elements of q, k and v by ±c as they are projected (MPT,
DBRX, 2024); `value_scale` multiplies the values (MiMo-V2, 2026). `qk_norm_weight: false` leaves out the weights of the
norms of q and k. `sink` adds one learned logit per head to the softmax denominator (gpt-oss, 2025). `softcap`
bounds scores by `cap · tanh(score / cap)` (Gemma 2, 2024). `gate` multiplies the attention output by sigmoid(W_g x)
(Qiu et al. 2025), with `gate_activation: softplus` by softplus(W_g x) (Laguna, 2026). `temperature_beta` β and
`temperature_length` n multiply the query at position p by 1 + β ln(1 + ⌊p / n⌋) (Ministral 3, 2025), or by
`temperature_growth`: `stepwise_from_one` 1 + β ln(1 + ⌊(p + 1) / n⌋) (Llama 4, 2025), `smooth` 1 + β ln(max(1, (p + 1)
/ n)) (Inkling, 2026). `exclusive` removes from the output y of each head its component along the token's own value v,
before any gate:
y − (y · v / |v|²) v (exclusive self-attention, arXiv 2603.09078). |v| is at least 1e-12 there.

With `shared_kv` a layer has no k, no v and no state: it reads the keys (normalized and rotated) and the values of the
last earlier layer that has its own and the same window and direction (YOCO, Sun et al. 2024; CLA, Brandon et al. 2024;
Gemma 3n, 2025).

With `value_residual` (ResFormer, Zhou et al. 2024, arXiv 2410.17897) a layer attends with the values λ₁ v + λ₂ v₁. v₁
are the values of the first layer with attention, for the same tokens. λ₁ and λ₂ are given, or learned, starting at 0.5.
A layer without the option keeps its own values. The cache holds the mixed values.

With `value_embedding` rows of a table of token embeddings are added to the values (modded-nanogpt, 2024; nanochat,
2026; see `ValueEmbeddingConfig`).

With `k_eq_v` there is no projection to v: values are the projected keys, before any convolution, norm and rotation of
the keys (Gemma 4, 2026). `value_norm` makes the values of each head `v / sqrt(mean(v²) + ε)`, with the ε of the model's
norm and no weight (Gemma 3n, 2025), before `value_residual` mixes them.

`short_convolution` of q, k and v convolves the projections, before any norm and rotation (Canon-B; Inkling's k and v).

With `forget`, Σ_l log sigmoid(W_f x_l + b_f) over the tokens l after j up to i is added to the score of query i and key
j: each head forgets depending on what it reads (forgetting attention, FoX, Lin et al. 2025, arXiv 2503.02130). The
state has the log of the gate of each token and query head, in at least float32.

With `relative_dim` and `relative_extent` e each query head adds to the score of the key d < e tokens back element d of
W_e r, r = W_r x with `relative_dim` elements for each head; W_e is shared by the heads (Inkling, 2026). The temperature
multiplies r as it multiplies the query.

With `indexer` each query attends only to the `top_k` visible keys or blocks that an indexer selects (DeepSeek Sparse
Attention, 2025; MoBA, 2025; MiniMax M3, 2026; see `IndexerConfig`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional

from heddle.config import (
    DesignError,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Width,
    build_under,
    refuse,
    with_implied,
)
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers, TokenBias
from heddle.numerics.attention.softmax import attention
from heddle.numerics.norms import at_least_float32, rms_norm
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.layout import HandedOver, Layout
from heddle.parts.mixers import (
    LogitRows,
    Mixer,
    check_head_groups,
    check_norm_width,
    merge_heads,
    split_heads,
)
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.indexer import INDEX_PROJECTIONS, IndexedCache, IndexerConfig, IndexQueries, build_indexer
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections
from heddle.parts.modules.router_statistics import record_largest_logits
from heddle.parts.modules.short_convolution import ShortConvolutionConfig, ShortConvolutions, build_convolutions
from heddle.parts.modules.value_embedding import EmbeddedValuesConfig, build_value_embedding
from heddle.parts.norms import NormConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.positions import MixerPositionConfig, RotationConfig, build_mixer_position
from heddle.parts.states import ConvolvedState, KVCache, MixerState, StateSpec

# Temperatures that fall with the position: queries far into a long sequence get sharper scores.
#
#     stepwise           t(p) = 1 + β ln(1 + ⌊p / length⌋)           Ministral 3
#     stepwise_from_one  t(p) = 1 + β ln(1 + ⌊(p + 1) / length⌋)     Llama 4
#     smooth             t(p) = 1 + β ln(max(1, (p + 1) / length))   Inkling's log-n scale: alpha and n_floor
#
# A query at position p is multiplied by t(p), which is 1 for the first `length` tokens, or one less; a bias is not.

Growth = Literal["stepwise", "stepwise_from_one", "smooth"]


def query_temperature(
    layout: Layout, length: int, beta: float, dtype: torch.dtype, growth: Growth = "stepwise"
) -> Tensor:
    """t of each token, [B, 1, T, 1] in `dtype`, computed in at least float32; 1 at padding. Cached for all layers."""
    wide = torch.promote_types(dtype, torch.float32)

    def temperatures() -> Tensor:
        positions = layout.positions.clamp(min=0) + (growth != "stepwise")
        if growth == "smooth":
            lengths = (positions.to(wide) / length).clamp(min=1.0)
        else:
            lengths = 1.0 + positions.div(length, rounding_mode="floor").to(wide)
        return (1.0 + beta * lengths.log()).to(dtype)[:, None, :, None]

    return layout.cached(("query temperature", length, beta, dtype, growth), temperatures)


DEFAULT_EPS = 1e-6  # of `value_norm`, where the model's norm has no eps
LEAST_NORM = 1e-12  # of a value, as in the published code of exclusive self-attention


def without_own_values(y: Tensor, v: Tensor) -> Tensor:
    """Heads y [B, H, T, d] without their components along v [B, G, T, d], the same tokens' values, H / G heads each.

    In at least float32. The norm of a value is at least LEAST_NORM, so that a value of zero removes nothing.
    """
    heads = at_least_float32(y).unflatten(1, (v.shape[1], -1))
    own = functional.normalize(at_least_float32(v), dim=-1, eps=LEAST_NORM)[:, :, None]
    rest: Tensor = heads - (heads * own).sum(-1, keepdim=True) * own
    return rest.flatten(1, 2).to(y.dtype)


def default_groups(heads: int) -> int:
    """heads / 4, as in Llama 3 8B, or the divisor of heads nearest to it that is neither 1 (MQA) nor heads (MHA)."""
    divisors = [number for number in range(2, heads) if heads % number == 0]
    if not divisors:
        raise DesignError("heads", f"{heads} cannot form groups of several heads for gqa; use mha or mqa, or 4 heads")
    return min(divisors, key=lambda number: abs(number - heads / 4))


class AttentionConfig(EmbeddedValuesConfig):
    """Fields of `attention`. None or false: off, or the default named in the comment.

    Under the name `mha`, kv_heads is heads; under `mqa` it is 1; under `gqa` it is by default heads / 4, as in Llama 3
    8B, or the divisor of heads nearest to it that is neither 1 nor heads; `swa` needs a window.
    """

    aliases = ("mha", "mqa", "gqa", "swa")
    convolved = ("input", "q", "k", "v")
    later_fields = (
        *("temperature_growth", "exclusive", "shared_kv", "k_eq_v", "value_norm", "value_residual", "indexer"),
        *("chunked", "qk_norm_weight", "forget", "relative_dim", "relative_extent", "gate_activation"),
        "value_embedding",
    )

    heads: Width
    kv_heads: Width | None = None  # default: heads
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    window: PositiveInt | None = None
    chunked: bool = False  # a query sees no key before the window's last multiple
    causal: bool = True
    qkv_clip: PositiveFloat | None = None  # bound of the elements of q, k and v, before any norm
    value_scale: PositiveFloat | None = None  # multiplies the values
    # The norm of q and k before the rotary embedding: one weight shared by all heads (Qwen3), one weight per head
    # (Cohere), or one norm over the whole projection (OLMo-2).
    qk_norm: Literal["head", "per_head", "projection"] | None = None
    qk_norm_weight: bool = True  # false: these norms have no parameters
    # The norm after the rotation (Hunyuan 2025); its gains then make scores depend on absolute positions.
    norm_after_rotation: bool = False
    # true: q, k, v and out; qkv: those three (Qwen2); out: that one (GPT-Neo).
    bias: bool | Literal["qkv", "out"] = False
    sink: bool = False  # one learned logit per head, without a value
    gate: Literal["head", "channel"] | None = None  # one gate per head, or one per channel of each head (Qwen3-Next)
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    softcap: PositiveFloat | None = None
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)
    temperature_beta: PositiveFloat | None = None  # how fast queries grow with their position
    temperature_length: PositiveInt | None = None  # number of tokens after which they begin to grow
    temperature_growth: Growth = "stepwise"  # stepwise: after each length; smooth: with every token
    exclusive: bool = False  # outputs without their component along the token's own value
    shared_kv: bool = False  # reads the keys and values of the last earlier layer that has its own and this window
    k_eq_v: bool = False  # values are the projected keys
    value_norm: bool = False  # values are normalized
    forget: bool = False  # scores fall with the forget gates of the tokens between key and query
    relative_dim: Width | None = None  # of each query head's r, which gives a logit to each of the nearest keys
    relative_extent: Width | None = None  # the number of these keys, the token itself included
    # Factors of the layer's own values (λ₁) and of the first attention layer's (λ₂): two numbers, or learned.
    value_residual: tuple[FiniteFloat, ...] | Literal["learned"] | None = None
    indexer: IndexerConfig | None = None  # selects the keys that each query attends to
    dropout: Probability = 0.0  # of the attention weights
    position: MixerPositionConfig | None = None  # a rotation of q and k, or a score bias

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("kv_heads", self.kv_heads, self.heads)
        if (self.temperature_beta is None) != (self.temperature_length is None):
            missing = "temperature_beta" if self.temperature_beta is None else "temperature_length"
            refuse(missing, "is missing; give both temperature_beta and temperature_length, or neither")
        if self.temperature_growth != "stepwise" and self.temperature_beta is None:
            refuse("temperature_growth", "does nothing without temperature_beta and temperature_length; give both")
        if (self.relative_dim is None) != (self.relative_extent is None):
            missing = "relative_dim" if self.relative_dim is None else "relative_extent"
            refuse(missing, "is missing; give both relative_dim and relative_extent, or neither")
        for name, is_there in (("forget", self.forget), ("relative_dim", self.relative_dim is not None)):
            if is_there and not self.causal:
                refuse(name, "is about earlier tokens, but causal is false; leave it out")
            if is_there and self.window == 1:
                refuse(name, "changes nothing in a window of one token; give a wider window, or leave it out")
        if self.forget and self.shared_kv:
            refuse("forget", "keeps a gate of each token, but shared_kv leaves no state; keep one")
        if self.exclusive and self.causal and self.window == 1:
            refuse("exclusive", "leaves nothing of a window of one token, the token itself; give a wider window")
        if self.chunked and (self.window is None or self.window == 1):
            refuse("chunked", "needs a window of at least 2 tokens, the width of a chunk; give one, or leave it out")
        if not self.qk_norm_weight and self.qk_norm in (None, "per_head"):
            reason = "there are no norms of q and k" if self.qk_norm is None else "per_head is about their weights"
            refuse("qk_norm_weight", f"cannot be false, since {reason}; choose qk_norm head or projection")
        if self.gate_activation != "sigmoid" and self.gate is None:
            refuse("gate_activation", "does nothing without a gate; give gate, or leave it out")
        if self.value_scale is not None and self.shared_kv:
            refuse("value_scale", "has no effect with shared_kv, which leaves no values of its own; keep one")
        convolved = () if self.short_convolution is None else self.short_convolution.of
        if self.shared_kv and ("k" in convolved or "v" in convolved):
            refuse("short_convolution.of", "k and v come from another layer (shared_kv); leave them out")
        if self.k_eq_v and "v" in convolved:
            refuse("short_convolution.of", "v is not projected with k_eq_v; leave it out")
        for name in ("k_eq_v", "value_norm"):
            if self.shared_kv and getattr(self, name):
                refuse(name, "has no effect with shared_kv, which leaves no values of its own; keep one")
        if self.norm_after_rotation and (self.qk_norm is None or not isinstance(self.position, RotationConfig)):
            refuse("norm_after_rotation", "needs qk_norm and a rotary position; give both, or leave it out")
        if isinstance(self.value_residual, tuple) and len(self.value_residual) != 2:
            numbers = list(self.value_residual)
            refuse("value_residual", f"{numbers} should be two numbers, for the layer's own and the first values")
        if isinstance(self.value_residual, tuple) and self.value_residual[1] == 0.0:
            refuse("value_residual", "adds nothing if its second number is 0; leave it out, or give another")
        if self.value_residual is not None and self.shared_kv:
            refuse("value_residual", "has no effect with shared_kv, which leaves no values of its own; keep one")
        if self.value_embedding is not None and self.shared_kv:
            refuse("value_embedding", "has no effect with shared_kv, which leaves no values of its own; keep one")
        if self.indexer is not None and self.shared_kv:
            refuse("indexer", "selects keys of its own layer, but shared_kv reads another layer's; leave one out")
        return self

    @classmethod
    def fields_of_alias(cls, alias: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """mha: as many key heads as heads. gqa: fewer, by default `default_groups`. mqa: one. swa: a window."""
        heads, kv_heads = fields.get("heads"), fields.get("kv_heads")
        if alias == "swa" and fields.get("window") is None:
            raise DesignError("window", "is required by swa; give it the number of tokens that a query sees")
        if alias == "mqa":
            return with_implied(alias, fields, "kv_heads", 1)
        if alias == "swa" or type(heads) is not int or not 1 <= heads <= 2**20:
            return {**fields}
        if alias == "mha":
            return with_implied(alias, fields, "kv_heads", heads)
        if kv_heads in (1, heads):
            name = "mqa" if kv_heads == 1 else "mha"
            raise DesignError(
                "kv_heads", f"{kv_heads} of {heads} heads is {name}, not gqa; leave it out, or use {name}"
            )
        return {**fields, "kv_heads": kv_heads or default_groups(heads)}

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths, scale and rotary dims written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        position = None if self.position is None else self.position.resolved(dim)
        return (
            super()
            .resolved(context)
            .replace(
                kv_heads=self.kv_heads or self.heads,
                head_dim=dim,
                value_dim=self.value_dim or dim,
                scale=self.scale or dim**-0.5,
                position=position,
            )
        )

    @property
    def reads_kv(self) -> bool:
        """Whether `shared_kv` is set."""
        return self.shared_kv

    @property
    def kv_kind(self) -> Any:
        """The window, whether it is a chunk, and the direction."""
        return (self.kind, self.window, self.chunked, self.causal)

    @property
    def adds_first_values(self) -> bool:
        """Whether `value_residual` is set."""
        return self.value_residual is not None

    @property
    def hands_values(self) -> bool:
        """Whether it has its own values."""
        return not self.shared_kv

    @property
    def windows(self) -> tuple[int, ...]:
        """The window, if there is one."""
        return () if self.window is None else (self.window,)

    def with_window(self, window: int) -> Self:
        """The same config with this window, or its own if that is smaller. Chunks are unchanged."""
        return self if self.chunked else self.replace(window=min(self.window or window, window))

    def build(self, context: BuildContext) -> "Attention":
        """Build the module.

        Raises DesignError if width is not divisible by heads and head_dim is not given, if values have one dim, of
        which `exclusive` would leave nothing and `value_norm` a sign, or if `k_eq_v` needs the width of keys for
        values.
        """
        dim = context.head_dim(self.heads, self.head_dim)
        value_dim = self.value_dim or dim
        if self.k_eq_v and value_dim != dim:
            raise DesignError("value_dim", f"{value_dim} is not head_dim = {dim}, but k_eq_v uses keys as values")
        if self.value_norm:
            check_norm_width("value_norm", value_dim)
        if self.exclusive and value_dim == 1:
            raise DesignError("exclusive", "leaves nothing of outputs of one dim; give a larger value_dim")
        if self.indexer is not None:
            build_under("indexer", self.indexer.check_attention, self.heads, self.window, self.causal)
        return Attention(self, context)


class SharedKeys(NamedTuple):
    """What a layer hands over: all keys and values of the call and of its state, their mask, and the call's values."""

    keys: Tensor
    values: Tensor
    mask: AttentionMask
    own_values: Tensor


@dataclass(frozen=True, eq=False)
class ForgettingCache(MixerState):
    """The cache of the keys and values, and the logs of the forget gates [B, H, slots, 1] of the same tokens."""

    kv: KVCache | IndexedCache
    log_forget: KVCache

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Whether the cache of the keys can."""
        return self.kv.can_roll_back(tokens, table)

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> "ForgettingCache":
        """Both caches without the removed tokens."""
        return ForgettingCache(self.kv.rolled_back(table, freed), self.log_forget.rolled_back(table, freed))


class Attention(SelfInitialized, Mixer):
    """The module. Its state is a `KVCache` of kv_heads · (d_k + d_v) elements per token, or of `window` tokens.

    With `indexer` it is an `IndexedCache`, which has the indexer's keys as well; with `forget` either is within a
    `ForgettingCache`. With `shared_kv` it has none.
    """

    input_projections: Sequence[str] | None = ("q", "k", "v", "gate", "forget", "relative", *INDEX_PROJECTIONS)

    def __init__(self, config: AttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        self.window, self.causal, self.chunked = config.window, config.causal, config.chunked
        self.qkv_clip, self.value_multiplier = config.qkv_clip, config.value_scale
        qkv_bias, out_bias = config.bias in (True, "qkv"), config.bias in (True, "out")
        self.q = Linear(context.width, self.heads * self.head_dim, bias=qkv_bias)
        self.reads_kv, kv_width = config.shared_kv, self.kv_heads * self.head_dim
        self.k = None if self.reads_kv else Linear(context.width, kv_width, bias=qkv_bias)
        value_width = self.kv_heads * self.value_dim
        has_v = not self.reads_kv and not config.k_eq_v
        self.v = Linear(context.width, value_width, bias=qkv_bias, value_projection=True) if has_v else None
        self.value_eps = getattr(context.norm, "eps", DEFAULT_EPS) if config.value_norm else None
        self.out = Linear(self.heads * self.value_dim, context.width, bias=out_bias, output_projection=True)
        gate_widths = {"head": self.heads, "channel": self.heads * self.value_dim}
        self.gate = None if config.gate is None else Linear(context.width, gate_widths[config.gate], bias=qkv_bias)
        self.forget = Linear(context.width, self.heads, bias=True) if config.forget else None
        dim, extent = config.relative_dim, config.relative_extent
        self.relative = None if dim is None else Linear(context.width, self.heads * dim)
        self.relative_logits = None if dim is None or extent is None else Linear(dim, extent)
        self.fast_graph = dim is None
        self.gate_activation = config.gate_activation
        self.sink = nn.Parameter(torch.empty(self.heads)) if config.sink else None
        self.value_embedding = build_value_embedding(config.value_embedding, context, self.kv_heads, self.value_dim)
        if config.value_embedding is not None:
            self.input_projections = None  # its gate reads a part of x
        factors = config.value_residual
        self.value_factors = factors if isinstance(factors, tuple) else None  # λ₁ and λ₂
        self.value_mix = nn.Parameter(torch.empty(2)) if factors == "learned" else None  # the same
        self.softcap = config.softcap
        self.qk_norm, self.norm_after_rotation = config.qk_norm, config.norm_after_rotation
        self.qk_norm_weight = config.qk_norm_weight
        norm = context.norm if config.qk_norm_weight else context.norm.without_weight()
        self.q_norm = self._qk_norm(norm, self.heads)
        self.k_norm = None if self.reads_kv else self._qk_norm(norm, self.kv_heads)
        self.rotation = config.position.resolved(self.head_dim) if isinstance(config.position, RotationConfig) else None
        self.position, self.score_bias = build_mixer_position(config.position, self.head_dim, self.heads, self.causal)
        self.temperature_beta, self.temperature_length = config.temperature_beta, config.temperature_length
        self.temperature_growth, self.exclusive = config.temperature_growth, config.exclusive
        self.absolute_positions = config.temperature_beta is not None or config.norm_after_rotation or config.chunked
        self.absolute_positions |= config.indexer is not None and config.indexer.block > 1
        self.indexer = build_indexer(config.indexer, context.width, context.width, config.position, self.head_dim)
        self.dropout = Dropout(config.dropout)
        self._build_convolutions(
            config.short_convolution, {"q": self.heads * self.head_dim, "k": kv_width, "v": value_width}
        )

    def _build_convolutions(self, config: ShortConvolutionConfig | None, widths: Mapping[str, int]) -> None:
        """Build the convolutions of q, k and v; the layer itself convolves the input."""
        named: tuple[str, ...] = () if config is None else config.of
        channels = {name: width for name, width in widths.items() if name in named}
        self.convolutions = build_convolutions(config, channels)
        if self.convolutions is not None:
            self.beyond_window = self._beyond_window(self.convolutions)

    def _beyond_window(self, convolutions: ShortConvolutions) -> int:
        earlier, window = convolutions.kernel - 1, self.window
        scores_matter = window != 1 or not self.causal or self.sink is not None  # of one key, the weight is 1
        if "v" in convolutions or ("k" in convolutions and scores_matter):
            return earlier
        if window is None or not scores_matter:
            return 0
        return max(0, earlier - (window - 1 if self.causal else window))

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Sinks are normal, λ₁ and λ₂ are 0.5. The projections initialize themselves."""
        if self.sink is not None:
            fill_normal(self.sink, std, draws("sink"))
        if self.value_mix is not None:
            nn.init.constant_(self.value_mix, 0.5)

    def _qk_norm(self, norm: NormConfig, heads: int) -> nn.Module | None:
        if self.qk_norm is None:
            return None
        if self.qk_norm == "projection":
            return norm.build(heads * self.head_dim)
        return norm.build(self.head_dim, heads if self.qk_norm == "per_head" else None)

    @property
    def kv_fields(self) -> Mapping[str, Any]:
        """The shapes of keys and values, their norm and their rotation."""
        names = ("kv_heads", "head_dim", "value_dim", "qk_norm", "norm_after_rotation", "qk_norm_weight")
        return {name: getattr(self, name) for name in names} | {"position": self.rotation}

    @property
    def logit_rows(self) -> Sequence[LogitRows] | str:
        """q and k of each head equally; q alone if its keys also serve other heads, a later layer or the values."""
        if self.qk_norm is not None:
            return f"has norms of q and k (qk_norm {self.qk_norm}), which undo a factor of their weights"
        if self.qkv_clip is not None:
            return f"bounds q and k as they are projected (qkv_clip {self.qkv_clip:g}), so logits do not follow weights"
        convolutions = self.convolutions
        if convolutions is not None and convolutions.has_activation and ("q" in convolutions or "k" in convolutions):
            return "has an activation after its convolution of q or k, so logits do not follow weights"
        has_own = self.k is not None and self.v is not None and self.kv_heads == self.heads
        if self.k is None or not has_own or self.kv_target is not None:
            return [LogitRows(self.q, [(self.head_dim, 1.0)])]
        return [LogitRows(self.q, [(self.head_dim, 0.5)]), LogitRows(self.k, [(self.head_dim, 0.5)])]

    @property
    def rings(self) -> tuple[int | None, ...]:
        """The window, and what an indexer keeps."""
        return (self.window, *(() if self.indexer is None else self.indexer.rings))

    @property
    def value_fields(self) -> Mapping[str, Any]:
        """The shape of the values."""
        return {"kv_heads": self.kv_heads, "value_dim": self.value_dim}

    def init_state(self, spec: StateSpec) -> KVCache | IndexedCache | ForgettingCache | ConvolvedState | None:
        """An empty cache for every token, or a ring buffer of `window` tokens and `rollback` more.

        With an indexer also its keys, with `forget` the logs of the gates, with short convolutions their last inputs.
        """
        cache: KVCache | IndexedCache | ForgettingCache | None = None
        if not self.reads_kv:
            shape = (spec.batch, self.kv_heads, self.head_dim, self.value_dim)
            max_cached = None if self.window is None else self.window + spec.rollback
            cache = KVCache.empty(shape, max_cached, spec)
            if self.indexer is not None:
                cache = self.indexer.with_cache(cache, max_cached, spec)
            if self.forget is not None:
                wide = replace(spec, dtype=torch.promote_types(spec.dtype, torch.float32))
                cache = ForgettingCache(cache, KVCache.empty((spec.batch, self.heads, 1, 0), max_cached, wide))
        return cache if self.convolutions is None else self.convolutions.init_state(spec, cache)

    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        projections = (self.q, *(each for each in (self.k, self.v) if each is not None))
        q, *projected = fused_projections(x, *projections)
        if self.qkv_clip is not None:
            q, *projected = (each.clamp(-self.qkv_clip, self.qkv_clip) for each in (q, *projected))
        unconvolved_keys = projected[:1]
        if self.convolutions is not None:
            inputs = dict(zip("qkv", (q, *projected), strict=False))  # only q with shared_kv
            (q, *projected), state = self.convolutions(inputs, layout, state)
        q = self._heads(q, self.q_norm, self.heads, layout)
        if self.temperature_beta is not None:
            q = q * self._temperatures(layout, q.dtype)
        own = None
        if projected:
            k = self._heads(projected[0], self.k_norm, self.kv_heads, layout)
            (values,) = unconvolved_keys if self.v is None else projected[1:]
            v = split_heads(values, self.kv_heads)
            v = v if self.value_eps is None else rms_norm(v, None, self.value_eps)
            v = v if self.value_multiplier is None else v * self.value_multiplier
            if self.value_embedding is not None:
                v = self.value_embedding(x, v, layout, self.table_source, self.table_target)
            own = k, v
        index = None if self.indexer is None else self.indexer(x, x, layout)
        cache: Any = state.own if isinstance(state, ConvolvedState) else state
        y, v, cache = self._attend(q, own, index, self._token_bias(x, layout), layout, cache)
        state = replace(state, own=cache) if isinstance(state, ConvolvedState) else cache
        y = merge_heads(without_own_values(y, v) if self.exclusive else y)
        if self.gate is not None:
            gates = self.gate(x)
            is_sigmoid = self.gate_activation == "sigmoid"
            gates = gates.sigmoid() if is_sigmoid else functional.softplus(at_least_float32(gates)).to(gates.dtype)
            gates = gates.unflatten(-1, (self.heads, -1))
            y = (y.unflatten(-1, (self.heads, -1)) * gates).flatten(-2)
        return self.out(y), state

    def _token_bias(self, x: Tensor, layout: Layout) -> TokenBias | None:
        """What the tokens x [B, T, width] of the call determine of the scores."""
        forget = relative = None
        if self.forget is not None:
            forget = functional.logsigmoid(at_least_float32(self.forget(x))).transpose(1, 2)
        if self.relative is not None and self.relative_logits is not None:
            r = split_heads(self.relative(x), self.heads)
            relative = self.relative_logits(
                r if self.temperature_beta is None else r * self._temperatures(layout, r.dtype)
            )
        return None if forget is None and relative is None else TokenBias(forget, relative)

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        index: IndexQueries | None,
        bias: TokenBias | None,
        layout: Layout,
        state: KVCache | IndexedCache | ForgettingCache | None,
    ) -> tuple[Tensor, Tensor, KVCache | IndexedCache | ForgettingCache | None]:
        """The output of each head, the values of the call's tokens, and the new state."""
        handed_over, log_forget = layout.handed_over, None
        if isinstance(state, ForgettingCache):
            assert bias is not None
            assert bias.log_forget is not None
            logs = bias.log_forget[..., None]
            logs, _, _, log_forget = state.log_forget.extend(logs, logs[..., :0], layout, self.window)
            bias, state = bias._replace(log_forget=logs[..., 0], ordered=not log_forget.ring), state.kv
        if own is None:
            assert handed_over is not None
            assert self.kv_source is not None
            k, v, mask, values = handed_over.by_layer[self.kv_source]
        else:
            k, v = own[0], self._mixed_values(own[1], handed_over)
            values = v
            if state is None:
                mask = layout.attention_mask(self.window, self.causal)
            elif isinstance(state, IndexedCache):
                assert self.indexer is not None
                assert index is not None
                k, v, mask, cache = state.kv.extend(k, v, layout, self.window)
                index, index_cache = self.indexer.extend(index, state.index, layout, self.window)
                state = IndexedCache(cache, index_cache)
            else:
                k, v, mask, state = state.extend(k, v, layout, self.window)
            if self.chunked and self.window is not None:
                mask = layout.in_chunks(mask, self.window)
            if self.kv_target is not None and handed_over is not None:
                handed_over.by_layer[self.kv_target] = SharedKeys(k, v, mask, values)
        dropout = self.dropout if self.dropout.active else None
        score_bias = self.call_bias(self.score_bias, layout, q.dtype)
        modifiers = ScoreModifiers(self.softcap, self.sink, score_bias, bias)
        if self.indexer is not None:
            mask = self.indexer.select(index, lambda: (q, k), mask, layout, self.scale, modifiers)
        record_largest_logits(self, lambda: (q, k), mask, self.scale)
        attend = attention if layout.attention_backend is None else layout.attention_backend(self)
        if log_forget is not None:
            assert isinstance(state, KVCache | IndexedCache)
            state = ForgettingCache(state, log_forget)
        return attend(q, k, v, mask, self.scale, dropout, modifiers), values, state

    def _mixed_values(self, v: Tensor, handed_over: HandedOver | None) -> Tensor:
        """λ₁ v + λ₂ v₁ of the call's tokens [B, G, T, d_v]; v without `value_residual`."""
        if self.value_source is None:
            return v
        assert handed_over is not None
        factors = self.value_factors if self.value_mix is None else self.value_mix.to(v.dtype).unbind()
        assert factors is not None
        mixed: Tensor = factors[0] * v + factors[1] * handed_over.by_layer[self.value_source].own_values
        return mixed

    @layout_dependent
    def _temperatures(self, layout: Layout, dtype: torch.dtype) -> Tensor:
        """The factor of each query [B, 1, T, 1]."""
        assert self.temperature_beta is not None
        assert self.temperature_length is not None
        return query_temperature(layout, self.temperature_length, self.temperature_beta, dtype, self.temperature_growth)

    def _heads(self, x: Tensor, norm: nn.Module | None, heads: int, layout: Layout) -> Tensor:
        """Projection [B, T, heads · d] -> normalized and rotated heads [B, heads, T, d]."""
        before, after = (None, norm) if self.norm_after_rotation else (norm, None)
        if before is not None and self.qk_norm == "projection":
            x = before(x)
        x = x.unflatten(-1, (heads, self.head_dim))
        if before is not None and self.qk_norm != "projection":
            x = before(x)
        x = x.transpose(1, 2)
        x = x if self.position is None else self.position(x, layout)
        if after is None:
            return x
        x = x.transpose(1, 2)
        x = after(x.flatten(-2)).view_as(x) if self.qk_norm == "projection" else after(x)
        return x.transpose(1, 2)
