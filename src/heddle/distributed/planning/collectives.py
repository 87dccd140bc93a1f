"""Bytes that one rank sends and receives in a step, by collective."""

from typing import NamedTuple

from heddle.distributed.planning.costs import BF16_BYTES, ModelCost
from heddle.distributed.planning.ranks import RankLayout


class Collective(NamedTuple):
    """bytes: of the whole gathered or reduced tensor, over all calls of a step. ranks: of its group."""

    name: str
    bytes: int
    ranks: int

    @property
    def traffic(self) -> float:
        """Bytes that pass through one rank's link, by a ring."""
        passes = 2 if self.name == "all_reduce" else 1
        return passes * self.bytes * (self.ranks - 1) / self.ranks


def collectives(cost: ModelCost, layout: RankLayout) -> tuple[Collective, ...]:
    """All collectives of one step.

    In each micro-batch, layers are gathered for the forward and again for the backward pass, the root group once, in
    bfloat16, and gradients are scattered: only in the last one with `reduce_once`. Replicas sum their shards as often.
    """
    in_layers = cost.parameters - cost.root_parameters
    gathers = 2 if layout.reshard else 1
    reductions = 1 if layout.reduce_once else layout.accumulation
    result = []
    if layout.shard > 1:
        gathered = BF16_BYTES * (gathers * in_layers + cost.root_parameters) * layout.accumulation
        result.append(Collective("all_gather", gathered, layout.shard))
        result.append(Collective("reduce_scatter", reductions * layout.reduce_bytes * cost.parameters, layout.shard))
    if layout.replicate > 1:
        shard = -(-cost.parameters // layout.shard)
        result.append(Collective("all_reduce", reductions * layout.reduce_bytes * shard, layout.replicate))
    return tuple(result)
