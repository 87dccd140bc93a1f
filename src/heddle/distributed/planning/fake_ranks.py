"""A process group and tensors that are not there: one process stands for a rank of many, and computes shapes alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from heddle.distributed.planning.ranks import RankLayout
from heddle.errors import ConfigError


@contextmanager
def fake_ranks(layout: RankLayout) -> Iterator[DeviceMesh]:
    """The mesh of a layout, within a process group of as many ranks, whose rank 0 is this process.

    Raises ConfigError within a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if distributed.is_initialized():
        raise ConfigError("dry run: needs a process of its own, without a process group; leave torchrun out")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.gpus)
    try:
        shape: tuple[int, ...] = (layout.shard,)
        names: tuple[str, ...] = ("shard",)
        if layout.replicate > 1:
            shape, names = (layout.replicate, *shape), ("replicate", *names)
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        distributed.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """Within the block, tensors have shapes and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)
