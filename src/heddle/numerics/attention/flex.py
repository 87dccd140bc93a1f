"""Softmax attention by torch's FlexAttention: windows, documents, padding, softcaps, score biases and sinks on CUDA.

One kernel computes the scores of a block of queries and keys, changes and masks them, and never writes them to memory.
Blocks without a visible pair are skipped. Which blocks those are follows from the least and greatest position and
document of each block, so that no mask of T × S is built; it is computed once for all layers with the same mask.

A sink s multiplies the output by its share of the softmax: `y' = y · sigmoid(L − s)`, where L is the log-sum-exp, which
FlexAttention returns with its gradient. float32 products use TF32 if `torch.set_float32_matmul_precision` allows it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.attention.mask import AttentionMask, LinearBias, ScoreModifiers, zero_unused_slots
from heddle.numerics.attention.sdpa import with_sink
from heddle.numerics.dispatch import in_autocast_dtype

BLOCK = 128  # queries and keys of a block that is skipped, or computed, as a whole
FAR = 2**30 + 1  # above any position and document, and adding a window does not overflow

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (score, row, head, query, key) -> score
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) -> bool


class FlexKind(NamedTuple):
    """What a function is compiled for. `shape`: dtype, heads, groups, widths, and whether there are gradients."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    linear_bias: bool
    shape: tuple[Any, ...]


class FlexTensors(NamedTuple):
    """Tensors that the scores depend on.

    bias: slopes [H], or the score bias of each head at each possible offset [H, n], with offset 0 first, or in the
    middle if the mask is bidirectional. tokens: positions are None where they equal indices, documents where every key
    is in the query's document.
    """

    bias: Tensor | None
    sink: Tensor | None
    tokens: "TokenTable"


class TokenTable(NamedTuple):
    """int32 positions and documents of queries [B, T] and keys [B, S]. Padding is its own document."""

    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None

    def offset(self, row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """i − j of a query and a key."""
        if self.q_positions is None or self.k_positions is None:
            return query - key
        return self.q_positions[row, query] - self.k_positions[row, key]


_by_sdpa = ContextVar("flex_attention_by_sdpa", default=False)


@contextmanager
def by_sdpa() -> Iterator[None]:
    """Within the block, FlexAttention is torch's plain attention over as many keys as a query sees on average.

    It stands in for FlexAttention, which refuses fake CPU tensors with gradients: saved memory and counted pairs are
    equal.
    """
    token = _by_sdpa.set(True)
    try:
        yield
    finally:
        _by_sdpa.reset(token)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]."""
    if q.is_meta:  # torch's function refuses such tensors
        return q.new_empty(*q.shape[:3], v.shape[3])
    if _by_sdpa.get():
        visible = max(1, round(mask.pairs(q.shape[2], k.shape[2]) / q.shape[2]))
        k, v = k[:, :, :visible], v[:, :, :visible]
        return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    q, k, v = in_autocast_dtype(q, k, v)
    k, v = zero_unused_slots(k, v, mask)
    bias = modifiers.score_bias
    linear = isinstance(bias, LinearBias)
    shape = (q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3], torch.is_grad_enabled())
    kind = FlexKind(scale, mask.causal, mask.window, modifiers.softcap, linear, shape)
    if isinstance(bias, LinearBias):
        bias_tensor: Tensor | None = bias.slopes
    else:
        most = max(q.shape[2], k.shape[2])
        first = 0 if mask.causal else 1 - most
        bias_tensor = None if bias is None else bias(torch.arange(first, most, device=q.device)).contiguous()
    tokens, block_mask = mask.cached("block mask", lambda: block_mask_of(mask))
    run = flex_with_sink if is_compiling() or q.device.type == "cpu" else compiled_kernel(kind)
    y: Tensor = run(q, k, v, block_mask, FlexTensors(bias_tensor, modifiers.sink, tokens), kind)
    return y


@cache
def compiled_kernel(kind: FlexKind) -> Callable[..., Tensor]:
    """`flex_with_sink`, compiled for one kind. New lengths recompile it once, new documents never."""
    # torch limits recompilations per code object, so kinds that shared one would use up each other's limit.
    code = flex_with_sink.__code__.replace(co_name=f"flex_{abs(hash(kind))}")
    run: Callable[..., Tensor] = torch.compile(FunctionType(code, flex_with_sink.__globals__), fullgraph=True)
    return run


def flex_with_sink(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, tensors: FlexTensors, kind: FlexKind) -> Tensor:
    """The function that is compiled: FlexAttention, scaled by what the sink leaves of the softmax."""
    from torch.nn.attention import flex_attention as flex

    changed = kind.softcap is not None or tensors.bias is not None
    y, statistics = flex.flex_attention(
        q,
        k,
        v,
        score_mod=score_mod(tensors, kind) if changed else None,
        block_mask=block_mask,
        scale=kind.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=flex.AuxRequest(lse=tensors.sink is not None),
    )
    if tensors.sink is None or statistics.lse is None:
        return y
    return with_sink(y, statistics.lse, tensors.sink[:, None, None])


def score_mod(tensors: FlexTensors, kind: FlexKind) -> ScoreMod:
    """The softcap and the score bias, of one pair or of many: arguments may be broadcast to [B, H, T, S]."""
    softcap, bias, tokens = kind.softcap, tensors.bias, tensors.tokens

    def modify(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if bias is None:
            return score
        offset = tokens.offset(row, query, key)
        if kind.linear_bias:
            return score - bias[head] * offset.abs()
        first = 0 if kind.causal else bias.shape[1] // 2
        return score + bias[head, (offset + first).clamp(0, bias.shape[1] - 1)]

    return modify


def token_table(mask: AttentionMask) -> TokenTable:
    """The positions and documents that a mask needs."""
    equal_lengths = mask.q_positions.shape[1] == mask.k_positions.shape[1]
    if equal_lengths and mask.contiguous:
        return TokenTable(None, None, None, None)
    q_documents, k_documents = _documents(mask)
    if equal_lengths and mask.doc_lengths is not None:
        return TokenTable(None, None, q_documents, k_documents)
    q_positions, k_positions = (x.to(torch.int32) for x in (mask.q_positions, mask.k_positions))
    return TokenTable(q_positions, k_positions, q_documents, k_documents)


def _documents(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    if mask.q_segment_ids is None or mask.k_segment_ids is None:
        ids: tuple[Tensor, Tensor] = torch.zeros_like(mask.q_positions), torch.zeros_like(mask.k_positions)
    else:
        ids = mask.q_segment_ids, mask.k_segment_ids
    q_documents = torch.where(mask.q_positions < 0, -1, ids[0])
    k_documents = torch.where(mask.k_positions < 0, -2, ids[1])
    dtype = torch.int32 if mask.chunk is None else torch.int64  # ids of chunks are large
    return q_documents.to(dtype), k_documents.to(dtype)


def mask_mod(tokens: TokenTable, causal: bool, window: int | None) -> MaskMod:
    """Whether a query sees a key. Arguments may be broadcast to [B, H, T, S]."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        offset = tokens.offset(row, query, key)
        if causal:
            sees = offset >= 0 if window is None else (offset >= 0) & (offset < window)
        else:
            sees = key >= 0 if window is None else (offset <= window) & (offset >= -window)
        if tokens.q_documents is None or tokens.k_documents is None:
            return sees
        return sees & (tokens.q_documents[row, query] == tokens.k_documents[row, key])

    return visible


class Blocks(NamedTuple):
    """The blocks of queries or of keys: the least and the greatest position and document of their tokens.

    Each is [B or 1, blocks]. A block without tokens has ranges that overlap no other. is_full: no slot is padding.
    """

    low: Tensor
    high: Tensor
    first_document: Tensor
    last_document: Tensor
    is_full: Tensor

    @staticmethod
    def of(slots: Tensor, positions: Tensor | None, documents: Tensor | None) -> "Blocks":
        """slots [B, T]: the positions of the mask, for their shape. The others as in `TokenTable`."""
        length, device = slots.shape[1], slots.device
        low = torch.arange(0, length, BLOCK, dtype=torch.int32, device=device)[None]
        high = (low + (BLOCK - 1)).clamp_(max=length - 1)
        if documents is None:
            same = torch.zeros_like(low)
            return Blocks(low, high, same, same, high - low == BLOCK - 1)
        documents = functional.pad(documents, (0, -length % BLOCK), value=-1).unflatten(1, (-1, BLOCK))
        is_token = documents >= 0
        if positions is not None:
            positions = functional.pad(positions, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
            low, high = _least(positions, is_token), _greatest(positions, is_token)
        return Blocks(low, high, _least(documents, is_token), _greatest(documents, is_token), is_token.all(2))

    def as_rows(self) -> "Blocks":
        """Of queries: [B, blocks, 1]."""
        return Blocks(*(x.unsqueeze(2) for x in self))

    def as_columns(self) -> "Blocks":
        """Of keys: [B, 1, blocks]."""
        return Blocks(*(x.unsqueeze(1) for x in self))


def _least(values: Tensor, is_token: Tensor) -> Tensor:
    return torch.where(is_token, values, FAR).amin(2)


def _greatest(values: Tensor, is_token: Tensor) -> Tensor:
    return torch.where(is_token, values, -FAR).amax(2)


def visible_blocks(mask: AttentionMask, tokens: TokenTable) -> tuple[Tensor, Tensor]:
    """Which blocks of keys a block of queries needs: bool [B or 1, query blocks, key blocks], masked and unmasked.

    In an unmasked block every query sees every key. A masked block may also have no visible pair.
    """
    k = Blocks.of(mask.k_positions, tokens.k_positions, tokens.k_documents)
    q = k if tokens.q_positions is None else Blocks.of(mask.q_positions, tokens.q_positions, tokens.q_documents)
    q, k = q.as_rows(), k.as_columns()
    some = (q.last_document >= k.first_document) & (q.first_document <= k.last_document)
    every = (q.last_document == k.first_document) & (q.first_document == k.last_document) & q.is_full & k.is_full
    if mask.causal or mask.window is not None:
        after = 0 if mask.causal or mask.window is None else mask.window
        some, every = some & (q.high >= k.low - after), every & (q.low >= k.high - after)
    if mask.window is not None:
        before = mask.window - 1 if mask.causal else mask.window
        some, every = some & (q.low - before <= k.high), every & (q.high - before <= k.low)
    return some & ~every, every


def block_mask_of(mask: AttentionMask) -> tuple[TokenTable, Any]:
    """The token table and torch's BlockMask. Made on the device: no value is read."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens = token_table(mask)
    blocks = torch.stack(visible_blocks(mask, tokens))[:, :, None]
    pairs = [pair for way in (blocks, blocks.mT) for pair in zip(*_listed_blocks(way), strict=True)]
    lengths = mask.q_positions.shape[1], mask.k_positions.shape[1]
    visible = mask_mod(tokens, mask.causal, mask.window)
    options: dict[str, Any] = {"BLOCK_SIZE": (BLOCK, BLOCK), "mask_mod": visible}
    return tokens, BlockMask(lengths, *[x for pair in pairs for x in pair], **options)


def _listed_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of the blocks that are set [..., queries], and the indices of all blocks, those that are set first."""
    numbers = blocks.to(torch.int32)
    return numbers.sum(-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
