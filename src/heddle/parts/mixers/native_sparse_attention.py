"""Native sparse attention (NSA, Yuan et al. 2025, arXiv 2502.11089): three attentions with gates over the same keys.

    y = Σ_b σ(W_b x) ⊙ softmax(Q K_bᵀ / sqrt(d_k)) V_b,   b: compressed, selected, window

    compressed    the means of the keys and of the values of each finished block
    selected      the keys of `top_k` blocks: the `first` and the `local` ones, and those with the largest weights in a
                  softmax over the means, averaged over the heads of a key head
    window        the last `window` keys, the query's own included

A gate is one number for each head and token. Blocks count a document's own tokens. As in flash-linear-attention, the
means stand for the paper's learned compression, and the branches share their keys and values, rotated before the means.
The selection has no gradient: the compressed branch trains it. The state has the keys and values of all tokens and of
finished blocks. All pairs are computed and then masked, so that no time is saved; FLOPs count those attended to.
"""

from dataclasses import replace
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from heddle.config import PositiveFloat, Width, build_under, refuse
from heddle.numerics.attention.indexer import Choice
from heddle.numerics.attention.softmax import attention
from heddle.numerics.norms import at_least_float32
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers import Mixer, MixerConfig, check_head_groups, merge_heads, split_heads
from heddle.parts.modules.blocks import (
    BlockCache,
    CallBlocks,
    block_mask,
    block_tokens,
    call_blocks,
    empty_blocks,
    extend_blocks,
)
from heddle.parts.modules.eager import layout_dependent
from heddle.parts.modules.indexer import IndexedCache, IndexQueries, KeySelector
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.positions import RotationConfig
from heddle.parts.states import KVCache, StateSpec

BRANCHES = 3
BlockCount = Annotated[int, Field(ge=0, le=2**20)]


class NativeSparseAttentionConfig(MixerConfig):
    """Fields of `native_sparse_attention`. None: the default named in the comment."""

    aliases = ("nsa",)

    heads: Width
    kv_heads: Width | None = None  # default: heads
    head_dim: Width | None = None  # default: width / heads
    value_dim: Width | None = None  # default: head_dim
    block: Annotated[int, Field(ge=2, le=2**20)] = 64  # positions of a document in a block
    top_k: Width = 16  # blocks that are selected
    local: BlockCount = 2  # of them, blocks up to the query's own
    first: BlockCount = 1  # of them, blocks from the document's position 0
    window: Width = 512  # keys of the window
    scale: PositiveFloat | None = None  # default: 1 / sqrt(head_dim)
    position: RotationConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_head_groups("kv_heads", self.kv_heads, self.heads)
        if self.local + self.first >= self.top_k:
            least = self.local + self.first + 1
            reason = f"{self.top_k} leaves none to select beside local = {self.local} and first = {self.first}"
            refuse("top_k", f"{reason}; give at least {least}, or lower local or first")
        return self

    def resolved(self, context: BuildContext) -> Self:
        """Heads, widths, scale and rotary dims written out."""
        dim = context.head_dim(self.heads, self.head_dim)
        return self.replace(
            kv_heads=self.kv_heads or self.heads,
            head_dim=dim,
            value_dim=self.value_dim or dim,
            scale=self.scale or dim**-0.5,
            position=None if self.position is None else self.position.resolved(dim),
        )

    def build(self, context: BuildContext) -> "NativeSparseAttention":
        """Build the module. Raises DesignError if width is not divisible by heads and head_dim is not given."""
        return NativeSparseAttention(self, context)


class NativeSparseAttention(Mixer):
    """The module. Its state is an `IndexedCache`: keys and values of all tokens, and the means of blocks."""

    input_projections = ("q", "k", "v", "gate")
    state_note = "and of each finished block"
    absolute_positions = True

    def __init__(self, config: NativeSparseAttentionConfig, context: BuildContext) -> None:
        super().__init__()
        self.window, self.causal, self.local, self.block = None, True, config.window, config.block
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_dim = context.head_dim(config.heads, config.head_dim)
        self.value_dim = config.value_dim or self.head_dim
        self.scale = config.scale or self.head_dim**-0.5
        self.q = Linear(context.width, self.heads * self.head_dim)
        self.k = Linear(context.width, self.kv_heads * self.head_dim)
        self.v = Linear(context.width, self.kv_heads * self.value_dim, value_projection=True)
        self.gate = Linear(context.width, self.heads * BRANCHES)
        self.out = Linear(self.heads * self.value_dim, context.width, output_projection=True)
        position = config.position
        self.position = None if position is None else build_under("position", position.build, self.head_dim)
        self.scale *= 1.0 if self.position is None else self.position.score_scale
        self.selector = KeySelector(Choice(config.top_k, config.block, "attention", config.local, config.first))

    @property
    def logit_rows(self) -> str:
        """Its logits are not measured."""
        return "has three softmaxes, for which QK-clip is not defined"

    @property
    def rings(self) -> tuple[int | None, ...]:
        """All tokens, and the tokens of an unfinished block."""
        return (None, self.block - 1)

    def init_state(self, spec: StateSpec) -> IndexedCache:
        """No tokens, and no blocks."""
        channels = self.kv_heads * (self.head_dim + self.value_dim)
        kv = KVCache.empty((spec.batch, self.kv_heads, self.head_dim, self.value_dim), None, spec)
        blocks = empty_blocks(spec, self.block, self.block - 1, channels, (channels,))
        return IndexedCache(kv, BlockCache(*blocks, self.block))

    def forward(
        self, x: Tensor, layout: Layout, state: IndexedCache | None = None
    ) -> tuple[Tensor, IndexedCache | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        q, k, v, gates = fused_projections(x, self.q, self.k, self.v, self.gate)
        q, k, v = split_heads(q, self.heads), split_heads(k, self.kv_heads), split_heads(v, self.kv_heads)
        if self.position is not None:
            q, k = self.position(q, layout), self.position(k, layout)
        branches, state = self._attend(q, k, v, layout, state)
        weights = at_least_float32(gates).sigmoid().unflatten(-1, (self.heads, BRANCHES)).transpose(1, 2)
        y = (torch.stack(branches, dim=-1) * weights[..., None, :]).sum(-1)
        return self.out(merge_heads(y).to(x.dtype)), state

    @layout_dependent  # layouts differ from call to call, so this stays out of compiled regions
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, state: IndexedCache | None
    ) -> tuple[list[Tensor], IndexedCache | None]:
        """The outputs of the branches, [B, heads, T, value_dim] each, and the new state."""
        blocks, raw = call_blocks(layout, self.block), merge_heads(torch.cat((k, v), dim=-1))
        cache = None
        if state is None:
            mask, windowed = layout.attention_mask(None, True), layout.attention_mask(self.local, True)
            pooled, _ = extend_blocks(None, raw, blocks, layout, self._means)
        else:
            assert isinstance(state.index, BlockCache)
            k, v, mask, kv = state.kv.extend(k, v, layout, None)
            windowed = replace(mask, window=self.local, all_visible=False)
            pooled, extended = extend_blocks(state.index, raw, blocks, layout, self._means)
            assert extended is not None
            cache = IndexedCache(kv, extended)
        means = split_heads(pooled, self.kv_heads).split((self.head_dim, self.value_dim), dim=-1)
        selected = self.selector(IndexQueries((q * self.scale).detach(), k.detach(), None), mask)
        entries = block_mask(layout, blocks, self.block)
        calls = ((*means, entries), (k, v, selected), (k, v, windowed))
        return [attention(q, keys, values, seen, self.scale) for keys, values, seen in calls], cache

    def _means(self, raw: Tensor, lead: int, blocks: CallBlocks) -> Tensor:
        """The means of the blocks that a call may finish, [B, n, channels]; raw [B, lead + T, channels]."""
        return at_least_float32(block_tokens(raw, lead, blocks, self.block)).mean(2).to(raw.dtype)
