"""Softmax attention over grouped heads: `softmax(Q Kᵀ · scale + mask) V` (Vaswani et al. 2017; Ainslie et al. 2023).

q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. Query head h reads group h // (H/G). Keys and
values are never repeated in memory. A query that sees no key yields zeros, with zero gradients.

`heddle.numerics.attention.mask` describes the options: softcap, score bias by offset or by tokens, and sinks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from heddle.numerics import native
from heddle.numerics.attention.flex import flex_attention
from heddle.numerics.attention.mask import (
    NO_MODIFIERS,
    AttentionMask,
    BlockModifiers,
    LinearBias,
    ScoreModifiers,
    zero_unused_slots,
)
from heddle.numerics.attention.observer import Observation, notify_observer
from heddle.numerics.attention.sdpa import (
    WIDTH_STEP,
    flash,
    sdpa,
    varlen_attention,
    varlen_parameters,
)
from heddle.numerics.attention.sliding_window import Band, sliding_window_attention
from heddle.numerics.attention.tiled import causal_attention, masked_attention
from heddle.numerics.dispatch import (
    NOT_CUDA,
    DeviceSize,
    Kernel,
    Operation,
    add_flops,
    compute_dtype,
    counts_flops,
    device_type,
    has_triton,
    in_autocast_dtype,
)
from heddle.numerics.norms import at_least_float32, without_autocast

# The facts that choose a kernel of softmax attention, and the reasons why a kernel does not support a call.


MAX_UNMASKED_ROWS = 16  # queries per group up to which two plain products are the fastest way to read all keys
LENGTHS = (128, 256, 512, 1024, 2048)  # sequences up to each of them share one fastest way to train causal attention
TRIANGLE_LENGTHS = (128, 256, 512, 1024)  # of these, those that train with plain batched products
triangle_lengths: tuple[int, ...] = TRIANGLE_LENGTHS  # on this machine: see `heddle.machine`
MAX_PRODUCT_ROWS = 64  # queries of a group whose weights are all in memory, on CUDA
MAX_FLASH_WIDTH = 256  # head dimension of torch's flash kernel
MIN_FLEX_WIDTH, MAX_FLEX_WIDTH = 16, 256  # head dimension of FlexAttention
_FLASH_CAPABILITY = 8, 0  # compute capability that torch's flash kernel needs
NOT_PACKED = "the rows are not packed documents of known lengths"
NO_SOFTCAP = "torch's fused kernel has no softcap"
NO_BIAS = "torch's fused kernel takes a score bias only as a mask, which is built one tile of queries at a time"


class AttentionFacts(NamedTuple):
    """What decides the kernel: sizes and the static facts of the mask.

    fixed_shape: whether later calls with gradients have
    the same lengths. adjacent: causal rows of documents next to each other, all keys of which are tokens. native:
    whether the C++ operator serves these tensors.
    """

    queries: int
    keys: int
    groups: int
    heads: int
    causal: bool
    window: int | None
    contiguous: bool
    all_visible: bool
    packed: bool
    dropout: bool
    gradients: bool
    device: str
    wide: bool
    dtype: torch.dtype
    width: int
    fixed_shape: bool = True
    softcap: bool = False
    sink: bool = False
    score_bias: bool = False
    linear_bias: bool = False
    token_bias: bool = False
    selected: bool = False
    adjacent: bool = False
    native: bool = False


def attention_facts(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: bool, modifiers: ScoreModifiers = NO_MODIFIERS
) -> AttentionFacts:
    """The facts of one call of `attention`."""
    graded = (q, k, v) if modifiers.sink is None else (q, k, v, modifiers.sink)
    return AttentionFacts(
        queries=q.shape[2],
        keys=k.shape[2],
        groups=k.shape[1],
        heads=q.shape[1],
        causal=mask.causal,
        window=mask.window,
        contiguous=mask.contiguous,
        all_visible=mask.all_visible,
        packed=mask.doc_lengths is not None,
        dropout=dropout,
        gradients=torch.is_grad_enabled() and any(x.requires_grad for x in graded),
        device=device_type(q),
        wide=q.dtype in (torch.float32, torch.float64),
        dtype=compute_dtype(q),
        width=max(q.shape[3], v.shape[3]),
        softcap=modifiers.softcap is not None,
        sink=modifiers.sink is not None,
        score_bias=modifiers.score_bias is not None,
        linear_bias=isinstance(modifiers.score_bias, LinearBias),
        token_bias=modifiers.token_bias is not None,
        selected=mask.selected is not None,
        adjacent=mask.adjacent and mask.causal and not mask.may_have_padding and mask.selected is None,
        native=native.serves("causal_attention", q, k, v),
    )


Check = Callable[[AttentionFacts], str | None]


def without_dropout(unsupported: Check) -> Check:
    """Make a kernel's check also reject dropout of the weights."""

    def unsupported_with_dropout(facts: AttentionFacts) -> str | None:
        if facts.dropout:
            return "dropout masks of weights are keyed by sample, which fused kernels cannot draw"
        return unsupported(facts)

    return unsupported_with_dropout


def by_offsets(unsupported: Check) -> Check:
    """Make a kernel's check also reject dropout, and a bias that depends on more than the offset of query and key."""

    def unsupported_with_token_bias(facts: AttentionFacts) -> str | None:
        if facts.token_bias:
            return "it takes a bias by the offset of query and key, not one that the tokens determine"
        return unsupported(facts)

    return without_dropout(unsupported_with_token_bias)


def unmasked_unsupported(facts: AttentionFacts) -> str | None:
    rows = facts.queries * facts.heads // facts.groups
    if not facts.all_visible or facts.softcap or facts.sink or rows > MAX_UNMASKED_ROWS:
        return f"it takes up to {MAX_UNMASKED_ROWS} queries per group that see every key, without softcap or sink"
    wide_on_cpu = facts.device == "cpu" and facts.wide
    return None if wide_on_cpu else "it takes float32 and float64 on the CPU; half precision would round the scores"


def folded_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device == "cuda":
        return "on CUDA torch's fused kernel may build a new plan for each number of keys"
    if facts.queries > 1 and (facts.softcap or facts.score_bias):
        return NO_SOFTCAP if facts.softcap else NO_BIAS
    return None if facts.all_visible else "some query does not see every key"


def per_document_unsupported(facts: AttentionFacts) -> str | None:
    return None if facts.packed else NOT_PACKED


def _not_contiguous(facts: AttentionFacts) -> str | None:
    if not facts.contiguous or facts.packed:
        return "positions are not consecutive in one document"
    if not facts.causal:
        return "attention is bidirectional"
    if facts.window is not None and (is_compiling() or facts.window < facts.keys):  # traced for keys of any length
        return "a window hides distant keys"
    return None


def causal_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device == "cuda" and not (facts.gradients and facts.fixed_shape):
        return "on CUDA torch's fused kernel may build a new plan for each length"
    if facts.device == "cuda" and _flash_unsupported(facts) is not None:  # torch's function would write T × S scores
        return _flash_unsupported(facts)
    if facts.queries != facts.keys:
        return "keys of a state precede the queries, and the kernel's causal mask is aligned to the top left"
    if facts.softcap or facts.score_bias:
        return NO_SOFTCAP if facts.softcap else NO_BIAS
    return _not_contiguous(facts)


def _trains_with_products(keys: int) -> bool:
    return next((length for length in LENGTHS if keys <= length), None) in triangle_lengths


MAX_NATIVE_KEYS = 512  # torch's batched products are as fast at longer rows


def native_unsupported(facts: AttentionFacts) -> str | None:
    """Why the C++ operator of causal attention cannot run, or None."""
    if not facts.native:
        return native.NOT_IN_USE
    if not facts.gradients or facts.queries == 1 or facts.keys > MAX_NATIVE_KEYS:
        return f"it serves training on rows of up to {MAX_NATIVE_KEYS} keys"
    if facts.softcap or facts.sink or facts.score_bias:
        return "it has no softcap, sink or score bias"
    return (None if facts.adjacent else causal_unsupported(facts)) or native.unsupported_dtype(facts.dtype)


def triangle_unsupported(facts: AttentionFacts) -> str | None:
    if facts.device != "cpu":
        return "it runs on the CPU only"
    sdpa_supports_it = facts.queries == facts.keys and not facts.softcap and not facts.score_bias
    if sdpa_supports_it and not (facts.gradients and _trains_with_products(facts.keys)):
        return f"the fused kernel is faster for {facts.keys} tokens, or without gradients"
    return _not_contiguous(facts)


def blocks_unsupported(facts: AttentionFacts) -> str | None:
    if facts.window is None:
        return "there is no window"
    if not facts.contiguous or facts.packed:
        return "positions are not consecutive in one document"
    if facts.keys < 2 * facts.window:
        return "the window covers most keys"
    if not facts.causal and facts.queries != facts.keys:
        return "bidirectional blocks need all queries at once"
    return None


def products_unsupported(facts: AttentionFacts) -> str | None:
    """Why plain products on CUDA cannot run a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.gradients:
        return "plain products save every attention weight for the backward pass"
    if facts.queries > 1 and facts.queries * facts.heads > MAX_PRODUCT_ROWS * facts.groups:
        return f"it takes up to {MAX_PRODUCT_ROWS} queries per group, because it materializes their weights"
    return None


@cache
def _card_runs_flash() -> bool:
    """Whether this machine's GPU runs torch's flash kernel. True without a GPU: choices are then only reported."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _FLASH_CAPABILITY


def _flash_unsupported(facts: AttentionFacts) -> str | None:
    """Why torch's flash kernel for CUDA does not serve, whatever the mask."""
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return "torch's flash kernel is for bfloat16 and float16"
    if not _card_runs_flash():
        return "this GPU does not run torch's flash kernel, which needs compute capability 8.0"
    if facts.width % WIDTH_STEP or facts.width > MAX_FLASH_WIDTH:
        return f"the head dimension is not a multiple of {WIDTH_STEP} up to {MAX_FLASH_WIDTH}"
    if facts.softcap or facts.score_bias:
        return "torch's flash kernel has no softcap and no score bias"
    if facts.sink and facts.gradients:
        return "the log-sum-exp of torch's flash kernel, which a sink needs, has no gradient"
    return None


def flash_unsupported(facts: AttentionFacts) -> str | None:
    """Why torch's flash kernel, called by name, cannot run a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if not facts.all_visible and (facts.queries != facts.keys or _not_contiguous(facts) is not None):
        return "the mask is neither full nor causal over the tokens of the call"
    if not facts.all_visible and causal_unsupported(facts) is None:
        return "torch picks the fastest of its kernels for causal attention of a fixed shape"
    return _flash_unsupported(facts)


def varlen_unsupported(facts: AttentionFacts) -> str | None:
    """Why torch's flash kernel for packed documents cannot run a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if facts.window is not None and "window_size" not in varlen_parameters():
        return "varlen_attn of this torch version has no window"
    if not facts.packed:
        return NOT_PACKED
    return _flash_unsupported(facts)


def flex_unsupported(facts: AttentionFacts) -> str | None:
    """Why compiled FlexAttention cannot run a call, or None."""
    if facts.device != "cuda":
        return NOT_CUDA
    if not has_triton():
        return "Triton is not installed"
    if facts.dtype == torch.float64:
        return "FlexAttention computes in float32"
    if facts.selected:
        return "its mask depends on positions only, not on keys that an indexer selected"
    if not MIN_FLEX_WIDTH <= facts.width <= MAX_FLEX_WIDTH:
        return f"the head dimension is not from {MIN_FLEX_WIDTH} to {MAX_FLEX_WIDTH}"
    if is_compiling() and facts.gradients and facts.score_bias and not facts.linear_bias:
        return "torch loses the gradient of a score bias that is computed in the same graph"
    return None if facts.queries and facts.keys else "there are no tokens"


def flex_nondeterministic(facts: AttentionFacts) -> str | None:
    """Why FlexAttention may not be bitwise reproducible, or None. Gradients of q, k and v are summed in fixed order."""
    learned = facts.gradients and facts.score_bias and not facts.linear_bias
    return "the gradient of a score bias is summed by atomic additions" if learned else None


# Attention of few queries by plain products: all their weights are in memory at one time.
#
#     P = softmax(cap · tanh(Q Kᵀ · scale / cap) + bias ; sink),   Y = P V
#
# On a CPU this is the fastest way for float32 queries that see every key. On CUDA it serves decode steps with any mask
# and any modifier: a few launches suffice, and sizes may change with every token, as no kernel plans for them.


KEY_BLOCK = 64  # products run over whole blocks of keys, so that their sizes repeat from token to token


def unmasked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of few queries that see every key: K qᵀ, softmax, P V. Keys are read in memory order.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. bias [B or 1, H, T, S] is added to scores.
    Products run over whole blocks of keys, and the remaining keys are summed elementwise: oneDNN sets up a new
    primitive for each new length, which costs a decode step more than its products.
    """
    folded = (q * scale).reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    aligned = k.shape[1] - k.shape[1] % KEY_BLOCK
    scores = torch.bmm(k[:, :aligned], folded.transpose(1, 2)).transpose(1, 2)
    scores = torch.cat((scores, (folded[:, :, None] * k[:, None, aligned:]).sum(-1)), dim=2)
    if bias is not None:
        scores = scores + bias.expand(q.shape[0], -1, -1, -1).reshape(scores.shape)
    weights = scores.softmax(-1)
    remainder = (weights[:, :, aligned:, None] * v[:, None, aligned:]).sum(2)
    return (torch.bmm(weights[:, :, :aligned], v[:, :aligned]) + remainder).view(*q.shape[:3], v.shape[2])


def masked_products(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers
) -> Tensor:
    """Attention of few queries with any mask and modifiers. Scores and weighted sums are not rounded before the end.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].
    """
    q, k, v = in_autocast_dtype(q, k, v)
    with without_autocast(q):
        rows, queries = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2]  # of groups, of each group
        folded = q.reshape(rows, queries, q.shape[3])
        scores = wide_product(folded, k.flatten(0, 1).mT).mul_(scale).view(*q.shape[:3], k.shape[2])
        if modifiers.softcap is not None:
            scores = scores.div_(modifiers.softcap).tanh_().mul_(modifiers.softcap)
        bias = modifiers.bias(mask)
        if bias is not None:
            scores = scores + bias
        empty = None
        if not mask.all_visible:
            hidden, empty = mask.cached("hidden", lambda: hidden_keys(mask, q.shape[1]))
            scores = scores.masked_fill(hidden, float("-inf"))  # also the NaN of a slot without a token
        sink = modifiers.sink_per_query(q)
        if sink is not None:
            scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
        if mask.may_have_padding:  # NaN in a slot without a token would reach the sum, as 0 · NaN is NaN
            v = v.masked_fill((mask.k_positions < 0)[:, None, :, None], 0.0)
        y = wide_product(weights.reshape(rows, queries, k.shape[2]), v.flatten(0, 1))
        y = y.view(*q.shape[:3], v.shape[3]).to(q.dtype)
        return y if empty is None else y.masked_fill(empty, 0.0)


def hidden_keys(mask: AttentionMask, heads: int) -> tuple[Tensor, Tensor]:
    """The keys that a query does not see, and the queries that see none, as in `AttentionMask.visible`.

    For such a query no key is hidden: its softmax would be NaN.
    """
    hidden = ~mask.visible(heads)
    empty = hidden.all(-1, keepdim=True)
    return hidden & ~empty, empty


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x [N, m, n] @ y [N, n, s] in at least float32. CUDA's product of narrow numbers writes float32 at no cost."""
    if x.dtype in (torch.float32, torch.float64) or x.device.type == "cpu":
        return torch.bmm(at_least_float32(x), at_least_float32(y))
    return torch.bmm(x, y, out_dtype=torch.float32)


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
    visible = mask.visible(q.shape[1])
    # The softmax of a row without visible keys would be NaN, so the row sees every key and is then set to zero.
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.flatten(1, 2).masked_fill(~(visible | empty), float("-inf"))
    sink = modifiers.sink_per_query(q)
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].masked_fill(empty, 0.0)


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


def _native(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    starts = (
        None
        if mask.contiguous and (mask.window is None or mask.window >= k.shape[2])
        else mask.cached("first keys", mask.first_keys)
    )
    y: Tensor = torch.ops.heddle.causal_attention(q, k, v, scale, starts)
    return y


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
    if modifiers.score_bias is not None or modifiers.token_bias is not None:
        rows = len(distinct_rows.k_positions) if modifiers.token_bias is None else len(q)
        bias_per_query = rows * q.shape[1] * k.shape[2]
        tile_size = max(MAX_UNMASKED_ROWS, min(MASK_TILE, MAX_BIAS_ELEMENTS.on(q) // max(1, bias_per_query)))
    for query_range in _query_ranges(q.shape[2], tile_size):
        of_tile = modifiers.for_queries(query_range)
        if modifiers.softcap is not None:
            out.append(reference(q[:, :, query_range], k, v, mask.for_queries(query_range), scale, modifiers=of_tile))
            continue
        bias, tile_q = of_tile.bias(distinct_rows.for_queries(query_range)), q[:, :, query_range]
        if mask.all_visible:  # padding queries included, though rows may differ in them
            out.append(sdpa(tile_q, k, v, scale, bias, sink=modifiers.sink_per_query(tile_q)))
            continue
        visible = distinct_rows.visible(q.shape[1], query_range)
        # torch's kernels give zeros or NaN for rows without visible keys: such a row sees every key, then becomes zero.
        empty = ~visible.any(-1, keepdim=True)
        attn_mask = visible | empty if bias is None else bias.masked_fill(~(visible | empty), float("-inf"))
        attend = _fold_heads if q.shape[2] == 1 else sdpa  # the keys of a group are read once
        y = attend(tile_q, k, v, scale, attn_mask, sink=modifiers.sink_per_query(tile_q))
        out.append(y.masked_fill(empty, 0.0))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _query_ranges(queries: int, tile_size: int) -> Iterator[slice]:
    """The queries of each tile. A traced graph has one tile, so that it serves any length."""
    if is_compiling():
        yield slice(0, queries)
        return
    for start in range(0, max(queries, 1), tile_size):  # yields once for a call without tokens
        yield slice(start, min(start + tile_size, queries))


ATTENTION = Operation(
    "attention",
    (
        Kernel("unmasked", _unmasked, without_dropout(unmasked_unsupported), traceable=False),
        Kernel("folded", _folded, by_offsets(folded_unsupported), traceable=False),
        Kernel("flash", _flash, by_offsets(flash_unsupported)),
        Kernel("products", _products, without_dropout(products_unsupported)),
        Kernel("varlen", _varlen, by_offsets(varlen_unsupported), traceable=False),
        Kernel("native", _native, by_offsets(native_unsupported)),
        Kernel("triangle", _triangle, by_offsets(triangle_unsupported), traceable=False),
        Kernel("causal", _causal, by_offsets(causal_unsupported)),
        Kernel("flex", _flex, by_offsets(flex_unsupported), nondeterministic=flex_nondeterministic),
        Kernel("per_document", _per_document, by_offsets(per_document_unsupported), traceable=False),
        Kernel("blocks", _blocks, by_offsets(blocks_unsupported), traceable=False),
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
        pairs = mask.pairs(q.shape[2], k.shape[2])
        add_flops(attention_flops(pairs, q.shape[0], q.shape[1], q.shape[3] + v.shape[3]))
    notify_observer(lambda: Observation(softmax_weights(q, k, mask, scale, modifiers), k.shape[1]))
    kernel = ATTENTION.choose(attention_facts(q, k, v, mask, dropout is not None, modifiers))
    dropout_args = () if dropout is None else (dropout,)
    y: Tensor = kernel.run(q, k, v, mask, scale, *dropout_args, modifiers=modifiers)
    return y


# The interface for softmax attention that another program computes, such as a serving engine with its own kernels.


class AttentionFunction(Protocol):
    """A function with the arguments and the result of `heddle.numerics.attention.softmax.attention`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        scale: float,
        dropout: WeightDropout | None,
        modifiers: ScoreModifiers,
    ) -> Tensor:
        """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]."""
        ...


class AttentionBackend(Protocol):
    """Chooses the attention function of each layer, in the calls whose layout carries the backend.

    A function may read keys and values of earlier tokens from its own cache. It raises ConfigError for a dropout
    or a modifier that it cannot apply.
    """

    def __call__(self, layer: nn.Module) -> AttentionFunction:
        """The function that computes the attention of the mixer `layer`."""
        ...
