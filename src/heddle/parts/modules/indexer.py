"""The indexer of sparse attention (DeepSeek Sparse Attention, DeepSeek-V3.2 2025): which keys each query attends to.

    q_h = R(W_q,h x),  k = R(LayerNorm(W_k x)),  w = W_w x / sqrt(heads · head_dim)
    score(i, j) = Σ_h w_h(i) · relu(q_h(i) · k(j));   the `top_k` visible keys of the highest score are attended to

R rotates as many of the first dims as the `position` of the mixer does. In latent attention q is projected from the
latent of queries, if there is one. The formula and ties: numerics/attention/indexer.py.

All pairs are computed and then masked: no time is saved, but FLOPs count only the pairs that are attended to. The
selection has no gradient. In training the indexer learns from its own loss, KL(p ‖ softmax(scores)) over all visible
keys, where p are the weights of the attention without a selection, summed over heads and divided by their sum.
The indexer reads x, the queries and the keys detached: it gets gradients from this loss only, and passes none on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from heddle.config import Config, DesignError, PositiveFloat, Width, build_under, parse_config
from heddle.numerics.attention.indexer import index_loss, select_keys
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

    top_k: Width  # keys that each query attends to
    heads: Width
    head_dim: Width
    rope_layout: Literal["half", "interleaved"] | None = None  # of rotated pairs; default: half, as in DeepSeek-V3.2
    loss: PositiveFloat = 1.0  # coefficient of its loss in training

    def check_window(self, window: int | None, causal: bool) -> None:
        """Raises DesignError if a window shows no more keys than are selected."""
        seen = None if window is None else window if causal else 2 * window + 1
        if seen is not None and self.top_k >= seen:
            raise DesignError("top_k", f"{self.top_k} selects all of the {seen} keys in the window; lower it")

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
    """What the indexer computes in a call: q [B, H, T, d], k [B, 1, T, d], and the weights of the heads [B, H, T]."""

    q: Tensor
    k: Tensor
    weights: Tensor


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


class Indexer(nn.Module):
    """The module. width: of x. query_width: of the input that its queries are projected from."""

    def __init__(
        self, config: IndexerConfig, width: int, query_width: int, position: MixerPositionConfig | None, dims: int
    ) -> None:
        super().__init__()
        self.top_k, self.heads, self.loss = config.top_k, config.heads, config.loss
        self.q = Linear(query_width, config.heads * config.head_dim)
        self.k = Linear(width, config.head_dim)
        norm: NormConfig = parse_config(NormConfig, KEY_NORM)  # type: ignore[type-abstract]
        self.k_norm = norm.build(config.head_dim)
        self.weights = Linear(width, config.heads)
        rotation = config.rotation(position, dims)
        self.position = None if rotation is None else build_under("head_dim", rotation.build, config.head_dim)
        self.scale = (config.heads * config.head_dim) ** -0.5

    @property
    def head_dim(self) -> int:
        """Width of its keys."""
        return self.k.weight.shape[0]

    def init_cache(self, max_cached: int | None, spec: StateSpec) -> KVCache:
        """An empty cache of its keys, with the slots of the mixer's."""
        return KVCache.empty((spec.batch, 1, self.head_dim, 0), max_cached, spec)

    def forward(self, x: Tensor, queries: Tensor, layout: Layout) -> IndexQueries:
        """x [B, T, width], queries [B, T, query_width]; no gradient reaches either."""
        x, queries = x.detach(), queries.detach()
        q, k = split_heads(self.q(queries), self.heads), self.k_norm(self.k(x))[:, None]
        if self.position is not None:
            q, k = self.position(q, layout), self.position(k, layout)
        return IndexQueries(q, k, self.weights(x).transpose(1, 2) * self.scale)

    def extend(
        self, index: IndexQueries, cache: KVCache, layout: Layout, window: int | None
    ) -> tuple[IndexQueries, KVCache]:
        """The indexer's keys of all tokens, in the order of the mixer's cache, and the new cache."""
        keys, _, _, cache = cache.extend(index.k, index.k[..., :0], layout, window)
        return index._replace(k=keys), cache

    def select(self, index: IndexQueries, mask: AttentionMask) -> AttentionMask:
        """The mask that shows only the selected keys."""
        return select_keys(*index, mask, self.top_k)

    def record_loss(
        self,
        index: IndexQueries,
        attended: Callable[[], tuple[Tensor, Tensor]],
        mask: AttentionMask,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> None:
        """In training, record the loss of a call, if a recorder asks for it. attended: the attention's q and k."""
        if self.training:
            record_index_loss(lambda: self._loss(index, attended, mask, scale, modifiers))

    def _loss(
        self,
        index: IndexQueries,
        attended: Callable[[], tuple[Tensor, Tensor]],
        mask: AttentionMask,
        scale: float,
        modifiers: ScoreModifiers,
    ) -> IndexLoss:
        loss = self.loss * index_loss(index, attended(), mask, scale, modifiers)
        return IndexLoss(self, loss, (mask.q_positions >= 0).sum())


def build_indexer(config: IndexerConfig | None, *arguments: Any) -> Indexer | None:
    """The module, or None. Raises DesignError with a path from the mixer."""
    return None if config is None else build_under("indexer", Indexer, config, *arguments)
