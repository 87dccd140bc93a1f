"""The ranks that share a training step.

Every rank knows the whole batch, so the divisors of a loss (targets, tokens) need no communication. Each rank computes
its own rows, and sums over ranks equal the sums of one process.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from heddle import errors
from heddle.errors import ConfigError
from heddle.torch_private import limit_waits

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

WAIT_SECONDS = 45.0
TEXT_BYTES = 1024  # per text that ranks exchange
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `count`. The default is one process.

    wait_seconds: how long a rank waits for another within a training step before that rank counts as lost.
    """

    rank: int = 0
    count: int = 1
    wait_seconds: float = WAIT_SECONDS

    def rows(self, rows: int, parts: int) -> list[slice]:
        """Return this rank's rows of each of `parts` equal parts of a batch. Raises ConfigError if they are unequal."""
        share, rest = divmod(rows, parts * self.count)
        if rest:
            shares = f"{self.count} ranks" if parts == 1 else f"{self.count} ranks × {parts} accumulated parts"
            raise ConfigError(
                f"batch_size {rows}: is not a multiple of {shares}; choose a multiple of {parts * self.count}"
            )
        starts = range(self.rank * share, rows, share * self.count)
        return [slice(start, start + share) for start in starts]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only rank that prints and writes shared files."""
        return self.rank == 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [ranks, ...] in rank order, on each rank. They share shape and dtype.

        Collective, like all methods below: all ranks call them in the same order, from the training thread.
        """
        if self.count == 1:
            return tensor[None]
        from torch import distributed

        sent = tensor.contiguous()
        if distributed.get_backend() == "nccl":  # it connects only GPUs
            sent = sent.cuda()
        gathered = [torch.empty_like(sent) for _ in range(self.count)]
        distributed.all_gather(gathered, sent)
        return torch.stack(gathered).to(tensor.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on each rank, with the same order of summands everywhere."""
        return tensor if self.count == 1 else self.gather(tensor).sum(0)

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks."""
        return number if self.count == 1 else int(self.gather(torch.tensor(number)).max())

    def first_text(self, text: str | None) -> str | None:
        """Return the text of the first rank that has one, on each rank: at most its first 1,024 bytes in UTF-8."""
        if self.count == 1:
            return text
        encoded = (text or "").encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        texts = (
            bytes(row).rstrip(b"\0") for row in self.gather(torch.tensor(list(encoded), dtype=torch.uint8)).tolist()
        )
        return next((encoded.decode(errors="ignore") for encoded in texts if encoded), None)

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.largest(0)

    def in_order(self, function: Callable[[], Result]) -> Result:
        """Call a function on rank 0, then on the first rank of each other machine, then on the others.

        So one rank per machine fills its cache, and the others read it. They wait however long it takes. Only within
        `join_ranks`.
        """
        if self.count == 1:
            return function()
        from heddle.distributed.process_group import in_order

        return in_order(self, function)

    def limit_waits(self) -> None:
        """From now on, wait at most `wait_seconds` in any collective; a rank that takes longer is lost."""
        if self.count > 1:
            limit_waits(self.wait_seconds)


ONE_PROCESS = Ranks()


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks share a model, by `shard_model`: each forward pass is then a collective of all ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def reduce_with_next_backward(model: nn.Module, reduce: bool) -> None:
    """Set whether the next backward pass of a sharded model sums gradients over ranks, or a later one does."""
    if is_sharded(model):
        cast("FSDPModule", model).set_requires_gradient_sync(reduce)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on each rank; for a sharded tensor a collective that gathers its shards."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows, as a plain tensor that shares their storage."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def with_local_part(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return a tensor with the placement of `tensor`, of which this rank holds `rows`."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return rows
    placed: Tensor = type(sharded).from_local(
        rows, sharded.device_mesh, sharded.placements, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def held_rows(tensor: Tensor) -> slice:
    """Return this rank's rows; all rows of a tensor that is not sharded."""
    start, count, sharded = 0, len(tensor), as_sharded(tensor)
    if sharded is not None:
        for dim, placement in enumerate(sharded.placements):
            if placement.is_shard():
                size = -(-count // sharded.device_mesh.size(dim))
                first = min(count, sharded.device_mesh.get_local_rank(dim) * size)
                start, count = start + first, min(size, count - first)
    return slice(start, start + count)


def as_sharded(tensor: Tensor) -> "DTensor | None":
    """Return the tensor itself if it is a DTensor, else None.

    DTensor's module takes a second to import: if it was never imported, no tensor is sharded.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


# Ranks exchange texts and share failures, so that no rank waits for one that has failed.


_HEARTBEAT_SECONDS = 10.0
SHARED_ERRORS = (errors.CheckpointError, errors.ConfigError, errors.DataError, errors.MachineError)


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Return each rank's text, in rank order, on all ranks. Collective."""
    if ranks.count == 1:
        return [text]
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = ranks.gather(torch.tensor(len(content))).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(content)] = content
    rows = ranks.gather(padded)
    return [row[:size].numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def call_on_all(ranks: Ranks, function: Callable[[], str]) -> list[str]:
    """Call `function` on each rank and return all results, on all ranks.

    If it fails on a rank, all ranks raise the error of the first rank that failed. The function runs in a thread and
    must not communicate: meanwhile the ranks exchange heartbeats, so that a long call, such as writing a large file, is
    not mistaken for a rank that hangs.
    """
    if ranks.count == 1:
        return [function()]
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(function)
        outcomes: list[Any] = [None]
        while None in outcomes:
            wait([pending], _HEARTBEAT_SECONDS)
            outcomes = [json.loads(text) for text in gather_texts(ranks, json.dumps(_outcome(pending)))]
    for rank, (kind, text) in enumerate(outcomes):
        if kind and rank == ranks.rank:
            pending.result()
        if kind:
            error_class = next((each for each in SHARED_ERRORS if each.__name__ == kind), None)
            if error_class is not None:
                raise error_class(text)
            raise errors.MachineError(f"rank {rank}: failed ({kind}: {text}); its own message says where")
    return [text for _, text in outcomes]


def _outcome(pending: Future[str]) -> tuple[str, str] | None:
    """Return the error's class name and message, or "" and the result; None while the function runs."""
    if not pending.done():
        return None
    error = pending.exception()
    if error is None:
        return "", pending.result()
    kind = next((each for each in SHARED_ERRORS if isinstance(error, each)), type(error))
    return kind.__name__, str(error)


# Degrees of parallelism, with torchtitan's names.

RESERVED = ("tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Degrees of parallelism. They are not part of a run's identity: it may continue with others.

    data_parallel_replicate_degree: copies of the state. data_parallel_shard_degree: shards of each copy; −1: as many as
    there are ranks for. The others are reserved names, not implemented yet, and must be 1.
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
                    f"{kind}_parallel_degree {degree}: {kind} parallelism is not implemented yet; leave it at 1, and "
                    "set data_parallel_shard_degree"
                )
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if replicate < 1:
            raise ConfigError(f"data_parallel_replicate_degree {replicate}: must be at least 1")
        if shard < 1 and shard != -1:
            raise ConfigError(
                f"data_parallel_shard_degree {shard}: must be at least 1, or -1 for the rest of the ranks"
            )

    def mesh_shape(self, ranks: int) -> tuple[int, int]:
        """Return the number of copies of the state, and the number of shards of each copy.

        Raises ConfigError if their product is not the number of ranks.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if shard == -1:
            if ranks % replicate:
                raise ConfigError(
                    f"data_parallel_replicate_degree {replicate}: does not divide {ranks} ranks; choose a divisor"
                )
            shard = ranks // replicate
        if replicate * shard != ranks:
            raise ConfigError(
                f"data_parallel_shard_degree {shard}: times data_parallel_replicate_degree {replicate} is "
                f"{replicate * shard}, and there are {ranks} ranks; set it to -1 for the rest of the ranks"
            )
        return replicate, shard

    def mesh(self, ranks: Ranks, device: str) -> "DeviceMesh":
        """Return the mesh of all ranks for `shard_model`. Collective. device: such as "cuda:1"."""
        from torch.distributed.device_mesh import init_device_mesh

        replicate, shard = self.mesh_shape(ranks.count)
        kind = device.partition(":")[0]
        if replicate == 1:
            return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
        return init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))
