"""Softmax attention over grouped heads: `softmax(Q Kᵀ · scale + mask) V` (Vaswani et al. 2017; Ainslie et al. 2023).

q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. Query head h reads group h // (H/G). Keys and
values are never repeated in memory. A query that sees no key yields zeros, with zero gradients.

`heddle.numerics.attention.score_modifiers` describes the options: a softcap on the scores, a score bias per head that
depends on the offset of query and key, and an attention sink per head.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heddle.numerics.attention.facts import (
    MAX_UNMASKED_ROWS,
    attention_facts,
    blocks_unsupported,
    causal_unsupported,
    flash_unsupported,
    flex_nondeterministic,
    flex_unsupported,
    folded_unsupported,
    per_document_unsupported,
    products_unsupported,
    triangle_unsupported,
    unmasked_unsupported,
    varlen_unsupported,
    without_dropout,
)
from heddle.numerics.attention.flex import flex_attention
from heddle.numerics.attention.mask import AttentionMask, visible_pairs, zero_unused_slots
from heddle.numerics.attention.observer import Observation, notify_observer
from heddle.numerics.attention.products import masked_products, unmasked_attention
from heddle.numerics.attention.score_modifiers import NO_MODIFIERS, BlockModifiers, ScoreModifiers
from heddle.numerics.attention.sdpa import flash, sdpa
from heddle.numerics.attention.sliding_window import Band, sliding_window_attention
from heddle.numerics.attention.tiled import causal_attention, masked_attention
from heddle.numerics.attention.varlen import varlen_attention
from heddle.numerics.dispatch.device_size import DeviceSize
from heddle.numerics.dispatch.flop_counter import add_flops, counts_flops
from heddle.numerics.dispatch.operation import Kernel, Operation
from heddle.numerics.norms import at_least_float32

MASK_TILE = 512  # queries whose mask is materialized at one time
# Elements of a score bias that are materialized at one time.
MAX_BIAS_ELEMENTS = DeviceSize(cpu=2**24, accelerator=2**26)

WeightDropout = Callable[[Tensor], Tensor]


def attention_flops(pairs: int, batch: int, heads: int, widths: int) -> int:
    """FLOPs of `pairs` visible (query, key) pairs per head. `widths` is d_k + d_v."""
    return 2 * batch * heads * pairs * widths


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
    dropout: WeightDropout | None = None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Tensor:
    """Attend by a grouped einsum. `dropout` is applied to the weights [B, H, T, S]."""
    k, v = zero_unused_slots(k, v, mask)
    weights = softmax_weights(q, k, mask, scale, modifiers)
    if dropout is not None:
        weights = dropout(weights)
    grouped = weights.to(v.dtype).unflatten(1, (k.shape[1], -1))
    return torch.einsum("bgrts,bgsd->bgrtd", grouped, v).flatten(1, 2)


def softmax_weights(
    q: Tensor, k: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """The attention weights [B, H, T, S] in at least float32.

    The row of a query that sees no key is zero. Every other row sums to 1, or to less with a sink.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgrtd,bgsd->bgrts", at_least_float32(grouped), at_least_float32(k)) * scale
    if modifiers.softcap is not None:
        scores = (scores / modifiers.softcap).tanh() * modifiers.softcap
    bias = modifiers.bias(mask)
    if bias is not None:
        scores = scores + bias.unflatten(1, (k.shape[1], -1))
    visible = mask.materialize()[:, None, None]
    # The softmax of a row without visible keys would be NaN, so the row sees every key and is then set to zero.
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | empty), float("-inf")).flatten(1, 2)
    sink = modifiers.sink_per_query(q)
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].masked_fill(empty[:, 0], 0.0)


def _unmasked(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return unmasked_attention(q, k, v, scale, modifiers.bias(mask))


def _folded(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """Every key is visible. The heads of a group are folded into the queries, so that their keys are read once."""
    sink, bias = modifiers.sink_per_query(q), modifiers.bias(mask)
    if modifiers.softcap is not None:
        all_rows = None if bias is None else bias[0]  # every key is visible, so all rows are equal
        return masked_attention(q, k, v, scale, None, BlockModifiers(modifiers.softcap, sink, all_rows))
    return _fold_heads(q, k, v, scale, bias, sink)


def _fold_heads(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, sink: Tensor | None) -> Tensor:
    """`sdpa` with the heads of a group as its queries. bias: None, [B or 1, H, T, S], or [B or 1, 1, 1, S] for all."""
    folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    if sink is not None:
        sink = sink.reshape(*folded.shape[:3], 1)
    if bias is not None and bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], *folded.shape[1:3], k.shape[2])
    return sdpa(folded, k, v, scale, bias, sink=sink).reshape(*q.shape[:3], v.shape[-1])


def _causal(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return sdpa(q, k, v, scale, causal=True, sink=modifiers.sink_per_query(q))


def _triangle(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return causal_attention(q, k, v, scale, modifiers)


def _products(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return masked_products(q, k, v, mask, scale, modifiers)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """A single query's heads are folded into queries, so that the keys of a group are read once."""
    sink, shape = modifiers.sink_per_query(q), q.shape
    if shape[2] == 1:
        q = q.reshape(shape[0], k.shape[1], -1, shape[3])
        sink = None if sink is None else sink.reshape(*q.shape[:3], 1)
    return flash(q, k, v, scale, causal=not mask.all_visible, sink=sink).reshape(*shape[:3], v.shape[3])


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return varlen_attention(q, k, v, mask, scale, modifiers.sink_per_query(q))


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    return flex_attention(q, k, v, mask, scale, modifiers)


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """Run one call per document of the packed rows, so that no time is spent on pairs across documents."""
    assert mask.doc_lengths is not None
    rows, length = q.shape[0], q.shape[2]
    doc_lengths = [doc_length for row in mask.doc_lengths for doc_length in row]
    split = [x.transpose(1, 2).flatten(0, 1).split(doc_lengths) for x in (q, k, v)]
    static_mask = replace(mask, doc_lengths=None, q_segment_ids=None, k_segment_ids=None, contiguous=True)
    out = []
    for doc_q, doc_k, doc_v in zip(*split, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (doc_q, doc_k, doc_v))
        positions = torch.arange(doc_q.shape[0], device=q.device)[None]
        single_token = doc_q.shape[0] == 1
        doc_mask = replace(static_mask, q_positions=positions, k_positions=positions, all_visible=single_token)
        facts = attention_facts(q, k, v, doc_mask, dropout=False, modifiers=modifiers)
        kernel = ATTENTION.first_supported(facts._replace(fixed_shape=False))
        out.append(kernel.run(q, k, v, doc_mask, scale, modifiers=modifiers)[0].transpose(0, 1))
    return torch.cat(out).view(rows, length, q.shape[1], v.shape[-1]).transpose(1, 2)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    assert mask.window is not None
    return sliding_window_attention(q, k, v, Band(mask.window, mask.causal), scale, modifiers)


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """Materialize the mask for one tile of queries at a time."""
    k, v = zero_unused_slots(k, v, mask)
    distinct_rows, tile_size, out = mask.collapse_equal_rows(), MASK_TILE, []
    if modifiers.score_bias is not None:
        bias_per_query = len(distinct_rows.k_positions) * q.shape[1] * k.shape[2]
        tile_size = max(MAX_UNMASKED_ROWS, min(MASK_TILE, MAX_BIAS_ELEMENTS.on(q) // max(1, bias_per_query)))
    for query_range in _query_ranges(q.shape[2], tile_size):
        if modifiers.softcap is not None:
            out.append(reference(q[:, :, query_range], k, v, mask.for_queries(query_range), scale, modifiers=modifiers))
            continue
        bias, tile_q = modifiers.bias(distinct_rows.for_queries(query_range)), q[:, :, query_range]
        if mask.all_visible:  # padding among the queries too, though their rows may differ in it
            out.append(sdpa(tile_q, k, v, scale, bias, sink=modifiers.sink_per_query(tile_q)))
            continue
        visible = distinct_rows.materialize(query_range)[:, None]
        # torch's kernels give zeros or NaN for rows without visible keys: such a row sees every key, then becomes zero.
        empty = ~visible.any(-1, keepdim=True)
        attn_mask = visible | empty if bias is None else bias.masked_fill(~(visible | empty), float("-inf"))
        attend = _fold_heads if q.shape[2] == 1 else sdpa  # a token's heads see the same keys, which are read once
        y = attend(tile_q, k, v, scale, attn_mask, sink=modifiers.sink_per_query(tile_q))
        out.append(y.masked_fill(empty, 0.0))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _query_ranges(queries: int, tile_size: int) -> Iterator[slice]:
    """The queries of each tile. A traced graph has one tile, so that it holds for any length."""
    if is_compiling():
        yield slice(0, queries)
        return
    for start in range(0, max(queries, 1), tile_size):  # yields once for a call without tokens
        yield slice(start, min(start + tile_size, queries))


ATTENTION = Operation(
    "attention",
    (
        Kernel("unmasked", _unmasked, without_dropout(unmasked_unsupported), traceable=False),
        Kernel("folded", _folded, without_dropout(folded_unsupported), traceable=False),
        Kernel("flash", _flash, without_dropout(flash_unsupported)),
        Kernel("products", _products, without_dropout(products_unsupported)),
        Kernel("varlen", _varlen, without_dropout(varlen_unsupported), traceable=False),
        Kernel("triangle", _triangle, without_dropout(triangle_unsupported), traceable=False),
        Kernel("causal", _causal, without_dropout(causal_unsupported)),
        Kernel("flex", _flex, without_dropout(flex_unsupported), nondeterministic=flex_nondeterministic),
        Kernel("per_document", _per_document, without_dropout(per_document_unsupported), traceable=False),
        Kernel("blocks", _blocks, without_dropout(blocks_unsupported), traceable=False),
        Kernel("tiles", _tiles, without_dropout(lambda facts: None)),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    scale: float,
    dropout: WeightDropout | None = None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Tensor:
    """Attend: q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].

    `dropout` is applied to the weights, which only the reference kernel supports. If an observer is set (see
    `heddle.numerics.attention.observer`), it receives the weights, even if the kernel does not materialize them.
    """
    if counts_flops():
        pairs = visible_pairs(q.shape[2], k.shape[2], mask.window, mask.causal)
        add_flops(attention_flops(pairs, q.shape[0], q.shape[1], q.shape[3] + v.shape[3]))
    notify_observer(lambda: Observation(softmax_weights(q, k, mask, scale, modifiers), k.shape[1]))
    kernel = ATTENTION.choose(attention_facts(q, k, v, mask, dropout is not None, modifiers))
    dropout_args = () if dropout is None else (dropout,)
    y: Tensor = kernel.run(q, k, v, mask, scale, *dropout_args, modifiers=modifiers)
    return y
