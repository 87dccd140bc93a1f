"""The indexer of sparse attention (DeepSeek Sparse Attention, DeepSeek-V3.2 2025): which keys each query attends to.

    q_h = R(W_q,h x),  k = R(LayerNorm(W_k x)),  w = W_w x / sqrt(heads · head_dim)
    score(i, j) = Σ_h w_h(i) · relu(q_h(i) · k(j));   the `top_k` visible keys of the highest score are attended to

R rotates as many of the first dims as the `position` of the mixer does. In latent attention q is projected from the
latent of queries, if there is one.

`norm` is the norm of k in place of LayerNorm; with `query_norm` it norms each q_h, too (MiniMax M3).

With `block`, `top_k` blocks are selected, by the highest score of their visible keys (MiniMax M3, 2026) or the mean
(MoBA, Lu et al. 2025: q · mean(k)). Blocks count a document's own tokens. With `per_head` each head of the indexer
selects by q_h · k for its share of the attention's heads (MiniMax M3: for a key head). Without `heads` each head of the
attention selects by its own queries and keys (MoBA).

All pairs are computed and then masked: no time is saved, but FLOPs count only the pairs that are attended to, `top_k`
full blocks at most. The selection has no gradient. In training the indexer learns from its own loss,
KL(p ‖ softmax(scores)) over all visible keys, or the selected ones (DeepSeek's sparse stage), where p are the
attention's weights over these keys, summed over heads and divided by their sum; with `per_head` it is the mean over
heads, with scores / sqrt(head_dim). The indexer reads x, the queries and the keys detached: it gets gradients from this
loss only, and passes none on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from heddle.config import Config, DesignError, PositiveFloat, Width, build_under, parse_config, refuse
from heddle.numerics.attention.indexer import BlockScore, Choice, index_loss, select_keys
from heddle.numerics.attention.mask import NO_MODIFIERS, AttentionMask, ScoreModifiers
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, split_heads
from heddle.parts.modules.linear import Linear
from heddle.parts.modules.router_statistics import IndexLoss, record_index_loss
from heddle.parts.norms import NormConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.positions import MixerPositionConfig, RotationConfig
from heddle.parts.states import KVCache, MixerState, StateSpec

KEY_NORM = {"kind": "layer", "eps": 1e-6}  # DeepSeek's, not the model's


class IndexerConfig(Config):
    """Fields of `indexer`, in `attention` and `latent_attention`."""

    later_fields = ("block", "block_score", "local", "per_head", "loss_keys", "norm", "query_norm")

    top_k: Width  # keys, or blocks, that each query attends to
    heads: Width | None = None  # default: the attention's own queries and keys
    head_dim: Width | None = None  # with heads
    block: Width = 1  # positions of a document that are selected together
    block_score: BlockScore = "highest"  # of its visible keys' scores
    local: Annotated[int, Field(ge=0, le=2**20)] = 0  # blocks up to the query's own, always selected
    per_head: bool = False  # each head selects for its share of the attention's heads
    rope_layout: Literal["half", "interleaved"] | None = None  # of rotated pairs; default: half, as in DeepSeek-V3.2
    norm: NormConfig | None = None  # of its keys; default: LayerNorm with an epsilon of 1e-6
    query_norm: bool = False  # whether its queries have a norm of this kind, too
    loss: PositiveFloat = 1.0  # coefficient of its loss in training
    loss_keys: Literal["all", "selected"] = "all"  # that the loss is over, of the visible ones

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.heads is None) != (self.head_dim is None):
            refuse(
                "heads" if self.heads is None else "head_dim", "is missing; give both heads and head_dim, or neither"
            )
        if self.heads is None:
            for name in ("per_head", "rope_layout", "norm", "query_norm", "loss", "loss_keys"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, "is about the indexer's own projections; give heads and head_dim, or leave it out")
        if self.block == 1 and self.block_score != "highest":
            refuse("block_score", "does nothing for single keys; give block, or leave it out")
        return self

    def check_attention(self, heads: int, window: int | None = None, causal: bool = True) -> None:
        """Raises DesignError if it selects all keys of a window, or has too many local blocks or heads.

        heads: of the attention.
        """
        local = self.local if causal else max(0, 2 * self.local - 1)
        if local >= self.top_k:
            reason = f"{self.local} leaves none of the {self.top_k} to select; lower it, or raise top_k"
            raise DesignError("local", reason)
        if self.per_head and self.heads is not None and heads % self.heads:
            reason = f"{self.heads} does not divide the attention's {heads} heads, as per_head needs; choose a divisor"
            raise DesignError("heads", reason)
        self._check_window(window, causal)

    def _check_window(self, window: int | None, causal: bool) -> None:
        seen = None if window is None else window if causal else 2 * window + 1
        blocks = None if seen is None else (seen + self.block - 2) // self.block + 1  # that it can lie in
        if blocks is not None and self.top_k >= blocks:
            what = "keys" if self.block == 1 else "blocks"
            raise DesignError("top_k", f"{self.top_k} selects all of the {blocks} {what} in the window; lower it")

    def rotation(self, position: MixerPositionConfig | None, dims: int) -> RotationConfig | None:
        """The indexer's rotation in a mixer that rotates `dims` dims by `position`.

        Raises DesignError for a `rope_layout` without a rotation that has a layout.
        """
        rotation = position.resolved(dims) if isinstance(position, RotationConfig) else None
        if rotation is not None and "layout" in type(rotation).model_fields:
            return rotation.replace(layout=self.rope_layout or "half")
        if self.rope_layout is not None:
            raise DesignError("rope_layout", "does nothing without a position of kind rope; leave it out")
        return rotation


def indexer_field(mixer: Config | None) -> str:
    """The path of the first indexer in a mixer, from the mixer; empty if it has none."""
    for name in () if mixer is None else type(mixer).model_fields:
        value = getattr(mixer, name)
        if isinstance(value, IndexerConfig):
            return name
        if isinstance(value, MixerConfig) and (inner := indexer_field(value)):
            return f"{name}.{inner}"
    return ""


class IndexQueries(NamedTuple):
    """What the indexer computes in a call: q [B, H, T, d], k [B, G, T, d], and the weights of the heads [B, H, T].

    Without weights each head selects on its own.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class IndexedCache(MixerState):
    """The cache of a mixer, and the keys of its indexer [B, 1, slots, head_dim] for the same tokens."""

    kv: KVCache
    index: KVCache

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Whether the mixer's cache can."""
        return self.kv.can_roll_back(tokens, table)

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> "IndexedCache":
        """Both caches without the removed tokens."""
        return replace(self, kv=self.kv.rolled_back(table, freed), index=self.index.rolled_back(table, freed))


class KeySelector(nn.Module):
    """Selects keys by the scores of an indexer. It has no parameters."""

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice

    def forward(self, index: IndexQueries, mask: AttentionMask) -> AttentionMask:
        """The mask that shows only the selected keys."""
        return select_keys(*index, mask, self.choice)


class Indexer(nn.Module):
    """The module. width: of x. query_width: of the input that its queries are projected from.

    selections: how many equal shares of the attention's heads have a selection of their own; None: each head.
    """

    def __init__(
        self, config: IndexerConfig, width: int, query_width: int, position: MixerPositionConfig | None, dims: int
    ) -> None:
        super().__init__()
        self.selector = KeySelector(Choice(config.top_k, config.block, config.block_score, config.local))
        self.heads, self.head_dim, self.loss, self.loss_keys = (
            config.heads, config.head_dim, config.loss, config.loss_keys,
        )  # fmt: skip
        self.selections = 1 if config.heads is not None and not config.per_head else config.heads
        if config.heads is None or config.head_dim is None:
            return
        self.q = Linear(query_width, config.heads * config.head_dim)
        self.k = Linear(width, config.head_dim)
        norm = config.norm or parse_config(NormConfig, KEY_NORM)  # type: ignore[type-abstract]
        self.k_norm: nn.Module = norm.build(config.head_dim)
        self.q_norm: nn.Module | None = norm.build(config.head_dim) if config.query_norm else None
        self.weights = None if config.per_head else Linear(width, config.heads)
        rotation = config.rotation(position, dims)
        self.position = None if rotation is None else build_under("head_dim", rotation.build, config.head_dim)
        self.scale = ((1 if config.per_head else config.heads) * config.head_dim) ** -0.5

    def with_cache(self, kv: KVCache, max_cached: int | None, spec: StateSpec) -> KVCache | IndexedCache:
        """The mixer's empty cache, with one for the indexer's keys if it has its own, in as many slots."""
        if self.head_dim is None:
            return kv
        return IndexedCache(kv, KVCache.empty((spec.batch, 1, self.head_dim, 0), max_cached, spec))

    def forward(self, x: Tensor, queries: Tensor, layout: Layout) -> IndexQueries | None:
        """x [B, T, width], queries [B, T, query_width]; no gradient reaches either. None without projections."""
        if self.heads is None:
            return None
        x, queries = x.detach(), queries.detach()
        q, k = split_heads(self.q(queries), self.heads), self.k_norm(self.k(x))[:, None]
        q = q if self.q_norm is None else self.q_norm(q)
        if self.position is not None:
            q, k = self.position(q, layout), self.position(k, layout)
        if self.weights is None:
            return IndexQueries(q * self.scale, k, None)
        return IndexQueries(q, k, self.weights(x).transpose(1, 2) * self.scale)

    def extend(
        self, index: IndexQueries, cache: KVCache, layout: Layout, window: int | None
    ) -> tuple[IndexQueries, KVCache]:
        """The indexer's keys of all tokens, in the order of the mixer's cache, and the new cache."""
        keys, _, _, cache = cache.extend(index.k, index.k[..., :0], layout, window)
        return index._replace(k=keys), cache

    def select(
        self,
        index: IndexQueries | None,
        attended: Callable[[], tuple[Tensor, Tensor]],
        mask: AttentionMask,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> AttentionMask:
        """The mask that shows only the selected keys. attended: the attention's q and k.

        In training, records the loss of the call, if a recorder asks for it.
        """
        if index is None:
            q, k = attended()
            return self._selected(IndexQueries(q.detach(), k.detach(), None), mask)
        selected = self._selected(index, mask)
        if self.training:
            shown = selected if self.loss_keys == "selected" else mask

            def loss() -> IndexLoss:
                value = self.loss * index_loss(index, attended(), shown, scale, modifiers)
                return IndexLoss(self, value, (mask.q_positions >= 0).sum())

            record_index_loss(loss)
        return selected

    def _selected(self, index: IndexQueries, mask: AttentionMask) -> AttentionMask:
        selected: AttentionMask = self.selector(index, mask)
        return selected


def build_indexer(config: IndexerConfig | None, *arguments: Any) -> Indexer | None:
    """The module, or None. Raises DesignError with a path from the mixer."""
    return None if config is None else build_under("indexer", Indexer, config, *arguments)
