"""Recurrences over the chunks of a sequence, for accelerators: the number of launches hardly grows with the length.

    S_c = a_c S_{c−1} + X_c     decaying sums: the states after all chunks are one product, A X
    S_c = M_c S_{c−1} + X_c     the delta rule: a scan in blocks of chunks, in blocks of blocks, and so on

A [n, n] has the products of decays a_{j+1} ⋯ a_i, which are exponentials of sums of logarithms ≤ 0. The transitions M
of the delta rule are matrices [d_k, d_k]; if keys are normalized, neither they nor their products lengthen a vector.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.norms import at_least_float32

# Decays within chunks of tokens, for recurrences whose decay differs from token to token.
#
#     D_ij = α_{j+1} ⋯ α_i for j ≤ i in one document, else 0
#
# α is a number for each head and token, or a vector with a number for each channel of the key. Each exponent is its own
# sum of log decays ≤ 0, never a difference of two sums: nothing overflows, and a strong decay costs later ones no
# precision.


class ChunkDecays(NamedTuple):
    """Decays of a chunk of C tokens, for c = 1 rate per head or c = d_k rates per head.

    from_start [..., C, c]: of the state before the chunk, after each token. to_end [..., C, c]: of each token's key, at
    the end of the chunk. whole_chunk [..., c, 1]: of the state before the chunk, at the end of the chunk.
    """

    from_start: Tensor
    to_end: Tensor
    whole_chunk: Tensor


def split_chunks(x: Tensor, groups: int, chunks: int) -> Tensor:
    """[B, heads, T, d] -> [B, G, heads/G, chunks, tokens, d], padded with zeros after the last token."""
    x = functional.pad(x, (0, 0, 0, -x.shape[2] % chunks))
    split: Tensor = x.unflatten(2, (chunks, -1)).unflatten(1, (groups, -1))
    return split


def head_decays(log_decay: Tensor, call_segment_ids: Tensor | None) -> tuple[Tensor, ChunkDecays]:
    """log α [B, G, R, chunks, C, 1] -> D [..., C, C] and the other decays of each chunk.

    call_segment_ids: int64 [B, T], each token's document; 0 continues the state's document. None: all are 0.
    """
    size, device = log_decay.shape[4], log_decay.device
    within = torch.ones(size, size + 1, dtype=torch.bool, device=device).tril()
    sums = (log_decay.mT * within[:, :-1]) @ within.to(log_decay.dtype)  # [i, j]: from after token j − 1 to token i
    visible = _visible(call_segment_ids, log_decay)
    decay = sums.exp().tril(1) if visible is None else sums.exp() * visible
    return decay[..., 1:], ChunkDecays(decay[..., :1], decay[..., -1, 1:, None], decay[..., -1, :1, None])


def channel_decays(
    rows: Tensor, keys: Tensor, log_decay: Tensor, call_segment_ids: Tensor | None
) -> tuple[Tensor, ChunkDecays]:
    """P_ij = Σ_d x_id k_jd D_ijd for keys k and one or more x, rows [N, B, G, R, chunks, C, d_k] -> P [N, ..., C, C].

    D has C² · d_k elements, so it is never formed. Between the second and the first half of a block it is a product,
    D_ij = D_im D_mj with m the last token of the first half and both factors ≤ 1, so P is a matrix product there. Each
    half is such a block again, down to single tokens.
    """
    size = log_decay.shape[4]
    padding = (1 << (size - 1).bit_length()) - size
    if padding:
        rows, keys, log_decay = (functional.pad(x, (0, 0, 0, padding)) for x in (rows, keys, log_decay))
    # [..., blocks, tokens of a block, …]: the sums from the start of its block to a token, and from it to the end
    to_token, to_end = log_decay.unsqueeze(-2), torch.zeros_like(log_decay).unsqueeze(-2)
    products = (rows * keys).sum(-1)[..., None, None]
    while (half := products.shape[-1]) < size:  # two neighboring blocks become one
        (first_to, second_to), (first_end, second_end) = _pairs_of_blocks(to_token), _pairs_of_blocks(to_end)
        second_rows = rows.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        first_keys = keys.unflatten(-2, (-1, 2, half))[..., 0, :, :]
        across = (second_rows * second_to.exp()) @ (first_keys * first_end.exp()).mT
        first, second = (x.expand(*across.shape[:-3], -1, -1, -1) for x in _pairs_of_blocks(products))
        products = torch.cat((functional.pad(first, (0, half)), torch.cat((across, second), dim=-1)), dim=-2)
        to_token, to_end = (
            torch.cat((first_to, second_to + first_to[..., -1:, :]), dim=-2),
            torch.cat((first_end + second_to[..., -1:, :], second_end), dim=-2),
        )
    products, from_start, to_end = products[..., 0, :size, :size], to_token[..., 0, :size, :], to_end[..., 0, :size, :]
    return mask_documents(products, from_start.exp(), to_end.exp(), call_segment_ids)


def mask_documents(
    products: Tensor, from_start: Tensor, to_end: Tensor, call_segment_ids: Tensor | None
) -> tuple[Tensor, ChunkDecays]:
    """Restrict P and the decays of each channel to documents: a token reads and writes its own document only."""
    whole_chunk = from_start[..., -1, :, None]
    visible = _visible(call_segment_ids, from_start)
    if visible is not None:
        products = products * visible[..., 1:]
        from_start, to_end = from_start * visible[..., :1], to_end * visible[..., -1, 1:, None]
        whole_chunk = whole_chunk * visible[..., -1, :1, None]
    return products, ChunkDecays(from_start, to_end, whole_chunk)


def _pairs_of_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., blocks, m, n] -> the first and the second block of each pair, [..., blocks / 2, m, n]."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def _visible(call_segment_ids: Tensor | None, log_decay: Tensor) -> Tensor | None:
    """bool [B, 1, 1, chunks, C, C + 1]: [i, j] whether token i sees token j − 1 of its chunk, and column 0 the state.

    None: every token sees the state and every token up to itself.
    """
    if call_segment_ids is None:
        return None
    batch, (chunks, size) = call_segment_ids.shape[0], log_decay.shape[3:5]
    padding = call_segment_ids[:, -1:].expand(batch, chunks * size - call_segment_ids.shape[1])
    padded_ids = torch.cat((call_segment_ids.new_zeros(batch, 1), call_segment_ids, padding), dim=1)
    segment_ids = padded_ids.unfold(1, size + 1, size)
    same_document = segment_ids[:, None, None, :, 1:, None] == segment_ids[:, None, None, :, None]
    return same_document.tril(1)


CHUNK_TOKENS = 64  # tokens per chunk: about d_k and d_v
SUM_BLOCK = 64  # chunks whose states are one product
SCAN_BLOCK = 4  # transitions that are multiplied one after the other


def to_chunks(x: Tensor, groups: int, size: int) -> Tensor:
    """[B, heads, T, d] -> [B, G, heads/G, chunks, size, d] in at least float32, with zeros after the last token."""
    padding = -x.shape[2] % size
    wide = at_least_float32(x)
    wide = functional.pad(wide, (0, 0, 0, padding)) if padding else wide.contiguous()
    chunks: Tensor = wide.unflatten(2, (-1, size)).unflatten(1, (groups, -1))
    return chunks


def from_chunks(y: Tensor, length: int) -> Tensor:
    """[B, G, heads/G, chunks, size, d] -> [B, heads, T, d]."""
    return y.flatten(3, 4).flatten(1, 2)[:, :, :length]


def batched_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, call_segment_ids: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Decaying sums of all chunks at once. Returns y [B, H, T, d_v] and the state after the last token.

    q, k [B, G, T, d_k], v [B, H, T, d_v], log α [B|1, H, T, 1] (None: 0), call_segment_ids [B, T] or None, and a state
    [B, H, d_k, d_v]. Head h reads queries and keys of group h // (H/G).
    """
    groups, length = k.shape[1], v.shape[2]
    size = min(CHUNK_TOKENS, length)
    q, k, v = (to_chunks(x, groups, size) for x in (q, k, v))
    if log_decay is None:
        log_decay, groups = state.new_zeros(1, 1, length, 1), 1
    rates = to_chunks(log_decay, groups, size)
    pair_decay, decay = head_decays(rates, call_segment_ids)
    added = k.mT @ (v * decay.to_end)
    before = state.unflatten(1, (k.shape[1], -1)).flatten(3)
    ends = None if call_segment_ids is None else _last_of_each(call_segment_ids, size)
    after = _sum_states(added.flatten(4), rates.sum(4), ends, before)
    states_before = torch.cat((before[:, :, :, None], after[:, :, :, :-1]), dim=3).view_as(added)
    y = torch.addcmul(((q @ k.mT) * pair_decay) @ v, q @ states_before, decay.from_start)
    return from_chunks(y, length), after[:, :, :, -1].reshape(state.shape)


def _last_of_each(values: Tensor, size: int) -> Tensor:
    """The last value of each `size` values of [B, T], [B, ceil(T / size)]."""
    last = values[:, size - 1 :: size]
    return last if values.shape[1] % size == 0 else torch.cat((last, values[:, -1:]), dim=1)


def _sum_states(added: Tensor, log_decay: Tensor, ends: Tensor | None, state: Tensor) -> Tensor:
    """The state after each chunk, from what each chunk adds, both [B, G, R, n, X], and its log decay [.., n, 1].

    ends: int64 [B, n], the document at the end of each chunk. state [B, G, R, X]. Blocks of `SUM_BLOCK` chunks are
    summed from zeros, then the states at their ends are computed in the same way.
    """
    chunks = added.shape[3]
    size = min(SUM_BLOCK, chunks)
    padding = -chunks % size
    if padding:
        added, log_decay = (functional.pad(x, (0, 0, 0, padding)) for x in (added, log_decay))
    rates = log_decay.unflatten(3, (-1, size))
    weights, decay = head_decays(rates, ends)
    sums = weights @ added.unflatten(3, (-1, size))
    before = state[:, :, :, None]
    if sums.shape[3] > 1:
        block_ends = None if ends is None else _last_of_each(ends, size)
        after = _sum_states(sums[..., -1, :], rates.sum(4), block_ends, state)
        before = torch.cat((before, after[:, :, :, :-1]), dim=3)
    return torch.addcmul(sums, decay.from_start, before[..., None, :]).flatten(3, 4)[:, :, :, :chunks]


def scan_transitions(transitions: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_c = M_c S_{c−1} + X_c, with M [N, n, d, d], X [N, n, d, e] and the state before [N, d, e].

    Returns the state before each chunk [N, n, d, e] and the one after the last [N, d, e].
    """
    before, last = _Scan.apply(transitions, added, state)
    return before, last


class _Scan(torch.autograd.Function):
    """The gradients of the states are a scan too, from the last chunk to the first: dS_{c−1} += M_cᵀ dS_c."""

    @staticmethod
    def forward(ctx: Any, transitions: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        products = _block_products(transitions)
        after = _scan(transitions, added, state, products)
        before = torch.cat((state[:, None], after[:, :-1]), dim=1)
        ctx.save_for_backward(transitions, before, *products)
        return before, after[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad_before, grad_last), (transitions, before, *products) = gradients, ctx.saved_tensors
        totals = _scan(transitions, grad_before, grad_last, products, reverse=True)
        after = torch.cat((totals[:, 1:], grad_last[:, None]), dim=1)
        return after @ before.mT, after, totals[:, 0]


def _block_products(transitions: Tensor) -> list[Tensor]:
    """For the scan's levels: the product of the transitions in each block, in each block of blocks, and so on."""
    products = []
    while transitions.shape[1] > SCAN_BLOCK:
        steps = _blocks(transitions)
        product = steps[0]
        for step in steps[1:]:
            product = step @ product
        transitions = product.unflatten(0, (transitions.shape[0], -1))
        products.append(transitions)
    return products


def _blocks(x: Tensor) -> list[Tensor]:
    """[N, n, d, e] -> the first, the second, … element of each block [N · blocks, d, e], with zeros after the last."""
    padding = -x.shape[1] % SCAN_BLOCK
    padded = functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
    return list(padded.unflatten(1, (-1, SCAN_BLOCK)).flatten(0, 1).unbind(1))


def _scan(
    transitions: Tensor, added: Tensor, state: Tensor, products: Sequence[Tensor], reverse: bool = False
) -> Tensor:
    """The state after each chunk [N, n, d, e]. reverse: with Mᵀ, from the last chunk to the first.

    First what each block of chunks adds to zeros, then the states after all blocks in the same way, then the states
    within the blocks. Zeros behind the last chunk reach no state that is returned: in reverse they stand at the start,
    where nothing is added yet, so that state is added to the last chunk's.
    """
    rows, chunks = transitions.shape[:2]
    if not products:
        return _in_order(transitions.unbind(1), added.unbind(1), state, reverse, dim=1)
    padding = -chunks % SCAN_BLOCK
    if padding and reverse:
        last = torch.baddbmm(added[:, -1], transitions[:, -1].mT, state)
        added, state = torch.cat((added[:, :-1], last[:, None]), dim=1), torch.zeros_like(state)
    steps, additions = _blocks(transitions), _blocks(added)
    totals = _in_order(steps, additions, None, reverse).unflatten(0, (rows, -1))
    after = _scan(products[0], totals, state, products[1:], reverse)
    neighbors = (after[:, 1:], state[:, None]) if reverse else (state[:, None], after[:, :-1])
    states = _in_order(steps, additions, torch.cat(neighbors, dim=1).flatten(0, 1), reverse, dim=1)
    return states.view(rows, -1, *state.shape[1:])[:, :chunks]


def _in_order(
    steps: Sequence[Tensor], additions: Sequence[Tensor], state: Tensor | None, reverse: bool, dim: int | None = None
) -> Tensor:
    """The last state (None: from zeros), or all states in the order of the chunks, stacked at `dim`."""
    states: list[Tensor] = []
    pairs = zip(steps, additions, strict=True)
    for step, addition in reversed(list(pairs)) if reverse else pairs:
        step = step.mT if reverse else step
        state = addition if state is None else torch.baddbmm(addition, step, state)
        states.append(state)
    if dim is None:
        return states[-1]
    return torch.stack(states[::-1] if reverse else states, dim=dim)


def halving_masks(size: int, like: Tensor) -> Tensor:
    """[levels, C, C] of ones and zeros: at level l, i is in the second and j in the first half of a block of 2^(l+1).

    Each pair i > j is in exactly one level: the highest bit in which i and j differ.
    """
    index, levels = (torch.arange(n, device=like.device) for n in (size, (size - 1).bit_length()))
    differing_bits = index[:, None] ^ index
    return ((differing_bits >> levels[:, None, None]) == 1).tril(-1).to(like.dtype)


def unit_triangular_inverse(system: Tensor) -> Tensor:
    """(I + tril(A, −1))⁻¹ of A [..., C, C]: at each level the blocks between halves, −Y⁻¹ A' X⁻¹, all at once."""
    flat = system.flatten(0, -3)
    inverse = torch.eye(flat.shape[-1], dtype=flat.dtype, device=flat.device).expand_as(flat)
    for between_halves in flat * halving_masks(flat.shape[-1], flat)[:, None]:
        inverse = torch.baddbmm(inverse, inverse @ between_halves, inverse, alpha=-1)
    return inverse.view(system.shape)


def channel_pairs(
    rows: Tensor, keys: Tensor, log_decay: Tensor, call_segment_ids: Tensor | None
) -> tuple[Tensor, ChunkDecays]:
    """The results of `channel_decays` in few launches: all levels of halving at once.

    `keys` are the last of `rows` [N, B, G, R|1, chunks, C, d_k], or the last n of them, with shape [n, 1, …]; then only
    the others count as rows, and the result is [n, N − n, …, C, C]. The factors of a pair go from the middle of its
    block to the token in the second half, and from the token in the first half to the middle. Both are ≤ 1.
    """
    size = log_decay.shape[4]
    masks = halving_masks(size, log_decay)
    factors = (_sum_ranges(size, len(masks), log_decay) @ log_decay.flatten(0, 3)).exp()
    factors = factors.view(*log_decay.shape[:4], len(masks) + 2, *log_decay.shape[4:])
    from_start, to_end = factors[..., -2, :, :], factors[..., -1, :, :]
    decayed = rows.unsqueeze(-3) * factors[..., :-2, :, :]
    decayed_keys = decayed[-1]
    if keys.dim() > rows.dim():
        rows, decayed, decayed_keys = rows[: -len(keys)], decayed[: -len(keys)], decayed[-len(keys) :, None]
    products = ((decayed @ decayed_keys.mT) * masks).sum(-3) + torch.diag_embed((rows * keys).sum(-1))
    return mask_documents(products, from_start, to_end, call_segment_ids)


def _sum_ranges(size: int, levels: int, like: Tensor) -> Tensor:
    """[rows of log α, (levels + 2) · C, C] of ones and zeros: the tokens u whose log α each factor of token t sums.

    At a level, u ≤ t within t's half if that is the second half of a block, else u > t. Then u ≤ t in the chunk, and
    u > t in the chunk.
    """
    index = torch.arange(size, device=like.device)
    level = torch.arange(levels, device=like.device)[:, None, None]
    up_to = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
    is_second = ((index >> level.squeeze(-1)) & 1).bool()[..., None]
    same_half = (index[:, None] ^ index) >> level == 0
    ranges = torch.cat((same_half & (is_second == up_to), torch.stack((up_to, ~up_to))))
    return ranges.to(like.dtype).flatten(0, 1).expand(like.shape[:4].numel(), -1, -1)
