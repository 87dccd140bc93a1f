"""Decays within chunks of tokens, for recurrences whose decay differs from token to token.

    D_ij = α_{j+1} ⋯ α_i for j ≤ i in one document, else 0

α is a number for each head and token, or a vector with a number for each channel of the key. Each exponent is a sum of
log decays ≤ 0 of its own, never a difference of two sums: nothing overflows, and a strong decay takes no precision from
those after it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


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
    """P and the decays of each channel, from those of one document: a token reads and writes its own document only."""
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
