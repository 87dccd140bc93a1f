"""How a training is cut over ranks, with torchtitan's names of the degrees."""

from dataclasses import dataclass
from typing import Literal, get_args

from heddle.errors import ConfigError, choices_hint

Recompute = Literal["none", "selective", "layers"]


@dataclass(frozen=True)
class RankLayout:
    """Data parallelism: `replicate` groups of ranks, each with the whole state in `shard` shards.

    rows: of a micro-batch on each rank. accumulation: micro-batches of a step. recompute: what the backward pass
    computes again: nothing, every second product and all between ("selective", as torchtitan), or whole layers.
    reshard: whether gathered weights are freed after the forward pass. reduce_bytes: of a gradient on its way.
    whole_logits: whether the logits of a micro-batch exist at once, as in trainers whose loss has no chunks.
    reduce_once: whether gradients of earlier micro-batches stay whole on each rank, and are reduced with the last one.
    """

    replicate: int
    shard: int
    rows: int
    accumulation: int = 1
    recompute: Recompute = "none"
    reshard: bool = True
    reduce_bytes: int = 4
    whole_logits: bool = False
    reduce_once: bool = False

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "rows", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.recompute not in get_args(Recompute):
            raise ConfigError(f"recompute {self.recompute}: {choices_hint(self.recompute, get_args(Recompute))}")

    @property
    def gpus(self) -> int:
        """Number of ranks, one a GPU."""
        return self.replicate * self.shard
