"""Products of Householder-like matrices between key and query (PaTH attention, Yang et al. 2025, arXiv 2505.16381).

    score(i, j) = scale · k_jᵀ H_{j+1} ⋯ H_i q_i,   H_t = I − β_t w_t w_tᵀ,   over the tokens of one document

Block by block from the last key to the first (section 3.2), with q̃ = q at first, K and W [n, d] of one block, and
A ⊙ earlier the elements of A whose column is before their row in their document:

    T = (I + β (W Wᵀ ⊙ earlier))⁻¹ β,   M = T W,   Z = T (W Kᵀ ⊙ earlier)
    scores = q̃ Kᵀ − (q̃ Wᵀ ⊙ visible) Z,   q̃ ← q̃ − (q̃ Wᵀ ⊙ visible) M

One block of all keys is the formula of section 3.1. Everything is in at least float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent.gated_delta import TriangularSolve, inverse_by_blocks

BLOCK = 64  # keys: longer blocks cost more arithmetic, shorter ones more steps


def householder_flops(pairs: int, keys: int, heads: int, groups: int, dim: int, block: int) -> int:
    """FLOPs of what is added to the products q·k of `pairs` visible pairs per head, and of the blocks of `keys`."""
    return 2 * pairs * heads * (3 * dim + block) + 2 * keys * groups * block * (3 * dim + block)


class HouseholderProducts(NamedTuple):
    """The queries [B, H, T, d], scaled, and for each block of n keys k, w, M [B, G, blocks, n, d] and Z [..., n, n]."""

    q: Tensor
    k: Tensor
    w: Tensor
    updates: Tensor
    corrections: Tensor

    def bias(self, visible: Tensor) -> Tensor:
        """What is added to scale · k_jᵀ q_i, [B, H, T, S]. visible: bool [B, T, S], by document."""
        keys, (groups, blocks, size) = visible.shape[2], self.k.shape[1:4]
        seen = functional.pad(visible, (0, blocks * size - keys)).unflatten(2, (blocks, size))[:, None, None]
        with without_autocast(self.q):
            q = at_least_float32(self.q).unflatten(1, (groups, -1))
            turned, biases = q, []
            for block in reversed(range(blocks)):
                k, w, update, correction = (x[:, :, block, None] for x in self[1:])
                read = (turned @ w.mT).masked_fill(~seen[..., block, :], 0.0)
                biases.append((turned - q) @ k.mT - read @ correction)
                turned = turned - read @ update
        return torch.cat(biases[::-1], dim=-1)[..., :keys].flatten(1, 2)


def householder_products(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, positions: Tensor, segment_ids: Tensor | None
) -> HouseholderProducts:
    """q [B, H, T, d], scaled, k and w [B, G, S, d], beta [B, G, S]. positions, segment_ids: of the keys, [B, S].

    Later keys of a document have higher indices. At padding (position −1) w is zero.
    """
    size = min(BLOCK, max(1, k.shape[2]))
    blocks = max(1, -(-k.shape[2] // size))
    missing = blocks * size - k.shape[2]
    place = functional.pad(positions, (0, missing), value=-1).unflatten(1, (blocks, size))
    earlier = place[..., None, :] < place[..., None]  # of no position, too: its w and β are zero
    if segment_ids is not None:
        segment = functional.pad(segment_ids, (0, missing)).unflatten(1, (blocks, size))
        earlier = earlier & (segment[..., None, :] == segment[..., None])
    earlier = earlier[:, None]
    with without_autocast(q):
        beta = at_least_float32(beta).masked_fill((positions < 0)[:, None], 0.0)
        rate = functional.pad(beta, (0, missing)).unflatten(2, (blocks, size))[..., None]
        k, w = (functional.pad(at_least_float32(x), (0, 0, 0, missing)).unflatten(2, (blocks, size)) for x in (k, w))
        pairs, reads = ((w @ x.mT).masked_fill(~earlier, 0.0) * rate for x in (w, k))
        solved: Tensor = TriangularSolve.apply(pairs, torch.cat((w * rate, reads), dim=-1), inverse_by_blocks)
        updates, corrections = solved.split((w.shape[-1], size), dim=-1)
    return HouseholderProducts(q, k, w, updates, corrections)
