"""The ranks that share a training step.

Every rank knows the whole batch: what divides a loss (targets, tokens) needs no communication. Each rank computes
its rows, and sums over ranks are those of one process.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heddle.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `count`. The default is one process."""

    rank: int = 0
    count: int = 1

    def rows(self, rows: int, parts: int) -> list[slice]:
        """This rank's rows of each of `parts` equal parts of a batch. Raises ConfigError if they cannot be equal."""
        share, rest = divmod(rows, parts * self.count)
        if rest:
            shares = f"{self.count} ranks" if parts == 1 else f"{self.count} ranks × {parts} accumulated parts"
            raise ConfigError(f"batch_size {rows}: is no multiple of {shares}; take a multiple of {parts * self.count}")
        starts = range(self.rank * share, rows, share * self.count)
        return [slice(start, start + share) for start in starts]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, on each of them; the same order of summands everywhere."""
        if self.count == 1:
            return tensor
        from torch import distributed

        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        distributed.all_gather(gathered, tensor.contiguous())
        return torch.stack(gathered).sum(0)


ONE_PROCESS = Ranks()


def reduce_with_next_backward(model: nn.Module, reduce: bool) -> None:
    """Whether the next backward pass of a sharded model sums gradients over ranks, or keeps them for a later one."""
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is not None:
        set_sync(reduce)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on each rank: of a sharded one its shards together, which all ranks must ask for at once."""
    full = getattr(tensor, "full_tensor", None)
    result: Tensor = tensor if full is None else full()
    return result


def local_part(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, as a plain tensor that shares their storage."""
    to_local = getattr(tensor, "to_local", None)
    result: Tensor = tensor if to_local is None else to_local()
    return result


def with_local_part(tensor: Tensor, rows: Tensor) -> Tensor:
    """A tensor placed on ranks as `tensor` is, of which this rank holds `rows`."""
    if getattr(tensor, "to_local", None) is None:
        return rows
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    result: Tensor = DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )
    return result


def held_rows(tensor: Tensor) -> slice:
    """The rows that this rank holds: all of a tensor that is not sharded."""
    start, count = 0, len(tensor)
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        if placement.is_shard():
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            size = -(-count // mesh.size(dim))
            first = min(count, mesh.get_local_rank(dim) * size)
            start, count = start + first, min(size, count - first)
    return slice(start, start + count)
