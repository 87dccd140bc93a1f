"""The indexer of sparse attention (DeepSeek Sparse Attention, DeepSeek-V3.2 2025): which keys each query attends to.

    q_h = R(W_q,h x),  k = R(LayerNorm(W_k x)),  w = W_w x / sqrt(heads · head_dim)
    score(i, j) = Σ_h w_h(i) · relu(q_h(i) · k(j));   the `top_k` visible keys of the highest score are attended to

R rotates as many of the first dims as the `position` of the mixer does. In latent attention q is projected from the
latent of queries, if there is one.

`norm` is the norm of k in place of LayerNorm; with `query_norm` it norms each q_h, too (MiniMax M3).

With `block`, `top_k` blocks are selected, by the highest score of their visible keys (MiniMax M3, 2026) or the mean
(MoBA, Lu et al. 2025: q · mean(k)). Blocks count a document's own tokens. With `per_head` each head of the indexer
selects by q_h · k for its share of the attention's heads (MiniMax M3: for a key head). Without `heads` each head of the
attention selects by its own queries and keys (MoBA); with `block_score: attention` the heads of a key head together, by
their mean weights in a softmax over the means of whole blocks (the selection of Native Sparse Attention, arXiv
2502.11089, with means in the place of learned compressed keys, as in flash-linear-attention).

With `pool` a block has one key, and queries score only finished blocks; the keys of unfinished ones are always attended
to:

    mean: R(Norm(mean_j W_k x_j)) (Qwen4-Exp 2026)    gated: R(Σ_j softmax_j(W_g x_j + B_j) ⊙ Norm(W_k x_j)) (GLM-5.3)

over the tokens j of the block, with R at the position of its first one; B is a learned vector for each place in it. The
state has the pooled keys, and W_k x of the last tokens. With `head_weights: false` w is 1 / sqrt(head_dim) (Qwen4-Exp).

All pairs are computed and then masked: no time is saved, but FLOPs count only the pairs that are attended to, `top_k`
full blocks at most. The selection has no gradient. In training the indexer learns from its own loss,
KL(p ‖ softmax(scores)) over all visible keys, or the selected ones (DeepSeek's sparse stage), where p are the
attention's weights over these keys, summed over heads and divided by their sum; with `per_head` it is the mean over
heads, with scores / sqrt(head_dim). With `pool` it is over finished blocks, with the sums of their keys' weights. The
indexer reads x, the queries and the keys detached: it gets gradients from this loss only, and passes none on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from heddle.config import Config, DesignError, PositiveFloat, Width, build_under, parse_config, refuse
from heddle.numerics.attention.indexer import BlockScore, Choice, KeyBlocks, index_loss, select_keys, show_blocks
from heddle.numerics.attention.mask import NO_MODIFIERS, AttentionMask, ScoreModifiers
from heddle.numerics.dispatch import counts_flops
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig, split_heads
from heddle.parts.modules.blocks import (
    BlockCache,
    CallBlocks,
    block_mask,
    block_tokens,
    call_blocks,
    empty_blocks,
    entry_pairs,
    extend_blocks,
    finished_blocks,
    tail_pairs,
)
from heddle.parts.modules.linear import Linear, SelfInitialized
from heddle.parts.modules.router_statistics import IndexLoss, record_index_loss
from heddle.parts.norms import NormConfig
from heddle.parts.position_table import PositionTable
from heddle.parts.positions import MixerPositionConfig, RotationConfig
from heddle.parts.states import KVCache, MixerState, StateSpec

INDEX_PROJECTIONS = ("indexer.q", "indexer.k", "indexer.weights", "indexer.pool_gates")  # names of those of x
KEY_NORM = {"kind": "layer", "eps": 1e-6}  # DeepSeek's, not the model's


class IndexerConfig(Config):
    """Fields of `indexer`, in `attention` and `latent_attention`."""

    later_fields = (
        *(
            "block",
            "block_score",
            "local",
            "first",
            "per_head",
            "loss_keys",
            "norm",
            "query_norm",
            "pool",
            "head_weights",
        ),
    )

    top_k: Width  # keys, or blocks, that each query attends to
    heads: Width | None = None  # default: the attention's own queries and keys
    head_dim: Width | None = None  # with heads
    block: Width = 1  # positions of a document that are selected together
    block_score: BlockScore = "highest"  # of its visible keys' scores
    local: Annotated[int, Field(ge=0, le=2**20)] = 0  # blocks up to the query's own, always selected
    first: Annotated[int, Field(ge=0, le=2**20)] = 0  # blocks from the document's position 0, always selected
    pool: Literal["mean", "gated"] | None = None  # one key for each finished block; others are always attended to
    per_head: bool = False  # each head selects for its share of the attention's heads
    rope_layout: Literal["half", "interleaved"] | None = None  # of rotated pairs; default: half, as in DeepSeek-V3.2
    norm: NormConfig | None = None  # of its keys; default: LayerNorm with an epsilon of 1e-6
    query_norm: bool = False  # whether its queries have a norm of this kind, too
    head_weights: bool = True  # the scores of the heads are weighted by a projection of x
    loss: PositiveFloat = 1.0  # coefficient of its loss in training
    loss_keys: Literal["all", "selected"] = "all"  # that the loss is over, of the visible ones

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.heads is None) != (self.head_dim is None):
            refuse(
                "heads" if self.heads is None else "head_dim", "is missing; give both heads and head_dim, or neither"
            )
        if self.heads is None:
            own = ("per_head", "rope_layout", "norm", "query_norm", "loss", "loss_keys", "pool", "head_weights")
            for name in own:
                if getattr(self, name) != type(self).model_fields[name].default:
                    refuse(name, "is about the indexer's own projections; give heads and head_dim, or leave it out")
        if self.block == 1 and self.block_score != "highest":
            refuse("block_score", "does nothing for single keys; give block, or leave it out")
        if self.pool is not None and self.block == 1:
            refuse("pool", "does nothing for single keys; give block, or leave it out")
        if self.block_score == "attention" and self.heads is not None:
            refuse("block_score", "attention uses the attention's own queries and keys; leave out heads and head_dim")
        for name in ("block_score", "local", "first") if self.pool is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                refuse(name, "needs several keys per block, but pool leaves one; leave one of them out")
        if self.per_head and not self.head_weights:
            refuse("head_weights", "does nothing with per_head, where each head selects on its own; leave it out")
        return self

    def check_attention(self, heads: int, window: int | None = None, causal: bool = True) -> None:
        """Raises DesignError if it selects all keys of a window, pools in one, or has too many local blocks or heads.

        heads: of the attention.
        """
        if self.pool is not None and (window is not None or not causal):
            what = "causal is false" if window is None else "a window hides parts of blocks"
            raise DesignError("pool", f"needs finished, whole blocks, but {what}; leave one of them out")
        local = self.local if causal else max(0, 2 * self.local - 1)
        if local + self.first >= self.top_k:
            name, value = ("local", self.local) if self.local else ("first", self.first)
            raise DesignError(name, f"{value} leaves none of the {self.top_k} to select; lower it, or raise top_k")
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

    Without weights each head selects on its own. Before keys are pooled, k is [B, T, parts, d]: W_k x, and W_g x.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None


@dataclass(frozen=True, eq=False)
class IndexedCache(MixerState):
    """The cache of a mixer, and the keys of its indexer [B, 1, slots, head_dim] for the same tokens, or its blocks."""

    kv: KVCache
    index: KVCache | BlockCache

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Whether both can."""
        return self.kv.can_roll_back(tokens, table) and self.index.can_roll_back(tokens, table)

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


class Indexer(SelfInitialized):
    """The module. width: of x. query_width: of the input that its queries are projected from.

    selections: how many equal shares of the attention's heads have a selection of their own; None: each head.
    """

    matrix_parameters = ()  # the pool's bias is a table

    def __init__(
        self, config: IndexerConfig, width: int, query_width: int, position: MixerPositionConfig | None, dims: int
    ) -> None:
        super().__init__()
        self.block, self.pool = config.block, config.pool
        of_keys = config.block, config.block_score, config.local, config.first
        self.selector = KeySelector(Choice(config.top_k, *(() if self.pool else of_keys)))
        self.heads, self.head_dim, self.loss, self.loss_keys = (
            config.heads, config.head_dim, config.loss, config.loss_keys,
        )  # fmt: skip
        self.selections = 1 if config.heads is not None and not config.per_head else config.heads
        is_gated = config.pool == "gated"
        self.pool_bias = nn.Parameter(torch.empty(config.block, config.head_dim or 0)) if is_gated else None
        if config.heads is None or config.head_dim is None:
            return
        self.q = Linear(query_width, config.heads * config.head_dim)
        self.k = Linear(width, config.head_dim)
        norm = config.norm or parse_config(NormConfig, KEY_NORM)  # type: ignore[type-abstract]
        self.k_norm: nn.Module = norm.build(config.head_dim)
        self.q_norm: nn.Module | None = norm.build(config.head_dim) if config.query_norm else None
        self.per_head, is_weighted = config.per_head, config.head_weights and not config.per_head
        self.weights = Linear(width, config.heads) if is_weighted else None
        self.pool_gates = Linear(width, config.head_dim) if is_gated else None
        rotation = config.rotation(position, dims)
        self.position = None if rotation is None else build_under("head_dim", rotation.build, config.head_dim)
        self.scale = ((config.heads if is_weighted else 1) * config.head_dim) ** -0.5
        turned = self.position
        if config.pool is not None and turned is not None and (not turned.invertible or turned.length_dependent):
            reason = "gives a block one position, but the mixer's position rotates by more"
            raise DesignError("pool", f"{reason}; use rope, without a scaling that depends on the length")

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """B of zeros: at first no place in a block is preferred."""
        if self.pool_bias is not None:
            nn.init.zeros_(self.pool_bias)

    @property
    def rings(self) -> tuple[int, ...]:
        """The tail of pooled keys."""
        return () if self.pool is None else (self.block - 1,)

    def with_cache(self, kv: KVCache, max_cached: int | None, spec: StateSpec) -> KVCache | IndexedCache:
        """The mixer's empty cache, with one for the indexer's keys if it has its own, in as many slots."""
        if self.head_dim is None:
            return kv
        if self.pool is not None:
            of_token = (1 if self.pool_gates is None else 2, self.head_dim)
            blocks = empty_blocks(spec, self.block, self.block - 1, self.head_dim, of_token)
            return IndexedCache(kv, BlockCache(*blocks, self.block))
        return IndexedCache(kv, KVCache.empty((spec.batch, 1, self.head_dim, 0), max_cached, spec))

    def forward(self, x: Tensor, queries: Tensor, layout: Layout) -> IndexQueries | None:
        """x [B, T, width], queries [B, T, query_width]; no gradient reaches either. None without projections."""
        if self.heads is None:
            return None
        x, queries = x.detach(), queries.detach()
        q, k = split_heads(self.q(queries), self.heads), self.k(x)
        q = q if self.q_norm is None else self.q_norm(q)
        q = q if self.position is None else self.position(q, layout)
        k = k if self.pool == "mean" else self.k_norm(k)
        if self.pool is not None:
            k = k[:, :, None] if self.pool_gates is None else torch.stack((k, self.pool_gates(x)), dim=2)
        else:
            k = k[:, None] if self.position is None else self.position(k[:, None], layout)
        if self.per_head:
            return IndexQueries(q * self.scale, k, None)
        if self.weights is None:
            return IndexQueries(q, k, q.new_full(q.shape[:3], self.scale))
        return IndexQueries(q, k, self.weights(x).transpose(1, 2) * self.scale)

    def extend(
        self, index: IndexQueries, cache: KVCache | BlockCache, layout: Layout, window: int | None
    ) -> tuple[IndexQueries, KVCache | BlockCache]:
        """The indexer's keys of all tokens, in the order of the mixer's cache, or of blocks, and the new cache."""
        if isinstance(cache, BlockCache):
            keys, blocks = extend_blocks(cache, index.k, call_blocks(layout, self.block), layout, self._pooled)
            assert blocks is not None
            return index._replace(k=keys[:, None]), blocks
        keys, _, _, cache = cache.extend(index.k, index.k[..., :0], layout, window)
        return index._replace(k=keys), cache

    def _pooled(self, raw: Tensor, lead: int, blocks: CallBlocks) -> Tensor:
        """The keys of the blocks that a call may finish, [B, n, d]; raw [B, lead + T, parts, d]."""
        pooled: Tensor
        keys, *gates = block_tokens(at_least_float32(raw), lead, blocks, self.block).unbind(3)  # [B, n, block, d]
        if self.pool_bias is None:
            pooled = self.k_norm(keys.mean(2).to(raw.dtype))[:, None]
        else:
            pooled = (((gates[0] + self.pool_bias).softmax(2) * keys).sum(2).to(raw.dtype))[:, None]
        pooled = pooled if self.position is None else self.position(pooled, blocks.layout)
        return pooled[:, 0]

    def select(
        self,
        index: IndexQueries | None,
        attended: Callable[[], tuple[Tensor, Tensor]],
        mask: AttentionMask,
        layout: Layout,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> AttentionMask:
        """The mask that shows only the selected keys. attended: the attention's q and k.

        In training, records the loss of the call, if a recorder asks for it.
        """
        if index is None:
            q, k = attended()
            q = q * scale if self.selector.choice.score == "attention" else q
            return self._selected(IndexQueries(q.detach(), k.detach(), None), mask)
        blocks: KeyBlocks | None = None
        if self.pool is None:
            selected = self._selected(index, mask)
        else:
            of_call = call_blocks(layout, self.block)
            if layout.cache_view is None:  # with a state they are pooled already
                index = index._replace(k=extend_blocks(None, index.k, of_call, layout, self._pooled)[0][:, None])
            blocks = KeyBlocks(block_mask(layout, of_call, self.block), finished_blocks(layout, of_call, self.block))
            chosen = blocks._replace(mask=self._selected(index, blocks.mask))
            selected = mask if chosen.mask is blocks.mask else self._shown(mask, chosen, layout)
            blocks = chosen if self.loss_keys == "selected" else blocks
        if self.training:
            shown = selected if self.loss_keys == "selected" else mask

            def loss() -> IndexLoss:
                value = self.loss * index_loss(index, attended(), shown, scale, modifiers, blocks)
                return IndexLoss(self, value, (mask.q_positions >= 0).sum())

            record_index_loss(loss)
        return selected

    def _selected(self, index: IndexQueries, mask: AttentionMask) -> AttentionMask:
        selected: AttentionMask = self.selector(index, mask)
        return selected

    def _shown(self, mask: AttentionMask, chosen: KeyBlocks, layout: Layout) -> AttentionMask:
        """The mask over keys, of the chosen blocks and of those that are not finished."""
        top_k, count = self.selector.choice.top_k, None
        if counts_flops():
            count = self.block * entry_pairs(layout, self.block, top_k)[0] + tail_pairs(layout, self.block)
        return replace(show_blocks(mask, chosen, (top_k + 1) * self.block - 1), pair_count=count)


def build_indexer(config: IndexerConfig | None, *arguments: Any) -> Indexer | None:
    """The module, or None. Raises DesignError with a path from the mixer."""
    return None if config is None else build_under("indexer", Indexer, config, *arguments)
