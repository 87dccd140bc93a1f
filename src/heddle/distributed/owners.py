"""Work on whole matrices whose rows lie on several ranks: each matrix has one owner, which computes it for all."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heddle.distributed.ranks import as_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Compute = Callable[[Tensor], Tensor]  # of [m, rows, columns], to the same shape and dtype


def owner_count(matrix: Tensor) -> int:
    """How many ranks can own a matrix: all that hold rows of it, or copies of them."""
    sharded = as_sharded(matrix)
    return 1 if sharded is None else sharded.device_mesh.size()


def compute_on_owners(matrix: Tensor, parts: Tensor, compute: Compute, first: int = 0) -> Tensor:
    """Return this rank's rows of compute(whole matrices), [n, rows of this rank, columns].

    matrix: one of n matrices [rows, columns] that are placed alike. parts: [n, rows of this rank, columns], what this
    rank holds of each. first: the owner of matrix i is rank (first + i) modulo their number. All ranks call this at
    once. Rows move to their owner and back in one exchange each; where ranks hold copies, each set of ranks computes
    its share of the matrices, and a third exchange tells the others.
    """
    sharded = as_sharded(matrix)
    if sharded is None or sharded.device_mesh.size() == 1:
        return compute(parts)
    mesh = sharded.device_mesh
    shard_dim = next(dim for dim, placement in enumerate(sharded.placements) if placement.is_shard())
    copies = mesh.size() // mesh.size(shard_dim)
    copy = mesh.get_local_rank(1 - shard_dim) if copies > 1 else 0
    own = [index for index in range(len(parts)) if (first + index) % copies == copy]
    result = _compute_shards(sharded, shard_dim, parts.to(mesh.device_type)[own], compute, first // copies)
    if copies > 1:
        padded = result.new_zeros((-(-len(parts) // copies), *result.shape[1:]))
        padded[: len(own)] = result
        gathered = [torch.empty_like(padded) for _ in range(copies)]
        torch.distributed.all_gather(gathered, padded, group=mesh.get_group(1 - shard_dim))
        result = torch.stack([gathered[(first + index) % copies][index // copies] for index in range(len(parts))])
    return result.to(parts.device)


def _compute_shards(sharded: "DTensor", dim: int, parts: Tensor, compute: Compute, first: int) -> Tensor:
    """The same where the ranks of one dimension of the mesh hold all rows between them."""
    mesh, (rows, columns) = sharded.device_mesh, sharded.shape
    count, rank = mesh.size(dim), mesh.get_local_rank(dim)
    size = -(-rows // count)
    heights = [min(size, max(0, rows - start)) for start in range(0, count * size, size)]
    owned = [[index for index in range(len(parts)) if (first + index) % count == owner] for owner in range(count)]
    own = len(owned[rank])

    def exchange(pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send a piece to each rank and receive one of sizes[rank] numbers from each."""
        received = parts.new_empty(sum(sizes))
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        lengths = [piece.numel() for piece in pieces]
        torch.distributed.all_to_all_single(received, sent, list(sizes), lengths, group=mesh.get_group(dim))
        return list(received.split(list(sizes)))

    received = exchange([parts[indices] for indices in owned], [own * height * columns for height in heights])
    shards = [piece.view(own, height, columns) for piece, height in zip(received, heights, strict=True)]
    computed = compute(torch.cat(shards, dim=1)) if own else parts.new_empty(0, rows, columns)
    returned = exchange(computed.split(heights, dim=1), [len(indices) * heights[rank] * columns for indices in owned])
    result = torch.empty_like(parts)
    for indices, piece in zip(owned, returned, strict=True):
        result[indices] = piece.view(len(indices), heights[rank], columns)
    return result
