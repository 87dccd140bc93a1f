"""Multi-head latent attention (DeepSeek-V2 §2.1, eqs. 9–19): one latent per token holds keys and values of all heads.

    c = N(W_dkv x),   k_rope = R(W_kr x),   k_h = [W_uk,h c ; k_rope],   v_h = W_uv,h c
    q_h = [q_nope ; R(q_rope)] of W_q x, or of W_uq N(W_dq x);   softmax(q_h k_hᵀ · scale + mask) v_h

The cache holds c and the rotated k_rope, kv_rank + rope_dim elements per token. R rotates only rope_dim dims: if c were
rotated, the rotation would stand between W_uk and the queries that absorb it.

With `gate` the output of each head is multiplied by sigmoid(W_g x), one gate per head (Ling 3.0, 2026) or per channel.
With `query_norm: beside` queries are projected from the latent and its norm, [N(c) ; c], and with `gate_input: queries`
gates from the same (A.X K2, 2026). `sink` adds one learned logit per head to the softmax's denominator (Hy V4, 2026).

With `indexer` each query attends to `top_k` keys or blocks, which an indexer selects (DeepSeek Sparse Attention, 2025;
see `IndexerConfig`). With `shared_index` a layer has no indexer, and attends to the keys that the last earlier layer
with one for all its heads selected (GLM-5.2, 2026).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, PositiveFloat, Width, build_under, parse_config, refuse
from heddle.numerics.attention.latent import expand_latents, latent_attention
from heddle.numerics.attention.mask import ScoreModifiers
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import LogitRows, Mixer, MixerConfig, merge_heads, split_heads
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.indexer import INDEX_PROJECTIONS, IndexedCache, IndexerConfig, IndexQueries, build_indexer
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections, weight_matrix
from heddle.parts.modules.router_statistics import record_largest_logits
from heddle.parts.norms import NormConfig
from heddle.parts.positions import RotationConfig
from heddle.parts.states import KVCache, StateSpec

LATENT_EPS = 1e-6  # DeepSeek's, not the model's


class LatentAttentionConfig(MixerConfig):
    """Fields of `latent_attention`. None or false: off, or the default named in the comment."""

    aliases = ("mla",)
    later_fields = ("indexer", "shared_index", "gate", "norm_eps", "sink", "gate_input")
    absent_fields = (
        ("value_embedding", "adds rows to values, but here only a latent of them is cached; leave it out"),
    )
    heads: Width
    kv_rank: Width  # width of the latent of keys and values
    query_rank: Width | None = None  # width of the latent of queries; default: no latent, queries are projected from x
    nope_dim: Width  # dims of each key and query head that are not rotated
    rope_dim: Width | None = None  # rotated dims, whose keys all heads share; default: none
    value_dim: Width | None = None  # default: nope_dim
    kv_norm: Literal["rms", "none"] | None = None  # default: rms
    query_norm: Literal["rms", "none", "beside"] | None = None  # default: rms
    norm_eps: PositiveFloat | None = None  # of both norms; default: 1e-6
    scale: PositiveFloat | None = None  # default: 1 / sqrt(nope_dim + rope_dim); YaRN multiplies either
    bias: bool = False  # of the latents, the shared keys and out (DeepSeek)
    query_bias: bool | None = None  # of the projection to query heads, from x or from their latent; default: none
    gate: Literal["head", "channel"] | None = None  # of the output: one for each head, or for each of its channels
    gate_input: Literal["input", "queries"] = "input"  # what gates are projected from: x, or what queries are
    sink: bool = False  # one learned logit per head, without a value
    indexer: IndexerConfig | None = None  # selects the keys that each query attends to
    shared_index: bool = False  # attends to the keys that the last earlier layer with an indexer selected
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.position is not None and self.rope_dim is None:
            refuse("rope_dim", "is missing, so position has no dims to rotate; give rope_dim, or leave position out")
        if self.position is not None and self.rope_dim is not None and self.rope_dim % 2:
            refuse("rope_dim", f"{self.rope_dim} is odd, but dims are rotated in pairs; give an even number")
        if self.shared_index and self.indexer is not None:
            refuse("shared_index", "reads the selection of another layer, but the indexer selects its own; keep one")
        if self.query_norm is not None and self.query_rank is None:
            refuse(
                "query_norm", "normalizes the latent of queries, but there is none; give query_rank, or leave it out"
            )
        if self.gate_input == "queries" and (self.gate is None or self.query_rank is None):
            missing = "gate" if self.gate is None else "query_rank"
            refuse("gate_input", f"queries needs gates and a latent of queries; give {missing}, or leave it out")
        queries = None if self.query_rank is None else self.query_norm or "rms"
        if self.norm_eps is not None and self.kv_norm == "none" and queries in (None, "none"):
            refuse("norm_eps", "is for the norms of latents, but there are none; leave it out")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Widths, norms, scale and rotary dims written out."""
        head_dim, rope_dim = self.nope_dim + (self.rope_dim or 0), self.rope_dim
        return self.replace(
            value_dim=self.value_dim or self.nope_dim,
            kv_norm=self.kv_norm or "rms",
            query_norm=None if self.query_rank is None else self.query_norm or "rms",
            norm_eps=None if self.norm_eps == LATENT_EPS else self.norm_eps,
            scale=self.scale or head_dim**-0.5,
            query_bias=self.query_bias or None,
            position=self.position if self.position is None or rope_dim is None else self.position.resolved(rope_dim),
        )

    @property
    def reads_kv(self) -> bool:
        """Whether `shared_index` is set."""
        return self.shared_index

    @property
    def kv_kind(self) -> Any:
        """The kind, of layers that have an indexer for all heads or read a selection."""
        has_one = self.indexer is not None and self.indexer.heads is not None and not self.indexer.per_head
        return self.kind if self.shared_index or has_one else None

    @property
    def kv_read(self) -> tuple[str, str]:
        """The selection of keys."""
        return "shared_index", "an indexer for all heads"

    def head_shape(self, width: int) -> tuple[int, int]:
        """Heads, and the width of their values."""
        return self.heads, self.value_dim or self.nope_dim

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """A latent of four heads' width, as DeepSeek-V2's, at most half the model's; half as many rotated dims."""
        heads, dim = previous.head_shape(width) if isinstance(previous, MixerConfig) else (0, 0)
        if not isinstance(previous, MixerConfig) or not heads:
            return {}
        rotates = isinstance(getattr(previous.template, "position", None), RotationConfig)
        rope_dim = {"rope_dim": max(2, dim // 8 * 4)} if rotates else {}  # multiples of 4, as 2D rotations need
        return {"kv_rank": max(1, min(4 * dim, width // 2)), "nope_dim": dim, **rope_dim}

    def build(self, context: BuildContext) -> "LatentAttention":
        """Build the module. Raises DesignError if a latent is wider than the model."""
        for name, rank in (("kv_rank", self.kv_rank), ("query_rank", self.query_rank)):
            if rank is not None and rank > context.width:
                raise DesignError(name, f"{rank} is larger than width = {context.width}; lower it")
        if self.indexer is not None:
            build_under("indexer", self.indexer.check_attention, self.heads)
        return LatentAttention(self, context.width)


class LatentAttention(SelfInitialized, Mixer):
    """The module. Its state is a `KVCache` with keys [B, 1, slots, kv_rank + rope_dim] and no values.

    With `indexer` it is an `IndexedCache`, which has the indexer's keys as well.
    """

    fast_graph = True

    def __init__(self, config: LatentAttentionConfig, width: int) -> None:
        super().__init__()
        self.window, self.causal = None, True
        self.absolute_positions = config.indexer is not None and config.indexer.block > 1
        self.heads, self.nope_dim, self.rope_dim = config.heads, config.nope_dim, config.rope_dim or 0
        head_dim, value_dim = self.nope_dim + self.rope_dim, config.value_dim or self.nope_dim
        bias, rank, query_rank = config.bias, config.kv_rank, config.query_rank
        self.state_note = f"one latent of {rank} for all heads"
        query_bias = bool(config.query_bias)
        self.q = Linear(width, self.heads * head_dim, bias=query_bias) if query_rank is None else None
        self.q_down = None if query_rank is None else Linear(width, query_rank, bias=bias)
        self.q_norm = None if query_rank is None else _latent_norm(query_rank, config.query_norm, config.norm_eps)
        self.beside = config.query_norm == "beside"
        read = (query_rank or width) * (2 if self.beside else 1)
        self.q_up = None if query_rank is None else Linear(read, self.heads * head_dim, bias=query_bias)
        self.kv_down = Linear(width, rank, bias=bias)
        self.kv_norm = _latent_norm(rank, config.kv_norm, config.norm_eps)
        self.k_rope = Linear(width, self.rope_dim, bias=bias) if self.rope_dim else None
        self.k_up = Linear(rank, self.heads * self.nope_dim)
        self.v_up = Linear(rank, self.heads * value_dim, value_projection=True)
        gate_widths = {"head": self.heads, "channel": self.heads * value_dim}
        self.gates_queries = config.gate_input == "queries"
        gate_input = read if self.gates_queries else width
        self.gate = None if config.gate is None else Linear(gate_input, gate_widths[config.gate])
        self.sink = nn.Parameter(torch.empty(self.heads)) if config.sink else None
        self.out = Linear(self.heads * value_dim, width, bias=bias, output_projection=True)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.rope_dim)
        self.scale = (config.scale or head_dim**-0.5) * (1.0 if self.position is None else self.position.score_scale)
        self.indexer = build_indexer(config.indexer, width, query_rank or width, position, self.rope_dim)
        of_index = INDEX_PROJECTIONS if query_rank is None else INDEX_PROJECTIONS[1:]  # q reads the latent
        gates = () if self.gates_queries else ("gate",)
        self.input_projections = ("q", "q_down", "kv_down", "k_rope", *gates, *of_index)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Normal sinks. The projections initialize themselves."""
        if self.sink is not None:
            fill_normal(self.sink, std, draws("sink"))

    @property
    def logit_rows(self) -> Sequence[LogitRows]:
        """As in Kimi K2: q and k equally in dims without rotation; q alone in rotated ones, where heads share a key."""
        queries = self.q if self.q_up is None else self.q_up
        assert queries is not None
        query_parts = [(self.nope_dim, 0.5), (self.rope_dim, 1.0)]
        return [LogitRows(queries, query_parts), LogitRows(self.k_up, [(self.nope_dim, 0.5)])]

    @property
    def rings(self) -> tuple[int | None, ...]:
        """All tokens, and what an indexer keeps."""
        return (None, *(() if self.indexer is None else self.indexer.rings))

    def init_state(self, spec: StateSpec) -> KVCache | IndexedCache:
        """A cache of latents as keys. Values are the first dims of the latents, so their width in the cache is 0."""
        shape = (spec.batch, 1, self.kv_down.weight.shape[0] + self.rope_dim, 0)
        cache = KVCache.empty(shape, None, spec)
        return cache if self.indexer is None else self.indexer.with_cache(cache, None, spec)

    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        queries, latents, *rope_keys = fused_projections(x, *self._projections)
        raw, queries = queries, queries if self.q_norm is None else self.q_norm(queries)
        index = None if self.indexer is None else self.indexer(x, x if self.q_up is None else queries, layout)
        queries = torch.cat((queries, raw), dim=-1) if self.beside else queries
        gated = queries if self.gates_queries else x
        gates = None if self.gate is None else at_least_float32(self.gate(gated)).sigmoid()
        queries = queries if self.q_up is None else self.q_up(queries)
        q_nope, q_rope = split_heads(queries, self.heads).split((self.nope_dim, self.rope_dim), dim=-1)
        latents = latents[:, None]
        if self.kv_norm is not None:
            latents = self.kv_norm(latents)
        if self.k_rope is not None:
            k_rope = rope_keys[0][:, None]
            if self.position is not None:
                q_rope, k_rope = self.position(q_rope, layout), self.position(k_rope, layout)
            latents = torch.cat((latents, k_rope), dim=-1)
        y, state = self._attend((q_nope, q_rope), latents, index, layout, state)
        y = merge_heads(y)
        if gates is not None:
            y = (y.unflatten(-1, (self.heads, -1)) * gates.unflatten(-1, (self.heads, -1))).flatten(-2).to(y.dtype)
        return self.out(y), state

    @property
    def _projections(self) -> list[Linear]:
        """The projections of x: to queries or their latent, to the latent of keys and values, to the rotated keys."""
        projections = (self.q if self.q_down is None else self.q_down, self.kv_down, self.k_rope)
        return [projection for projection in projections if projection is not None]

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self,
        queries: tuple[Tensor, Tensor],
        latents: Tensor,
        index: IndexQueries | None,
        layout: Layout,
        state: KVCache | IndexedCache | None,
    ) -> tuple[Tensor, KVCache | IndexedCache | None]:
        """queries: the part that is not rotated, and the rotated one."""
        if state is None:
            mask = layout.attention_mask(None, True)
        elif isinstance(state, IndexedCache):
            assert self.indexer is not None
            assert index is not None
            latents, _, mask, cache = state.kv.extend(latents, latents[..., :0], layout, None)
            index, index_cache = self.indexer.extend(index, state.index, layout, None)
            state = IndexedCache(cache, index_cache)
        else:
            latents, _, mask, state = state.extend(latents, latents[..., :0], layout, None)
        up = weight_matrix(self.k_up), weight_matrix(self.v_up)
        if self.indexer is not None:
            attended, modifiers = partial(_attended, queries, latents, up), ScoreModifiers(sink=self.sink)
            mask = self.indexer.select(index, attended, mask, layout, self.scale, modifiers)
            if self.kv_target is not None and layout.handed_over is not None:
                layout.handed_over.by_layer[self.kv_target] = mask
        elif self.kv_source is not None:
            assert layout.handed_over is not None
            mask = layout.handed_over.by_layer[self.kv_source]
        record_largest_logits(self, partial(_attended, queries, latents, up), mask, self.scale)
        return latent_attention(*queries, latents, *up, mask, self.scale, self.sink), state


@torch.no_grad()
def _attended(queries: tuple[Tensor, Tensor], latents: Tensor, up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and expanded keys of all heads."""
    return torch.cat(queries, dim=-1), expand_latents(latents, up, queries[0].shape[1])[0]


def _latent_norm(rank: int, kind: str | None, eps: float | None) -> SelfInitialized | None:
    if kind == "none":
        return None
    fields = {"kind": "rms", "eps": eps or LATENT_EPS}
    config: NormConfig = parse_config(NormConfig, fields)  # type: ignore[type-abstract]
    return config.build(rank)
