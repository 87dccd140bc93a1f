"""How the ranks of a training share its work: degrees of parallelism, with torchtitan's names."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heddle.distributed.ranks import Ranks
from heddle.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RESERVED = ("tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Degrees of parallelism. They are no part of a run's identity: it may continue at others.

    data_parallel_replicate_degree: copies of the state. data_parallel_shard_degree: parts that each copy is cut into;
    −1: as many as there are ranks for. The others are names for what does not exist yet, and must be 1.
    """

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1

    def __post_init__(self) -> None:
        for kind in RESERVED:
            degree = getattr(self, f"{kind}_parallel_degree")
            if degree != 1:
                raise ConfigError(
                    f"{kind}_parallel_degree {degree}: {kind} parallelism does not exist yet; leave it at 1, and set "
                    "data_parallel_shard_degree"
                )
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if replicate < 1:
            raise ConfigError(f"data_parallel_replicate_degree {replicate}: must be at least 1")
        if shard < 1 and shard != -1:
            raise ConfigError(f"data_parallel_shard_degree {shard}: must be at least 1, or -1: the rest of the ranks")

    def mesh_shape(self, ranks: int) -> tuple[int, int]:
        """Return how many copies of the state there are, and in how many parts each.

        Raises ConfigError if they do not take all ranks.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if shard == -1:
            if ranks % replicate:
                raise ConfigError(
                    f"data_parallel_replicate_degree {replicate}: does not divide {ranks} ranks; take a divisor"
                )
            shard = ranks // replicate
        if replicate * shard != ranks:
            raise ConfigError(
                f"data_parallel_shard_degree {shard}: times data_parallel_replicate_degree {replicate} is "
                f"{replicate * shard}, and there are {ranks} ranks; set it to -1, for the rest of the ranks"
            )
        return replicate, shard

    def mesh(self, ranks: Ranks, device: str) -> "DeviceMesh":
        """Return the mesh of all ranks for `shard_model`; every rank must ask for it. device: such as "cuda:1"."""
        from torch.distributed.device_mesh import init_device_mesh

        replicate, shard = self.mesh_shape(ranks.count)
        kind = device.partition(":")[0]
        if replicate == 1:
            return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))
