"""Compressed attention (DeepSeek-V4, 2026): a window of tokens, and one more key for each finished block of tokens.

    k = v = R(N(W_kv x)),   q_h = R(N(W_q,h l)),   l = N(W_l x),   or x without `query_rank`
    entry(b) = R_bm(N(Σ_j softmax_j(W_g x_j + B_j) ⊙ W_p x_j)),   over the m = `compress_ratio` tokens j of block b
    y_h = R⁻¹(softmax(q_h [k of the window ; entries]ᵀ / sqrt(d) ; sink_h)[:-1] [k of the window ; entries])

Keys and values are equal, with one head for all queries. R rotates the last `rope_dim` dims of a head, an entry by the
position of its block's first token, and the output back by the query's position. B is learned, a vector for each place
in a block. Block b has the tokens at positions b·m … (b + 1)·m − 1 of a document. Its entry exists once the document
has all of them, and queries from the last of them on see it.

With `overlap` an entry also pools the document's tokens of the block before, by a second W_p, W_g and B: 2m tokens
every m. With `top_k` a query sees the entries of the `top_k` highest scores among those that exist, by an index over
entries of its own, pooled in the same way:

    score(i, b) = Σ_h w_h(i) · relu(R(W_h l_i) · index_entry(b)),   w = W_w x / sqrt(index_heads · index_head_dim)

Scores of 0 are frequent: of equal scores the first blocks win. The selection has no gradient. In training the index
learns only from its own loss, as the `indexer` of other mixers does, and passes no gradient on.

`csa` (compressed sparse attention) is overlap with an index, by default 512 entries of blocks of 4 tokens; `hca`
(heavily compressed attention) has blocks of 128. Without `compress_ratio` only the window is attended to. With
`groups`, each group of heads has its own output projection of rank `out_rank`.

The state has the keys of the window, the entries, and what the tokens of unfinished blocks, and with `overlap` of the
block before, will add to entries. All pairs are computed and then masked; FLOPs count those that are seen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from heddle.config import DesignError, Part, PositiveFloat, PositiveInt, Width, build_under, refuse, with_implied
from heddle.numerics.attention.indexer import Choice, index_loss
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers, visible_pairs
from heddle.numerics.attention.softmax import attention
from heddle.numerics.dispatch import add_flops, counts_flops
from heddle.numerics.linear import linear_flops
from heddle.numerics.norms import at_least_float32, rms_norm
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig, check_head_groups, check_norm_width, merge_heads, split_heads
from heddle.parts.modules.blocks import (
    BlockCache,
    CallBlocks,
    block_mask,
    call_blocks,
    empty_blocks,
    entry_pairs,
    extend_blocks,
)
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.indexer import IndexQueries, KeySelector
from heddle.parts.modules.linear import Linear, SelfInitialized, fill_normal, fused_projections, weight_matrix
from heddle.parts.modules.router_statistics import IndexLoss, record_index_loss
from heddle.parts.position_table import PositionTable
from heddle.parts.positions import RotationConfig
from heddle.parts.states import KVCache, StateSpec

DEFAULT_EPS = 1e-6  # of the norm of queries, where the model's norm has no eps
RATIOS = {"csa": 4, "hca": 128}  # DeepSeek-V4's
SELECTED = 512  # entries, DeepSeek-V4's
SHARE = 4  # what an index has of the heads, and a projection of a group's width, by default one of so many parts


class CompressedAttentionConfig(MixerConfig):
    """Fields of `compressed_attention`. None or false: off, or the default named in the comment."""

    aliases = ("csa", "hca")
    absent_fields = (("value_embedding", "adds rows to values alone, but here keys are values; leave it out"),)
    width_fields = ("heads", "query_rank", "out_rank")

    heads: Width
    head_dim: Width | None = None  # default: width / heads
    query_rank: Width | None = None  # width of the latent of queries; default: no latent, queries are projected from x
    window: PositiveInt = 128
    compress_ratio: Annotated[int, Field(ge=2, le=2**20)] | None = None  # tokens of a block; default: no blocks
    overlap: bool = False  # an entry also pools the block before
    top_k: Width | None = None  # entries that each query sees; default: all
    index_heads: Width | None = None  # default: heads / 4, with top_k
    index_head_dim: Width | None = None  # default: head_dim, with top_k
    index_loss: PositiveFloat | None = None  # coefficient of the index's loss in training; default: 1, with top_k
    groups: Width | None = None  # of heads, each with an output projection of rank out_rank; default: one, of full rank
    out_rank: Width | None = None  # default: a quarter of the width of a group's heads, with groups
    sink: bool = True  # one learned logit per head, without a value
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)
    rope_dim: Width | None = None  # rotated dims, the last of each head; default: head_dim
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("groups", self.groups, self.heads)
        for of, names in (("groups", ("out_rank",)), ("top_k", ("index_heads", "index_head_dim", "index_loss"))):
            for name in names if getattr(self, of) is None else ():
                if getattr(self, name) is not None:
                    refuse(name, f"does nothing without {of}; give {of}, or leave it out")
        for name, is_there in (("overlap", self.overlap), ("top_k", self.top_k is not None)):
            if is_there and self.compress_ratio is None:
                refuse(name, "is for entries of blocks, but there are none; give compress_ratio, or leave it out")
        if self.compress_ratio is not None and self.window < self.compress_ratio - 1:
            reason = f"{self.window} hides tokens of a block of {self.compress_ratio} before it is finished"
            refuse("window", f"{reason}; give at least {self.compress_ratio - 1}")
        if self.rope_dim is not None and self.position is None:
            refuse("rope_dim", "does nothing without a position; give one, or leave it out")
        return self

    @classmethod
    def fields_of_alias(cls, alias: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """csa: overlap and an index, by default of 512 entries over blocks of 4. hca: by default blocks of 128."""
        if alias == "csa":
            fields = {**fields, "top_k": SELECTED if fields.get("top_k") is None else fields["top_k"]}
            fields = with_implied(alias, fields, "overlap", True)
        return {**fields} if fields.get("compress_ratio") is not None else {**fields, "compress_ratio": RATIOS[alias]}

    @classmethod
    def default_fields(cls, previous: Part, width: int) -> dict[str, Any]:
        """No groups, which are of another kind in the previous mixer."""
        fields = super().default_fields(previous, width)
        return fields | ({"groups": None} if "groups" in previous.model_fields_set else {})

    def resolved(self, context: BuildContext) -> Self:
        """Widths, scale, rotary dims, and those of the index and its loss written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        rotated = self.rope_dim or dim
        position = None if self.position is None else self.position.resolved(rotated)
        rope_dim = None if position is None else rotated
        fields: dict[str, Any] = {"head_dim": dim, "scale": self.scale or dim**-0.5, "rope_dim": rope_dim}
        if self.top_k is not None:
            fields["index_heads"] = self.index_heads or max(1, self.heads // SHARE)
            fields |= {"index_head_dim": self.index_head_dim or dim, "index_loss": self.index_loss or 1.0}
        if self.groups is not None:
            fields["out_rank"] = self.out_rank or max(1, self.heads // self.groups * dim // SHARE)
        return self.replace(**fields, position=position)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window, without blocks."""
        return (self.window,) if self.compress_ratio is None else ()

    def with_window(self, window: int) -> Self:
        """The same config with at most this window; with blocks it is unchanged."""
        return self if self.compress_ratio is not None else self.replace(window=min(self.window, window))

    def build(self, context: BuildContext) -> "CompressedAttention":
        """Build the module.

        Raises DesignError for widths that do not fit, and for a rotation by more than the position.
        """
        dim = context.head_dim(self.heads, self.head_dim)
        check_norm_width("head_dim", dim)
        rotated = 0 if self.position is None else self.rope_dim or dim
        for name, width in (("head_dim", dim), ("index_head_dim", self.index_head_dim)):
            if width is not None and width < rotated:
                at = "rope_dim" if name == "head_dim" else name
                raise DesignError(at, f"rope_dim = {rotated} dims of {width} cannot be rotated; give at most {name}")
        if self.index_head_dim is not None:
            check_norm_width("index_head_dim", self.index_head_dim)
        if self.query_rank is not None and self.query_rank > context.width:
            raise DesignError("query_rank", f"{self.query_rank} is larger than width = {context.width}; lower it")
        own = {name: getattr(self.resolved(context), name) for name in ("index_heads", "index_head_dim", "out_rank")}
        return CompressedAttention(self.replace(**own), context)


@dataclass(frozen=True, eq=False)
class CompressedCache(BlockCache):
    """The window's keys [B, 1, slots, d] without values, and the pooled entries [B, slots, d + d_index].

    The tail holds W_p x and W_g x of the tokens not yet pooled, [B, tokens, 2, series, d + d_index].
    """

    window: KVCache

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """As the tail can, and the window."""
        return super().can_roll_back(tokens, table) and self.window.can_roll_back(tokens, table)

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> "CompressedCache":
        """Entries, tail and window without the removed tokens."""
        cache = super().rolled_back(table, freed)
        return replace(cache, window=self.window.rolled_back(table, freed))


class BlockPool(SelfInitialized):
    """What blocks of `ratio` tokens pool of each token, the gates, B [ratio, series, dim], and the norm of entries.

    Of two series, the first is for the entry of the next block, the second for the entry of the token's own block.
    """

    def __init__(self, width: int, ratio: int, series: int, dim: int, context: BuildContext) -> None:
        super().__init__()
        self.values, self.gates = Linear(width, series * dim), Linear(width, series * dim)
        self.bias = nn.Parameter(torch.empty(ratio, series, dim))
        self.norm = context.norm.build(dim)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """B of zeros: at first no place in a block is preferred."""
        nn.init.zeros_(self.bias)

    def raw(self, x: Tensor) -> Tensor:
        """x [B, T, width] -> W_p x and W_g x, [B, T, 2, series, dim]."""
        both = fused_projections(x, self.values, self.gates)
        return torch.stack([each.unflatten(-1, (self.bias.shape[1], -1)) for each in both], dim=2)


class BlockIndex(nn.Module):
    """The index. query_width: of the input that its queries are projected from."""

    def __init__(self, config: CompressedAttentionConfig, query_width: int, pool: BlockPool) -> None:
        super().__init__()
        self.heads, self.dim = config.index_heads or 1, pool.bias.shape[2]
        self.pool, self.loss = pool, config.index_loss or 1.0
        self.q = Linear(query_width, self.heads * self.dim)
        self.weights = Linear(pool.values.in_features, self.heads)
        self.selector = KeySelector(Choice(config.top_k or 1))

    def forward(self, x: Tensor, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, dim], the weights of its heads [B, H, T], and what tokens add to its entries."""
        weights = self.weights(x).transpose(1, 2) * (self.heads * self.dim) ** -0.5
        return split_heads(self.q(queries), self.heads), weights, self.pool.raw(x)


Index = tuple[Tensor, Tensor]  # rotated queries of an index, and the weights of its heads


class CompressedAttention(SelfInitialized, Mixer):
    """The module. Its state is a `CompressedCache`, or without blocks the `KVCache` of its window."""

    causal = True

    def __init__(self, config: CompressedAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, context.head_dim(config.heads, config.head_dim)
        self.ratio, self.local, self.series = config.compress_ratio, config.window, 1 + config.overlap
        self.window = None if self.ratio is not None else config.window
        self.absolute_positions = self.ratio is not None
        width, dim, rank = context.width, self.head_dim, config.query_rank
        self.q = Linear(width, self.heads * dim) if rank is None else None
        self.q_down = None if rank is None else Linear(width, rank)
        self.q_norm = None if rank is None else context.norm.build(rank)
        self.q_up = None if rank is None else Linear(rank, self.heads * dim)
        names = ("q", "q_down", "kv", "pool.values", "pool.gates")
        of_index = ("index.weights", "index.pool.values", "index.pool.gates", *(("index.q",) if rank is None else ()))
        self.input_projections = (*names, *of_index)
        self.query_eps = getattr(context.norm, "eps", DEFAULT_EPS)
        self.kv, self.kv_norm = Linear(width, dim, value_projection=True), context.norm.build(dim)
        self.state_note = "one key for all heads" + ("" if self.ratio is None else ", and one for each finished block")
        pools = [
            None if self.ratio is None or inner is None else BlockPool(width, self.ratio, self.series, inner, context)
            for inner in (dim, config.index_head_dim)
        ]
        self.pool, self.index_dim = pools[0], config.index_head_dim or 0
        self.index = None if pools[1] is None else BlockIndex(config, width if rank is None else rank, pools[1])
        self.groups, values = config.groups, self.heads * dim
        reduced = (config.groups or 0) * (config.out_rank or 0)
        self.out_down = None if config.groups is None else Linear(values // config.groups, reduced)
        self.out = Linear(reduced or values, width, output_projection=True)
        self.sink = nn.Parameter(torch.empty(self.heads)) if config.sink else None
        self.rope_dim = 0 if config.position is None else config.rope_dim or dim
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.rope_dim)
        self.scale = config.scale or dim**-0.5
        if self.position is not None:
            self.scale *= self.position.score_scale
            if not self.position.invertible or self.position.length_dependent:
                reason = "rotates by more than the position, but an entry has nothing else of its block's tokens"
                raise DesignError("position", f"{reason}; use rope, without a scaling that depends on the length")

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Sinks are normal. Submodules initialize themselves."""
        if self.sink is not None:
            fill_normal(self.sink, std, draws("sink"))

    @property
    def logit_rows(self) -> str:
        """Its logits do not depend on the scale of its weights."""
        return "has norms of queries and keys, which undo a factor of their weights"

    @property
    def span(self) -> int:
        """Tokens that an entry pools."""
        return self.series * (self.ratio or 0)

    @property
    def rings(self) -> tuple[int | None, ...]:
        """The window, and the tail."""
        return (self.local,) if self.ratio is None else (self.local, self.span - 1)

    def init_state(self, spec: StateSpec) -> KVCache | CompressedCache:
        """No tokens, and no blocks."""
        window = KVCache.empty((spec.batch, 1, self.head_dim, 0), self.local + spec.rollback, spec)
        if self.ratio is None:
            return window
        channels = self.head_dim + self.index_dim
        return CompressedCache(
            *empty_blocks(spec, self.ratio, self.span - 1, channels, (2, self.series, channels)), self.ratio, window
        )

    def forward(self, x: Tensor, layout: Layout, state: Any = None) -> tuple[Tensor, Any]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        projections = (self.q if self.q_down is None else self.q_down, self.kv)
        queries, kv = fused_projections(x, *(each for each in projections if each is not None))
        if self.q_norm is not None:
            queries = self.q_norm(queries)
        raw = None if self.pool is None else self.pool.raw(x)
        index = None
        if self.index is not None and raw is not None:  # no gradient passes from it to what it reads
            index_q, weights, of_index = self.index(x.detach(), (x if self.q_up is None else queries).detach())
            index, raw = (self._turned(index_q, layout), weights), torch.cat((raw, of_index), dim=-1)
        q = split_heads(queries if self.q_up is None else self.q_up(queries), self.heads)
        q = self._turned(rms_norm(q, None, self.query_eps), layout)
        y, state = self._attend(q, self._turned(self.kv_norm(kv)[:, None], layout), raw, index, layout, state)
        y = merge_heads(self._turned(y, layout, back=True))
        return self.out(y if self.out_down is None else self._reduced(y, self.out_down)), state

    def _reduced(self, y: Tensor, out_down: Linear) -> Tensor:
        """[B, T, heads · d] -> [B, T, groups · out_rank], each group of heads by its own rows of the weight."""
        assert self.groups is not None
        weight, y = weight_matrix(out_down).unflatten(0, (self.groups, -1)), y.unflatten(-1, (self.groups, -1))
        add_flops(linear_flops(y.numel() // y.shape[-1], weight.shape[2], weight.shape[1]))
        return torch.einsum("btgc,grc->btgr", y, weight).flatten(-2)

    def _turned(self, x: Tensor, layout: Layout, back: bool = False) -> Tensor:
        """Heads [B, H, T, d] with their last dims rotated by the positions of the layout, or rotated back."""
        if self.position is None:
            return x
        kept, turned = x.split((x.shape[-1] - self.rope_dim, self.rope_dim), dim=-1)
        turn = self.position.inverse if back else self.position
        return torch.cat((kept, turn(turned, layout)), dim=-1)

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self,
        q: Tensor,
        kv: Tensor,
        raw: Tensor | None,
        index: Index | None,
        layout: Layout,
        state: KVCache | CompressedCache | None,
    ) -> tuple[Tensor, KVCache | CompressedCache | None]:
        """The output of each head, and the new state."""
        modifiers = ScoreModifiers(sink=self.sink)
        window = state.window if isinstance(state, CompressedCache) else state
        if window is None:
            mask = layout.attention_mask(self.local, True)
        else:
            kv, _, mask, window = window.extend(kv, kv[..., :0], layout, self.local)
        if raw is None:
            return attention(q, kv, kv, mask, self.scale, None, modifiers), window
        assert self.ratio is not None
        blocks = call_blocks(layout, self.ratio)
        cache = replace(state, window=window) if isinstance(state, CompressedCache) and window is not None else None
        entries, state = extend_blocks(cache, raw, blocks, layout, self._entries)
        own, of_index = entries[:, None].split((self.head_dim, self.index_dim), dim=-1)
        shown = self._shown(q, own, of_index, index, blocks, layout)
        keys = torch.cat((kv, own), dim=2)
        mask = AttentionMask(
            layout.positions,
            torch.cat((mask.k_positions, blocks.ends), dim=1),
            selected=torch.cat((mask.cached("shown", mask.materialize)[:, None], shown.visible(1)), dim=3),
            pair_count=self._pairs(layout, shown.most_selected),
            may_have_padding=True,
        )
        return attention(q, keys, keys, mask, self.scale, None, modifiers), state

    def _shown(
        self, q: Tensor, own: Tensor, of_index: Tensor, index: Index | None, blocks: CallBlocks, layout: Layout
    ) -> AttentionMask:
        """The mask over the entries that each query sees. own, of_index [B, 1, S, ..]: the entries, and the index's."""

        assert self.ratio is not None
        mask = block_mask(layout, blocks, self.ratio)
        if index is None or self.index is None:
            return mask
        queries = IndexQueries(index[0], of_index, index[1])
        if self.training:
            loss_weight = self.index.loss

            def loss() -> IndexLoss:
                value = loss_weight * index_loss(queries, (q, own), mask, self.scale)
                return IndexLoss(self, value, (layout.positions >= 0).sum())

            record_index_loss(loss)
        selected: AttentionMask = self.index.selector(queries, mask)
        return selected

    def _pairs(self, layout: Layout, most: int | None) -> int | None:
        """Pairs of a query and a visible key: in the window, and up to `most` entries for each query."""
        if not counts_flops():
            return None
        assert self.ratio is not None
        pairs, tokens = entry_pairs(layout, self.ratio, most)
        return pairs + visible_pairs(layout.length, tokens, self.local, True)

    def _entries(self, raw: Tensor, lead: int, blocks: CallBlocks) -> Tensor:
        """The entries that the call may fill, [B, n, d + d_index], normalized and rotated."""
        assert self.ratio is not None
        assert self.pool is not None
        bias = self.pool.bias if self.index is None else torch.cat((self.pool.bias, self.index.pool.bias), dim=-1)
        rows = torch.arange(len(raw), device=raw.device)[:, None, None]
        places = blocks.last[..., None] + lead - torch.arange(self.ratio - 1, -1, -1, device=raw.device)
        values, gates = raw[:, :, :, -1][rows, places.clamp(min=0)].unbind(3)  # [B, n, ratio, d + d_index]
        gates = at_least_float32(gates) + bias[:, -1]
        if self.series == 2:
            hidden = ~blocks.before[..., None]
            earlier, scores = raw[:, :, :, 0][rows, (places - self.ratio).clamp(min=0)].unbind(3)
            scores = (at_least_float32(scores) + bias[:, 0]).masked_fill(hidden, float("-inf"))
            values = torch.cat((earlier.masked_fill(hidden, 0.0), values), dim=2)
            gates = torch.cat((scores, gates), dim=2)
        pooled = (gates.softmax(2) * values).sum(2).to(raw.dtype)
        own, of_index = pooled[:, None].split((self.head_dim, self.index_dim), dim=-1)
        entries = self._turned(self.pool.norm(own), blocks.layout)
        if self.index is not None:
            entries = torch.cat((entries, self._turned(self.index.pool.norm(of_index), blocks.layout)), dim=-1)
        return entries[:, 0]
