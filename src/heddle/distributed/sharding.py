"""Fully sharded data parallelism of a model, by torch's FSDP2: each layer is a group, the rest is the root group.

The root group holds embedding, last norm and head, so that a tied weight is in one group, and stays gathered between
the model's forward pass and its backward pass, because the loss reads the head's weight outside both. The encoder is
part of the root group; its layers are groups. What no gradient teaches, such as the balancing bias of experts, stays
whole on each rank. Gradients are summed over ranks, not averaged: the loss is divided by the targets of all ranks.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from heddle.model.decoder import Decoder


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded.

    product_dtype: weights are gathered, and layers compute, in this dtype; None: in that of the parameters.
    reduce_dtype: of gradients on their way; None: that of the parameters. reshard: gathered weights of a layer are
    freed after its forward pass. offload: shards, gradients and moments lie in the host's memory.
    """

    product_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool = True
    offload: bool = False


def shard_model(model: Decoder, mesh: DeviceMesh, sharding: Sharding | None = None) -> Decoder:
    """Shard a model in place over `mesh`: one dimension (shard), or two (replicate, shard). Returns the model.

    The model may be on the meta device; `initialize_shards` then fills it. Compile layers and add adapters before.
    """
    sharding = sharding or Sharding()
    precision = MixedPrecisionPolicy(
        param_dtype=sharding.product_dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if sharding.offload else OffloadPolicy()
    whole = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    stacks = [model] if model.encoder is None else [model, model.encoder]
    groups: list[nn.Module] = [layer for stack in stacks for layer in stack.layers]
    for group in (*groups, model):
        own_parameters = set(group.parameters())
        fully_shard(
            group,
            mesh=mesh,
            reshard_after_forward=sharding.reshard if group is not model else False,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=whole & own_parameters,
        )
        sharded = cast(FSDPModule, group)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # every backend can sum
    if model.encoder is not None:
        register_fsdp_forward_method(model, "encode")
    return model


def reshard(model: Decoder) -> None:
    """Free the gathered weights of the root group, which a forward pass without a backward pass leaves in place."""
    if isinstance(model, FSDPModule):
        model.reshard()
